"""Rollouts that workers outside claim, where there are none: the terminal says what is waited for, and all goes on when they come. Real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .processes import CONFIG, ENVIRON, Command, journal

WORKER = Path(__file__).parents[2] / "examples" / "claims_worker.py"
CLAIMED = ("--set", "environment.entry=midflight.environments.claimed:claimed", "--set", "run.stall_seconds=3")


def says(command: Command, *words: str) -> Callable[[], bool]:
    return lambda: all(word in command.said for word in words)


def ends_with_a_worker(command: Command, endpoint: Path) -> None:
    worker = subprocess.Popen([sys.executable, str(WORKER), str(endpoint)], env=ENVIRON)
    try:
        assert command.wait(120) == 0, command.said
    finally:
        worker.kill()
        worker.wait(10)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(CONFIG)
    return tmp_path


def test_a_run_says_that_nobody_claims_and_since_when_and_goes_on_when_a_worker_comes(here: Path) -> None:
    options = ("--set", "run.steps=1", "--set", "warm_start.max_steps=2", "--set", "environment.sources.0.heldout=2")
    command = Command("train", "small.toml", "--folder", "run", *options, *CLAIMED, folder=here)
    try:
        words = (
            "alarm: nobody has claimed a rollout for",
            "rollouts wait to be claimed, the oldest for",
            "no worker has claimed one so far",
        )
        command.until(says(command, *words), "an alarm")
        command.until(says(command, "which waits for a worker outside"), "a report of what waits for whom")
        assert [line["name"] for line in journal(here / "run") if line["kind"] == "alarm"][:1] == ["unclaimed"]
        ends_with_a_worker(command, here / "run" / "endpoint.json")
    finally:
        command.end()


def test_an_evaluation_says_where_workers_find_what_they_need(here: Path) -> None:
    made = Command("new-model", "model", folder=here)
    assert made.wait() == 0, made.said
    command = Command("evaluate", "model", "--config", "small.toml", "--folder", "scores", *CLAIMED, folder=here)
    try:
        command.until(says(command, "alarm: nobody has claimed a rollout for", "scores/endpoint.json"), "an alarm")
        ends_with_a_worker(command, here / "scores" / "endpoint.json")
        assert "spell_backward: 0." in command.said and not (here / "scores" / "endpoint.json").exists()
    finally:
        command.end()
