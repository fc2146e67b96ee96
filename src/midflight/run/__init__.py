"""The processes of a run: the only place where stations meet."""
