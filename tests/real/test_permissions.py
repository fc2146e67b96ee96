"""Another user of the machine, before the folder of a whole run: it reads nothing, or everything if its group is let in."""

from __future__ import annotations

import grp
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.folders import mode_of

from midflight.archive.store_reader import reading
from midflight.observe.lines import decode_line
from midflight.run.endpoint import Endpoint

from .processes import CONFIG, SHARED, Command, segments

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]
OTHER = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may enter, which those of pytest are not."""
    place = Path(tempfile.mkdtemp(prefix="midflight-test-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def train(place: Path) -> Iterator[Callable[..., Command]]:
    (place / "small.toml").write_text(CONFIG)
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        words = ["train", place / "small.toml", "--folder", place / "run", *arguments]
        started.append(Command(*words, folder=place / "said"))
        return started[-1]

    yield start
    for command in started:
        command.end()


def as_other(ask: Callable[[], object], *, group: int = OTHER) -> object:
    """The answer of a process of another user, as JSON. What it needs must be imported before."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(group)
            os.setuid(OTHER)
            answer = ask()
        except BaseException as error:
            answer = repr(error)
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = json.loads(file.read())
    os.waitpid(child, 0)
    return answer


def readable(paths: list[Path]) -> list[str]:
    found: list[str] = []
    for path in paths:
        try:
            path.iterdir().__next__() if path.is_dir() else path.open("rb").close()
        except (OSError, StopIteration):
            continue
        found.append(str(path))
    return found


def all_in(folder: Path) -> list[Path]:
    return [folder, *folder.rglob("*")]


def in_memory(run: Path) -> list[Path]:
    return [*segments(run), *SHARED.glob("midflight-*")]


def test_another_user_reads_nothing_of_a_run_while_it_goes_on_and_afterwards_unless_its_group_is_let_in(
    place: Path, train: Callable[..., Command]
) -> None:
    run = place / "run"
    command = train("--set", "run.steps=2", "--set", "trainer.checkpoint_every=1")
    endpoint = command.until(lambda: (run / "endpoint.json").exists() and all_in(run) + in_memory(run), "endpoint")
    assert as_other(lambda: readable(endpoint)) == []
    shared = command.until(lambda: in_memory(run), "weights in shared memory")
    assert as_other(lambda: readable(shared)) == []
    assert command.wait(200) == 0, command.said
    files = all_in(run)
    names = {path.name for path in files}
    assert {"store.sqlite", "metrics.jsonl", "summary.json", "config.toml", "model", "checkpoints", "logs"} <= names
    assert {mode_of(path) for path in files if path.is_dir()} == {0o700}
    assert {mode_of(path) for path in files if path.is_file()} == {0o600}
    assert as_other(lambda: readable(files)) == []
    assert as_other(lambda: readable([place / "small.toml"])) == [str(place / "small.toml")], "it could read something"

    for path in files:  # as earlier versions left it
        path.chmod(0o755 if path.is_dir() else 0o644)
    group = grp.getgrgid(OTHER).gr_name
    command = train("--resume", "--set", "run.steps=3", "--set", f"run.share_with_group={group}")
    command.until(lambda: (run / "endpoint.json").exists(), "endpoint")
    path = run / "endpoint.json"
    joined = as_other(lambda: msgspec.json.decode(path.read_bytes(), type=Endpoint).url)
    assert str(joined).startswith("http://"), "who joins an engine finds address and token"
    stranger = as_other(lambda: readable([run, path]), group=OTHER - 1)
    assert stranger == []
    assert command.wait(200) == 0, command.said
    assert "could be read by every user of this machine; from now on by the group" in command.said
    files = all_in(run)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files if path.is_dir()} == {0o2750}
    assert {mode_of(path) for path in files if path.is_file()} == {0o640}
    assert {path.stat().st_gid for path in files} == {OTHER}

    def view() -> object:
        """What the viewer and a container with the model read."""
        kinds = [type(decode_line(line)).__name__ for line in (run / "metrics.jsonl").read_bytes().splitlines()]
        with reading(run) as store:
            ((number,),) = store.ask("SELECT COUNT(*) FROM rollouts")
        weights = (run / "model" / "model.safetensors").read_bytes()
        return ["StepLine" in kinds, number > 0, len(weights) > 1000]

    assert as_other(view) == [True, True, True]
    assert as_other(lambda: readable(files), group=OTHER - 1) == []
