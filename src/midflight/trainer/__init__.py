"""Station 6: a batch in, a version out."""
