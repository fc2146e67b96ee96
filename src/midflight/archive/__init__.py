"""Runs as they lie in their folders, read only: found and described, while they go on, afterwards,
and after a crash. It does not import torch.
"""
