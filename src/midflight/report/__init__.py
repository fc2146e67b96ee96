"""A run as one file that can be attached to a result. Reads runs through `archive`."""
