"""The digests of a run, computed again by code that shares nothing with the code that wrote them
but the readers of files.
"""
