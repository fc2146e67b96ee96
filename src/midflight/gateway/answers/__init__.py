"""Answers: they are planned, generated over any number of attempts, and read by clients."""
