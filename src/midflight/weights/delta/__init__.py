"""Versions as lossless differences: a wrapper of any publisher that keeps what it published, and one of any receiver."""
