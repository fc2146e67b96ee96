"""Midflight under the names of other libraries. None of them is imported, or needed."""
