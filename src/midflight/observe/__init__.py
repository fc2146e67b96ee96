"""The numbers that a run shows: facts come in, and go out as terminal, journal, summary, plot and
metrics. It does not import torch.
"""
