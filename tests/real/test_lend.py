"""A run whose trainer's core generates while the trainer waits, in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midflight.observe.timeline import RolloutTimed, read_timeline

from .processes import CONFIG, Command, steps

pytestmark = pytest.mark.timeout(120)


def test_the_lent_engine_answers_while_the_trainer_waits_and_every_version_reaches_it(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG.replace("max_tokens = 6", "max_tokens = 40"))
    run = tmp_path / "run"
    command = Command("train", "small.toml", "--folder", run, "--set", "run.steps=5", "--set", "engine.lend=true", folder=tmp_path)
    try:
        assert command.wait(100) == 0, command.said
    finally:
        command.end()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["failed_requests"], summary["failed_rollouts"]) == (5, 0, 0)
    assert [line["step"] for line in steps(run)] == [1, 2, 3, 4, 5]
    turns = [turn for line in read_timeline(run / "timeline.jsonl") if isinstance(line, RolloutTimed) for turn in line.turns]
    where = {engine for turn in turns for engine, *_ in turn.placed}
    assert where == {"engine0", "engine1"}
