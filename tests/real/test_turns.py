"""A run whose engines sleep while the trainer steps, in real processes: killed in each other's turn, and made again step by step without turns."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from pathlib import Path

import pytest

from midflight.archive.ledger import ledger_of
from midflight.run.device_lock import DEVICE_LOCK

from .processes import CONFIG, Command, steps
from .test_replay import GRADED
from .test_train import at_step, check_no_step_twice, check_nothing_left, check_store

pytestmark = pytest.mark.timeout(300)
SETS = ("engine.share=time", "environment.max_tokens=40", "environment.entry=graded:answer", "trainer.learning_rate=0.01")


def started(folder: Path, *sets: str, forked: bool = True) -> Command:
    (folder / "small.toml").write_text(CONFIG)
    (folder / "graded.py").write_text(GRADED)
    words = [x for one in (*SETS, *sets) for x in ("--set", one)]
    return Command("train", "small.toml", "--folder", "run", *words, folder=folder, forked=forked)


def is_trainers(run: Path) -> bool:
    """Whether the trainer has the devices at this moment, so that all engines sleep."""
    with (run / DEVICE_LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def are_awake(run: Path) -> bool:
    """Whether an engine has any of a device at this moment."""
    with (run / DEVICE_LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return not is_trainers(run)
    return False


def stopped_in_its_turn(command: Command, run: Path) -> int:
    """Stops the trainer while it has the devices. Returns its process id."""
    trainer = command.parts()["trainer"][0]
    for _ in range(200):
        while not is_trainers(run):
            assert command.process.poll() is None, command.said
        os.kill(trainer, signal.SIGSTOP)
        time.sleep(0.05)
        if is_trainers(run):
            return trainer
        os.kill(trainer, signal.SIGCONT)
    raise AssertionError("the trainer never had the devices for long")


def check_end(command: Command, run: Path, num_steps: int, parts: list[int]) -> None:
    assert command.wait(150) == 0, command.said
    check_no_step_twice(run, num_steps=num_steps)
    check_store(run)
    check_nothing_left(command, parts, run)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["failed_requests"], summary["failed_rollouts"]) == (num_steps, 0, 0)
    found = ledger_of(run)
    assert found.balanced, found.mistakes


def test_i8_engines_and_trainers_killed_while_engines_sleep_lose_nothing_and_engines_wake(tmp_path: Path) -> None:
    """An engine that is started again waits for the devices. A trainer that dies gives them back at once."""
    run = tmp_path / "run"
    command = started(tmp_path, "run.steps=14", "trainer.checkpoint_every=3", "engine.count=2")
    try:
        at_step(command, run, 3)
        trainer = stopped_in_its_turn(command, run)
        engines = set(command.parts()["engine"])
        killed = command.kill("engine")
        command.until(lambda: len(set(command.parts()["engine"]) - {killed}) == 2, "an engine in its place")
        time.sleep(1.0)
        assert is_trainers(run), "the new engine has taken nothing"
        os.kill(trainer, signal.SIGCONT)
        at_step(command, run, 6)
        assert engines - {killed} < set(command.parts()["engine"])

        trainer = stopped_in_its_turn(command, run)
        os.kill(trainer, signal.SIGKILL)
        command.until(lambda: are_awake(run), "engine that wakes after the trainer's death", 30)
        assert set(command.parts().get("trainer", ())) <= {trainer}, "they wait for no new one"
        command.until(lambda: set(command.parts().get("trainer", ())) - {trainer}, "a new trainer")
        parts = [pid for found in command.parts().values() for pid in found]
        check_end(command, run, 14, parts)
    finally:
        command.end()


def test_steps_in_turns_are_those_without_to_the_bit(tmp_path: Path) -> None:
    """The recorded batches are trained again by a trainer that has its device for itself: the digests of all weights agree."""
    run = tmp_path / "run"
    # not forked: a forked trainer has the threads of what it was forked from, and other last bits
    command = started(tmp_path, "run.steps=6", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=6", forked=False)
    try:
        check_end(command, run, 6, [])
    finally:
        command.end()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["overlap_share"] == 0.0, "no engine generates while the trainer steps"
    assert summary["rollouts_spanning_versions"] > 0, "requests were cut by turns, and went on"
    weights = [line["digests"]["weights_after"] for line in steps(run)]
    assert len(set(weights)) == 6, "every step has moved the weights"
    for number in (2, 6):
        again = Command("replay", "run", "--step", number, folder=tmp_path, forked=False)
        assert again.wait(120) == 0, again.said
        assert again.said.count("equal") == 5, again.said
        assert "differs" not in again.said
