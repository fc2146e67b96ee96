"""Vocabulary about models: sizes, loading, tensor names, fingerprints, adapters, export.

Modules that are marked as torch-free, and `sizes`, do without torch. The others import it, so
import them only where tensors are handled.
"""
