"""The parent of a run: it starts the processes, listens to them, restarts those that die, and stops
all.
"""
