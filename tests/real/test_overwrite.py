"""`--overwrite`: whatever becomes of the new run before its first step, the old one is as it was. Real processes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.folders import tree_of

from midflight.run.launcher.folder_lock import restore
from midflight.run.launcher.replaced_files import is_left

from .processes import CONFIG, Command, alive, children, gone, steps

pytestmark = pytest.mark.timeout(900)
NUM_FAILURES = 100
STEPS_OF_A_START = 130
"""Changes of the file system from the start of such a launcher to its end, about."""
ENDING = "async def solve(task, client):\n    raise SystemExit(3)\n"


def of_run(folder: Path) -> dict[str, object]:
    """Without what may lie beside the run."""
    return {name: found for name, found in tree_of(folder).items() if not name.startswith(("lock", "failed-logs", ".overwritten-gone"))}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has finished, `run`, which every test copies."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.toml").write_text(CONFIG)
    (folder / "ending.py").write_text(ENDING)
    command = Command("train", "small.toml", "--folder", "run", "--set", "run.steps=2", "--set", "warm_start.max_steps=2", folder=folder)
    assert command.wait(120) == 0, command.said
    return folder


def test_a_run_that_has_finished_leaves_nothing_half_written(finished: Path) -> None:
    names = sorted(path.name for path in (finished / "run").iterdir())
    assert "evaluations.sqlite" in names and not [name for name in names if name.endswith("-journal")]
    with closing(sqlite3.connect(finished / "run" / "evaluations.sqlite")) as kept:
        numbers = kept.execute("SELECT epoch, COUNT(*) FROM rollouts GROUP BY epoch").fetchall()
    assert [version for version, _ in numbers] == [0, 2] and len({number for _, number in numbers}) == 1, numbers


@pytest.fixture
def here(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def start(here: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def train(*sets: str) -> Command:
        options = [word for one in ("run.steps=2", "warm_start.max_steps=2", *sets) for word in ("--set", one)]
        started.append(Command("train", "small.toml", "--folder", "run", "--overwrite", *options, folder=here))
        return started[-1]

    yield train
    for command in started:
        command.end()


def test_a_finished_run_survives_a_hundred_late_failures_and_kills_at_random_instants(here: Path) -> None:
    dice, before = random.Random(29), of_run(here / "run")
    shutil.copyfile(Path(__file__).with_name("late.py"), here / "late.py")
    ends: list[int] = []
    for number in range(NUM_FAILURES):
        way = dice.choice(("config", "crash", "system", "gone", "waits", "waits", "waits", "killed", "killed", "killed", "killed"))
        command = Command("run", way, dice.randrange(STEPS_OF_A_START), folder=here, module="late")
        try:
            if way == "waits":
                by = dice.choice((signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL))
                if by is not signal.SIGKILL or dice.random() < 0.5:
                    command.until(lambda said=command: "late" in said.output.read_text(), "the ring")
                time.sleep(dice.uniform(0.0, 0.1))
                command.process.send_signal(by)
            ends.append(command.wait())
        finally:
            command.end()
        assert ends[-1] != 0, command.said
        if dice.random() < 0.5:  # else the next start finds what is left
            restore(here / "run", lambda _: None)
            assert of_run(here / "run") == before, (number, way, command.said)
    restore(here / "run", lambda _: None)
    assert of_run(here / "run") == before
    assert sum(end == -signal.SIGKILL for end in ends) > 20 and sum(end == 3 for end in ends) > 2


def test_a_configuration_that_fails_late_leaves_the_old_run(here: Path, start: Callable[..., Command]) -> None:
    before = of_run(here / "run")
    command = start("lora.rank=2", 'lora.targets=["nothing"]')
    assert command.wait() != 0 and "nothing" in command.errors.read_text(), command.said
    assert of_run(here / "run") == before
    command = start("environment.entry=ending:solve", "environment.workers=1", "rollout.retries=0")
    assert command.wait(120) != 0 and "is back" in command.said, command.said
    assert of_run(here / "run") == before
    assert (here / "run" / "failed-logs" / "rollout.log").exists(), "what says why it failed"


def test_ctrl_c_before_the_first_step_puts_it_back(here: Path, start: Callable[..., Command]) -> None:
    before = of_run(here / "run")
    command = start("warm_start.target_accuracy=1.0", "warm_start.max_steps=100000")
    command.until(lambda: is_left(here / "run") and (here / "run" / "first" / "model.safetensors").exists(), "a warm start")
    command.process.send_signal(signal.SIGINT)
    assert command.wait() == 130 and "is back" in command.said, command.said
    assert of_run(here / "run") == before and not is_left(here / "run")


def test_a_launcher_that_is_killed_leaves_it_to_the_next_command(here: Path, start: Callable[..., Command]) -> None:
    before = of_run(here / "run")
    command = start("warm_start.target_accuracy=1.0", "warm_start.max_steps=100000")
    command.until(lambda: is_left(here / "run") and (here / "run" / "first" / "model.safetensors").exists(), "a warm start")
    parts = children(command.process.pid)
    os.kill(command.process.pid, signal.SIGKILL)
    looking = Command("runs", ".", folder=here)  # at once: it waits for the parts, which have files open
    assert looking.wait() == 0 and "is back" in looking.said and "finished" in looking.said, looking.said
    assert of_run(here / "run") == before
    assert gone(parts, seconds=10) and not any(alive(part) for part in parts)
    assert of_run(here / "run") == before, "parts that ended later wrote nothing into it"


def test_a_resume_after_such_a_kill_goes_on_with_the_run_that_is_back(here: Path, start: Callable[..., Command]) -> None:
    killed = start("warm_start.target_accuracy=1.0", "warm_start.max_steps=100000")
    killed.until(lambda: is_left(here / "run") and (here / "run" / "first" / "model.safetensors").exists(), "a warm start")
    os.kill(killed.process.pid, signal.SIGKILL)
    options = ("--resume", "--set", "run.steps=3", "--set", "warm_start.max_steps=2")
    resumed = Command("train", "small.toml", "--folder", "run", *options, folder=here)
    try:
        assert resumed.wait(120) == 0, resumed.said
    finally:
        resumed.end()
    said = resumed.errors.read_text()
    assert "is back" in said and "--resume goes on with it" in said
    assert [line["version"] for line in steps(here / "run")] == [1, 2, 3] and not is_left(here / "run")


def test_after_the_first_step_the_new_run_is_the_one_that_stays(here: Path, start: Callable[..., Command]) -> None:
    old = (here / "run" / "model" / "model.safetensors").read_bytes()
    command = start("run.steps=400", "run.seed=7")
    command.until(lambda: steps(here / "run"), "a step")
    command.until(lambda: "is deleted" in command.said, "the word")
    command.until(lambda: not list((here / "run").glob(".overwritten*")), "the deletion")
    command.process.send_signal(signal.SIGINT)
    assert command.wait() == 130 and "is back" not in command.said, command.said
    assert steps(here / "run") and not (here / "run" / "model").exists()
    command = start("run.seed=7")
    assert command.wait(120) == 0, command.said
    assert (here / "run" / "model" / "model.safetensors").read_bytes() != old
    assert not list((here / "run").glob(".overwritten*"))
