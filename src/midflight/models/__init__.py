"""Vocabulary about models: sizes, loading, tensor names, fingerprints, export.

`sizes` and `fingerprint` do without torch; the other modules import it, so import them only where
tensors are handled.
"""
