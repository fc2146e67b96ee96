"""Checks before a run. Each file looks at one thing. `table` lists all checks, and the callers of
each.
"""
