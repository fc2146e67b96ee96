"""I9: processes of a run times faults, with real processes. Each ends in progress, or in the right name. Every night all of them."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import faults
from .processes import CONFIG, ENVIRON, Command, children, free_port, gone, status_of, steps

pytestmark = pytest.mark.timeout(1700)
STALL = 6
"""Seconds: a busy machine may well keep a healthy process from its heart for three."""
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "explore"
AGENT = """
import asyncio

async def solve(task, client):
    c = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
    await asyncio.sleep(0.1)
    return float(len(c.choices[0].message.content) % 2)
"""
FAULTS = ("stopped", "blocked", "disconnected", "killed", "slow", "out of memory")
SIGNALS = {
    "stopped": signal.SIGSTOP,
    "blocked": faults.BLOCK,
    "disconnected": faults.DISCONNECT,
    "killed": signal.SIGKILL,
    "out of memory": faults.EXHAUST,
}
"""What asks for them. A slow process is stopped most of the time."""
RUNS = {
    "workers": (("environment.workers=2",), ("worker0", "worker1", "engine0", "trainer", "rollout")),
    "teacher and ranks": (("trainer.ranks=2", "distillation.teacher=teacher"), ("teacher", "trainer1")),
    "shards": (("gateway.shards=2", "environment.workers=1"), ("rollout1", "worker1")),
}
"""Options of a run, and the processes that faults are tried on there."""
ALWAYS = {
    "workers": [("worker0", fault) for fault in FAULTS],
    "teacher and ranks": [("teacher", "stopped"), ("trainer1", "stopped")],
    "shards": [("rollout1", "stopped"), ("rollout1", "blocked")],
}
"""What is tried with every change: `test_stalls` stops the others, `test_workers` kills them."""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Command]]:
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.setitem(ENVIRON, faults.VARIABLE, faults.__file__)
    started: list[Command] = []

    def start(*sets: str) -> Command:
        fixed = (
            "environment.entry=agent:solve",
            f"run.stall_seconds={STALL}",
            "run.restarts=100",
            "run.steps=100000",
            "trainer.checkpoint_every=1",
        )
        words = [x for one in (*fixed, "environment.sources.0.heldout=0", *sets) for x in ("--set", one)]
        started.append(Command("train", "small.toml", "--folder", "run", *words, folder=tmp_path))
        return started[-1]

    yield start
    for command in started:
        command.end()


def pid_of(command: Command, name: str) -> int | None:
    """Of the process that writes this part's log."""
    for pid in children(command.process.pid):
        try:
            if str(Path(f"/proc/{pid}/fd/2").readlink()).endswith(f"/logs/{name}.log"):
                return pid
        except OSError:
            continue
    return None


def ready_for_faults(pid: int) -> bool:
    """It handles the last of the signals that `faults` does."""
    return bool(int(status_of(pid).get("SigCgt", "0"), 16) >> (faults.BLOCK - 1) & 1)


def strike(pid: int, fault: str) -> None:
    if fault != "slow":
        os.kill(pid, SIGNALS[fault])
        return
    for _ in range(10):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.9)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)


def made(folder: Path) -> int:
    return len(steps(folder))


def try_fault(command: Command, run: Path, name: str, fault: str) -> None:
    """Waits for what must come: the name of a process that hangs, and in every case a further step."""
    command.until(lambda: (run / "checkpoints" / "latest").exists(), "checkpoint")
    before = made(run)
    command.until(lambda: made(run) > before + 1, "steps of a sound run", seconds=90)
    pid = command.until(lambda: pid_of(command, name), name)
    command.until(lambda: ready_for_faults(pid), f"start of {name}")
    said = len(command.said)
    strike(pid, fault)
    before = made(run)
    if fault in ("stopped", "blocked"):
        words = f"stall: {name} is stopped (SIGSTOP)" if fault == "stopped" else f"stall: {name}'s event loop is blocked"
        others = f"blocks the event loop of {name}"  # where the signal has met an agent
        command.until(
            lambda: words in command.said[said:] or others in command.said[said:], f"the name of {name} {fault}", seconds=STALL + 40
        )
        assert gone([pid], seconds=10)
        before = made(run)
    command.until(lambda: made(run) > before + 1, f"progress after {name} {fault}", seconds=STALL + 90)
    blamed = set(
        re.findall(
            r"stall: (\w+)(?:'s event loop)? (?:is stopped|is blocked|was not heard|was in quarantine|\w+ .* took no)", command.said[said:]
        )
    )
    assert blamed <= {name, "trainer" if name == "trainer1" else name}, f"{name} {fault}:\n{command.said[said:]}"
    assert fault != "slow" or not blamed, f"{name} {fault}:\n{command.said[said:]}"


@pytest.mark.parametrize("of", RUNS)
def test_i9_faults_of_processes_end_in_progress_or_in_the_right_name(of: str, train: Callable[..., Command], tmp_path: Path) -> None:
    sets, names = RUNS[of]
    if "distillation.teacher=teacher" in sets:
        sizes = ("hidden_size=32", "intermediate_size=64", "num_layers=1", "num_heads=2", "num_kv_heads=1")
        new = Command("new-model", "teacher", *(x for size in sizes for x in ("--set", f"model.{size}")), folder=tmp_path)
        assert new.wait() == 0, new.said
    command = train(*sets)
    for name, fault in [(name, fault) for name in names for fault in FAULTS] if NIGHTLY else ALWAYS[of]:
        try_fault(command, tmp_path / "run", name, fault)
    assert "nothing is known to hang" not in command.said


def test_i9_a_companion_that_is_stopped_is_named_and_started_again_with_its_server(tmp_path: Path) -> None:
    sizes = ("hidden_size=32", "intermediate_size=64", "num_layers=1", "num_heads=2", "num_kv_heads=1")
    new = Command("new-model", "model", *(x for size in sizes for x in ("--set", f"model.{size}")), folder=tmp_path)
    assert new.wait() == 0, new.said
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {Path(__file__).parents[1] / "run" / "fake_vllm.py"} "$@"\n')
    python.chmod(0o755)
    options = ("engine.kind=vllm", f"engine.python={python}", f"run.stall_seconds={STALL}", f"run.folder={tmp_path / 'run'}")
    words = [x for one in options for x in ("--set", one)]
    command = Command("serve", "--model", "model", "--port", free_port(), *words, folder=tmp_path)
    try:
        command.until(lambda: "ready: " in command.said, "announcement of the address")
        pid = pid_of(command, "engine0")
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        command.until(lambda: "stall: engine0 is stopped (SIGSTOP)" in command.said, "the name of the companion", seconds=STALL + 40)
        assert gone([pid], seconds=10)
        command.until(lambda: pid_of(command, "engine0") not in (None, pid), "another companion")
    finally:
        command.end()
