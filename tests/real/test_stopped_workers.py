"""A worker that is stopped costs its run the seconds until that is found, and no rollout: those that it ran begin again elsewhere."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .processes import CONFIG, Command, gone, journal, steps

STALL = 6
AGENT = """
import asyncio

async def solve(task, client):
    c = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
    await asyncio.sleep(0.3)  # not waiting for the gateway, so that a death would be its fault
    return float(len(c.choices[0].message.content) % 2)
"""


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "agent.py").write_text(AGENT)
    started: list[Command] = []

    def start(*sets: str) -> Command:
        words = [x for one in ("environment.entry=agent:solve", f"run.stall_seconds={STALL}", *sets) for x in ("--set", one)]
        started.append(Command("train", "small.toml", "--folder", "run", *words, folder=tmp_path))
        return started[-1]

    yield start
    for command in started:
        command.end()


def ended(folder: Path) -> list[dict[str, object]]:
    return [line for line in journal(folder) if line["kind"] == "rollout" and line.get("error")]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_whose_worker_is_stopped_goes_on_and_no_rollout_is_lost_or_blamed(
    workers: int, train: Callable[..., Command], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = train(f"environment.workers={workers}", "run.steps=8", "rollout.retries=0", "environment.sources.0.heldout=0")
    command.until(lambda: len(steps(run)) >= 2, "two steps")
    stopped = sorted(command.parts()["worker"])[0]
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    command.until(lambda: "is stopped (SIGSTOP)" in command.said, "report of the worker")
    assert time.monotonic() - began < STALL + 10
    assert gone([stopped], seconds=5)
    assert command.wait() == 0, command.said
    assert len(steps(run)) == 8
    assert "nothing is known to hang" not in command.said and "worker0 is started again" in command.said
    summary = json.loads((run / "summary.json").read_text())
    assert summary["failed_rollouts"] == 0, command.said


def test_a_worker_that_is_stopped_before_it_ever_joined_is_found_too(train: Callable[..., Command], tmp_path: Path) -> None:
    command = train("environment.workers=1", "run.steps=2", "environment.sources.0.heldout=0")
    (stopped,) = command.until(lambda: command.parts().get("worker"), "worker")
    os.kill(stopped, signal.SIGSTOP)
    command.until(lambda: "worker0 is stopped (SIGSTOP)" in command.said, "report of the worker", seconds=STALL + 20)
    assert command.wait() == 0, command.said
    assert len(steps(tmp_path / "run")) == 2
