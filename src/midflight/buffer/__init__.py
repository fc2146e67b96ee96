"""Station 5: decides which groups may start and which groups a step trains on, so that no token is
trained too old.
"""
