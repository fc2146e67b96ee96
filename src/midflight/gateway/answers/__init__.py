"""One answer: planned, generated over any number of attempts, read by its clients."""
