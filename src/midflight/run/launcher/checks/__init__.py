"""The checks before a run, a file for each thing that is looked at. `table` lists them all, and says
who asks each.
"""
