"""Where code that a model wrote runs, so that it can harm nobody: namespaces on this machine, or a
class of one's own.
"""
