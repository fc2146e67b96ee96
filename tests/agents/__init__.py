"""Agents as they are, trained: the pages of `docs/adapters` that an environment of their own runs (`make test-agents`)."""

AGENTS = ("any-program", "langgraph", "pydantic-ai", "smolagents")
