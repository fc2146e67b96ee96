"""What a run shows of itself: facts come in, and go out as terminal, journal, summary, plot and
metrics. No torch.
"""
