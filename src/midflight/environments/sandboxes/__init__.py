"""Sandboxes for code that a model wrote, in which it can do no harm: namespaces on this machine, or
a class of one's own.
"""
