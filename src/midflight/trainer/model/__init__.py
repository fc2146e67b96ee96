"""The trainer's side of the architecture: log-probabilities, attention, head, ranks."""
