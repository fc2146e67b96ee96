"""Environments of other projects. Each module has `tasks`, the function of a source, and `play`,
the entry of an environment.
"""
