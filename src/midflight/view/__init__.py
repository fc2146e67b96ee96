"""The viewer: pages over runs, live and afterwards, in a process of its own that reads runs through
`archive` and can stop none.
"""
