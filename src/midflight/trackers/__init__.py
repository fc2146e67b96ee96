"""Copies of what a run measures to other people's trackers, each an extra; one that fails never stops a run."""
