"""Midflight as a library: `Trainer`, for scripts, threads and notebooks. It asks the launcher for
what the command line asks it for.
"""
