"""Places for the parts of a run: on this machine, or seats on the machines of a cluster. A part is
the same process in both.
"""
