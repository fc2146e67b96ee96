"""The trainer process: warm start, steps, versions, and the ranks that share them."""
