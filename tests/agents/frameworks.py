"""The agents of docs/adapters/frameworks.md: that in its text, and those of `examples/agents` that its table names."""

from __future__ import annotations

from dataclasses import replace

from tests.pages.blocks import ROOT, Block, blocks_of

PAGE = ROOT / "docs" / "adapters" / "frameworks.md"
SHOWN = "openai_agent"
EXAMPLES = ("langgraph_agent", "pydantic_agent", "smol_agent", "swe_agent")
WIDE = {"smol_agent": 16384}
"""Contexts that are larger than the page's own command says."""


def code_of(name: str) -> str:
    if name == SHOWN:
        (shown,) = [block.text for block in blocks_of(PAGE) if block.file == f"{name}.py"]
        return shown
    return (ROOT / "examples" / "agents" / f"{name}.py").read_text()


def story_of(name: str) -> list[Block]:
    """The page, as somebody does it with this agent."""
    entry = SHOWN if name == SHOWN else f"examples.agents.{name}"
    context = f"model.max_context={WIDE.get(name, 4096)}"
    return [
        replace(block, text=block.text.replace(SHOWN, entry).replace("model.max_context=4096", context))
        if block.language == "bash"
        else block
        for block in blocks_of(PAGE)
    ]
