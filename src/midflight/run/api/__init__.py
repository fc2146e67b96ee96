"""HTTP between the processes of a run: the routes of batches, steps, sessions and claims, and their
clients.
"""
