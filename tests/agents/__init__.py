"""Agents as they are, trained: the pages of `docs/adapters` that environments of their own run (`make test-agents`)."""

AGENTS = ("any-program", "frameworks")
"""Those pages."""
