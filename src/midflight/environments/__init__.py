"""Environments: the tasks of a run, the rollouts that try them, and the rewards."""
