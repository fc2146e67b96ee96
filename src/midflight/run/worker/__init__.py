"""The process that runs agents: it is given rollouts, runs their agents, and reports the results.
It does not import torch.
"""
