"""Whole training runs in real processes: what they leave behind, and what kills and interrupts cannot break (I2, I8, I9)."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midflight.run.scratch import remove_left

from .processes import CONFIG, Command, alive, gone, journal, segments, steps


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts `midflight train` on the small configuration; whatever is left of it is killed after the test."""
    config = tmp_path / "small.toml"
    config.write_text(CONFIG)
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        sets = [x for argument in arguments for x in (["--set", argument] if "=" in argument else [argument])]
        started.append(Command("train", config, "--folder", tmp_path / "run", *sets, folder=tmp_path))
        return started[-1]

    yield start
    for command in started:
        command.end()


def at_step(command: Command, folder: Path, number: int) -> None:
    command.until(lambda: any(line["step"] >= number for line in steps(folder)), f"step {number}")


def check_store(folder: Path) -> None:
    """I8: the store is whole, nothing is on lease, and no group is trained beside being anything else."""
    with sqlite3.connect(folder / "store.sqlite") as store:
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert store.execute("SELECT COUNT(*) FROM leases").fetchone() == (0,)
        assert store.execute("SELECT COUNT(*) FROM groups WHERE lease IS NOT NULL").fetchone() == (0,)


def check_no_step_twice(folder: Path, *, num_steps: int, groups_per_step: int = 2) -> None:
    """Steps 1, 2, ... once each, under versions that only grow; as many groups are trained as the steps took (I8)."""
    lines = steps(folder)
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    versions = [line["version"] for line in lines]
    assert versions == sorted(set(versions))
    with sqlite3.connect(folder / "store.sqlite") as store:
        assert store.execute("SELECT COUNT(*) FROM groups WHERE state = 'trained'").fetchone() == (num_steps * groups_per_step,)


def check_nothing_left(command: Command, parts: list[int], folder: Path) -> None:
    assert not [pid for pid in parts if alive(pid)]
    assert not segments(folder)


def test_i8_i9_an_engine_killed_in_mid_run_costs_no_request_and_the_exported_model_scores_as_the_run_said(
    train: Callable[..., Command], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = train("run.steps=60", "warm_start.target_accuracy=0.02", "warm_start.max_steps=60", "warm_start.evaluate_every=30")
    at_step(command, run, 3)
    killed = command.kill("engine")
    parts = [pid for found in command.parts().values() for pid in found]
    assert command.wait() == 0, command.said
    assert not alive(killed) and "engine0 is started again" in command.said
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["failed_requests"], summary["failed_rollouts"], summary["steps"]) == (0, 0, 60)
    assert summary["max_token_staleness"] <= 4 and summary["weight_updates"] > 0
    assert (run / "plot.png").stat().st_size > 1000
    check_no_step_twice(run, num_steps=60)
    check_store(run)
    check_nothing_left(command, parts, run)

    score = Command("evaluate", run / "model", "--config", tmp_path / "small.toml", folder=tmp_path / "evaluation")
    assert score.wait() == 0, score.said
    assert f"spell_backward: {summary['heldout_after']:.4f} (16 tasks)" in score.said


def test_i8_trainer_and_rollout_process_may_be_killed_and_all_at_once_and_no_step_is_lost_or_made_twice(
    train: Callable[..., Command], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = train("run.steps=24", "trainer.checkpoint_every=3")
    published = []
    for part, step in (("trainer", 5), ("rollout", 11)):
        at_step(command, run, step)
        before = command.parts()
        killed = command.kill(part)
        published.append(int((run / "published").read_text()))
        command.until(lambda found=before, part=part: set(command.parts().get(part, ())) - set(found[part]), f"a new {part}")
        assert not alive(killed)
    assert command.said.count("goes on from its last checkpoint") == 2

    at_step(command, run, 17)
    everything = [pid for found in command.parts().values() for pid in found]
    os.kill(command.process.pid, signal.SIGSTOP)  # so that it starts nothing while its parts die
    for pid in (*everything, command.process.pid):
        os.kill(pid, signal.SIGKILL)
    published.append(int((run / "published").read_text()))
    assert gone([*everything, command.process.pid], seconds=5)

    resumed = train("run.steps=24", "trainer.checkpoint_every=3", "--resume")
    assert resumed.wait() == 0, resumed.said
    check_no_step_twice(run, num_steps=24)
    check_store(run)
    check_nothing_left(resumed, everything, run)
    versions = [line["version"] for line in steps(run)]
    # The numbers go on above all that were handed out before a crash, and the lineage says where.
    first = next(version for version in versions if version > published[0])
    assert first - 1 not in versions
    state = json.loads(next((run / "checkpoints").glob("version-*/state.json")).read_text())
    assert state["lineage"] and all(numbers[-1] not in versions for numbers in map(_numbers, state["lineage"]))
    assert (run / "model" / "model.safetensors").exists()


def _numbers(fork: list[int] | dict[str, int]) -> list[int]:
    """Version of the checkpoint, and the number under which it went on."""
    return list(fork.values()) if isinstance(fork, dict) else fork


def interrupt(command: Command, parts: list[int]) -> float:
    """Ctrl-C; seconds until all is over."""
    began = time.monotonic()
    command.process.send_signal(signal.SIGINT)
    command.wait(10)
    assert gone(parts, seconds=0.5)
    return time.monotonic() - began


def test_i9_ctrl_c_in_the_warm_start_ends_within_five_seconds_and_writes_everything(train: Callable[..., Command], tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = train("warm_start.target_accuracy=1.0", "warm_start.max_steps=100000")
    command.until(lambda: "warm start  step" in command.said, "warm start")
    parts = [pid for found in command.parts().values() for pid in found]
    assert len(parts) == 3
    assert interrupt(command, parts) < 5
    assert command.process.returncode == 130
    assert "Traceback" not in command.said
    assert json.loads((run / "summary.json").read_text())["steps"] == 0
    assert journal(run) == []
    check_nothing_left(command, parts, run)


def test_i9_ctrl_c_in_training_ends_within_five_seconds_and_the_death_of_the_launcher_ends_all(
    train: Callable[..., Command], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = train("run.steps=100000", "trainer.checkpoint_every=2")
    at_step(command, run, 3)
    parts = [pid for found in command.parts().values() for pid in found]
    assert interrupt(command, parts) < 5
    assert command.process.returncode == 130
    assert "Traceback" not in command.said
    made = steps(run)
    assert json.loads((run / "summary.json").read_text())["steps"] >= 3
    assert [line["step"] for line in made] == list(range(1, len(made) + 1))
    with sqlite3.connect(run / "store.sqlite") as store:
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    check_nothing_left(command, parts, run)

    again = train("run.steps=100000", "trainer.checkpoint_every=2", "--resume")
    at_step(again, run, made[-1]["step"] + 3)
    parts = [pid for found in again.parts().values() for pid in found]
    os.kill(again.process.pid, signal.SIGKILL)
    assert gone([*parts, again.process.pid], seconds=5)
    again.process.wait(5)  # until then a thread of it may live, and hold its locks
    for _ in range(100):  # a part that is gone may have threads that end an instant later, and hold its locks
        remove_left()  # as the next run of anyone does
        if not segments(run):
            break
        time.sleep(0.1)
    assert not segments(run)
    assert [line["step"] for line in steps(run)] == list(range(1, len(steps(run)) + 1))


def test_a_loss_of_the_users_own_in_the_working_folder_is_trained_with(train: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "my_losses.py").write_text("def plain(policy, advantage, *, tau=1.0):\n    return -tau * policy * advantage\n")
    command = train("objective.kind=my_losses:plain", "objective.tau=0.5", "run.steps=2")
    assert command.wait(120) == 0, command.said
    check_no_step_twice(tmp_path / "run", num_steps=2)
