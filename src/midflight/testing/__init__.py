"""For tests, ours and yours: an event loop on virtual time, a scripted engine and trainer, a whole
ring in one process.
"""
