"""HTTP between the processes of a run: batches, steps, sessions and claims, with client and
routes.
"""
