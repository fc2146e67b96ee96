"""The embedded engine: continuous batching over any decoder-only model of `transformers`, in this
process.
"""
