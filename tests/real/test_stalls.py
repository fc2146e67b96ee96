"""I9: a part that stands still is shown, with what it does and where it stands, and started again, or ends the run with its name."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .processes import CONFIG, Command, alive, free_port, gone, steps

STALL = 6
"""Seconds: a busy machine may well keep a healthy process from its heart for three."""
BLOCKING = """
import time
from midflight.environments.single_turn import answer

started = 0

async def solve(task, client):
    global started
    started += 1
    if started > 40:
        time.sleep(1000)  # as a synchronous client does that waits for its own loop
    return await answer(task, client)
"""


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    (tmp_path / "small.toml").write_text(CONFIG)
    started: list[Command] = []

    def start(*sets: str) -> Command:
        words = [x for one in sets for x in ("--set", one)]
        started.append(Command("train", "small.toml", "--folder", "run", *words, folder=tmp_path))
        return started[-1]

    yield start
    for command in started:
        command.end()


def further(command: Command, folder: Path) -> None:
    """Waits for a step more than there are."""
    made = steps(folder)[-1]["version"] if steps(folder) else 0
    command.until(lambda: any(line["version"] > made for line in steps(folder)), "a further step")


def stop(command: Command, part: str) -> int:
    (pid,) = command.parts()[part]
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_stopped_engine_trainer_or_rollout_process_is_named_and_started_again_and_a_hangup_is_a_stop(
    train: Callable[..., Command], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = train("run.steps=100000", "trainer.checkpoint_every=1", f"run.stall_seconds={STALL}")
    further(command, run)
    for part, name in (("engine", "engine0"), ("trainer", "trainer"), ("rollout", "rollout")):
        command.until(lambda: (run / "checkpoints" / "latest").exists(), "checkpoint")
        stopped, began = stop(command, part), time.monotonic()
        command.until(lambda name=name: f"stall: {name} is stopped (SIGSTOP)" in command.said, f"report of {name}")
        assert time.monotonic() - began < STALL + 10
        assert gone([stopped], seconds=5)
        further(command, run)
    assert re.search(r"trainer: last heard of \d+ s ago.*\n    \w+ .*, since \d+", command.said), "the report says what each does"
    assert command.said.count("The trainer goes on from its last checkpoint; engines, gateway and agents stay") == 1, command.said
    assert command.said.count("The run goes on from its last checkpoint") == 1, "only the rollout process costs a restart of the ring"
    parts = [pid for found in command.parts().values() for pid in found]
    command.process.send_signal(signal.SIGHUP)
    assert command.wait(10) == 129
    assert gone(parts, seconds=0.5) and "Traceback" not in command.said


def test_a_loop_that_an_agent_blocks_ends_the_run_with_the_agents_line(train: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "blocking.py").write_text(BLOCKING)
    command = train(
        "environment.entry=blocking:solve", "environment.workers=0", f"run.stall_seconds={STALL}", "run.restarts=0", "run.steps=1000"
    )
    assert command.wait(60) == 1
    assert "rollout's event loop is blocked" in command.errors.read_text(), command.said
    assert "blocking.py" in command.said and "in solve" in command.said, "the stacks show where"


def test_a_trainer_that_stood_for_a_while_goes_on_without_a_restart(train: Callable[..., Command], tmp_path: Path) -> None:
    """Long enough for idle connections to be closed, and too short to count as a standstill."""
    command = train("run.steps=40", "run.stall_seconds=60")
    further(command, tmp_path / "run")
    pid = stop(command, "trainer")
    time.sleep(7)
    os.kill(pid, signal.SIGCONT)
    assert command.wait() == 0, command.said
    assert "goes on from" not in command.said and "stall" not in command.said


def test_serve_goes_on_while_one_engine_lives_and_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    sizes = ("hidden_size=32", "intermediate_size=64", "num_layers=1", "num_heads=2", "num_kv_heads=1")
    made = Command("new-model", "model", *(x for size in sizes for x in ("--set", f"model.{size}")), folder=tmp_path)
    assert made.wait() == 0, made.said
    port = free_port()
    command = Command("serve", "--model", "model", "--engines", 2, "--port", port, "--set", "run.restarts=0", folder=tmp_path)
    try:
        command.until(lambda: "ready: " in command.said, "announcement of the address")
        command.kill("engine", 1)
        command.until(lambda: "Its restarts are spent; engine0 goes on." in command.said, "word of the other engine")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            assert answer.status == 200
        parts = [pid for found in command.parts().values() for pid in found]
        for pid in parts:
            os.kill(pid, signal.SIGSTOP)  # none of them ends by being asked
        began = time.monotonic()
        command.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert all(alive(pid) for pid in parts)
        command.process.send_signal(signal.SIGINT)
        assert command.wait(10) == 130 and time.monotonic() - began < 2
        assert gone(parts, seconds=0.5)
    finally:
        command.end()
