"""Where the trainer meets the architecture: log-probabilities, attention, head, ranks."""
