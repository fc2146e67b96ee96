"""The process that runs agents: it is given rollouts, runs their agents, and reports what came of
them. Torch-free.
"""
