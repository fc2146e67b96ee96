"""Runs of three steps on environments of other people, and what holds of each: every step's tokens are those that its rollouts recorded."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from .processes import Command, journal, steps

SMALL = """
[run]
name = "adapted"
steps = 3
[model]
hidden_size = 32
intermediate_size = 64
num_layers = 1
num_heads = 2
num_kv_heads = 1
max_context = {context}
[rollout]
groups_per_step = 2
group_size = 4
max_staleness = 1
[environment]
workers = 1
"""


def adapted(folder: Path, text: str, *, context: int = 2048, forked: bool = True, seconds: float = 140) -> dict[str, Any]:
    """The summary of a run whose `[environment]` goes on with `text`."""
    (folder / "small.toml").write_text(SMALL.format(context=context) + text)
    command = Command("train", "small.toml", "--folder", "run", folder=folder, forked=forked)
    try:
        assert command.wait(seconds) == 0, command.said
    finally:
        command.end()
    return checked(folder / "run")


def checked(run: Path) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text())
    made = steps(run)
    assert [step["step"] for step in made] == [1, 2, 3] and summary["failed_rollouts"] == 0, journal(run)[-1]
    assert all(step["tokens"] == step["trainer"]["tokens/trained"] > 0 for step in made)
    assert made[-1]["totals"]["trained_tokens"] == sum(step["tokens"] for step in made)
    with sqlite3.connect(run / "store.sqlite") as store:
        assert store.execute("SELECT COUNT(*) FROM groups WHERE state = 'trained'").fetchone() == (6,)
    return summary
