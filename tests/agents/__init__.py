"""Agents as they are, trained: the pages of `docs/adapters` that environments of their own run (`make test-agents`)."""

AGENTS = ("any-program", "langgraph", "mini-swe-agent", "openai-agents", "pydantic-ai", "smolagents")
