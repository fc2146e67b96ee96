"""Midflight as a library: `Trainer`, for scripts, threads and notebooks. It uses the launcher as
the command line does.
"""
