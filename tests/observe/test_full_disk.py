"""A full disk at each file that the rollout process and the launcher write by themselves: the file is named, and what it had stays readable."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.observe.facts import Clock, batch, step

from midflight.errors import disk_full
from midflight.observe.atomic_write import write_whole
from midflight.observe.history import read_journal
from midflight.observe.journal import Journal
from midflight.observe.observers import Observers
from midflight.observe.run_state import RunState
from midflight.observe.timeline import Timeline, read_timeline
from midflight.types.facts import Waited

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file here is always full")


FULL = partial(Path("/dev/full").open, "ab")


def said_when(act: Callable[[], object]) -> str:
    """What the user reads of the error."""
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        act()
    return str(disk_full(caught.value))


def test_the_journal_is_named_once_and_has_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    state = RunState(steps=10, clock=Clock())
    journal = Journal(path, state)
    said = list[str]()
    run = Observers([state.apply, journal.apply], say=said.append)
    batch(run, 0, {0: 4})
    step(run, 1, started=1000.0, ended=1000.5, num_tokens=4, loss=0.5)
    journal._file = FULL()  # pyright: ignore[reportPrivateUsage]
    for version in (1, 2):
        batch(run, version, {version: 4})
        step(run, version + 1, started=1001.0, ended=1001.5, num_tokens=4, loss=0.5)
    assert said == [f"Writing {path}: No space left on device; the run goes on, and lines are missing there until you free some space."]
    assert [line.version for line in read_journal(path).steps] == [1]


def test_the_timeline_is_named_and_has_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    timeline = Timeline(path, RunState(steps=10, clock=Clock()), goes_on=False)
    timeline._file = FULL()  # pyright: ignore[reportPrivateUsage]
    said = said_when(lambda: timeline.apply(Waited(who="trainer", for_whom="engines", seconds=1.0)))
    assert said.startswith(f"Writing {path}: No space left")
    assert len(read_timeline(path)) == 1


def test_a_file_that_is_replaced_as_a_whole_is_named_and_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, b"the one before")
    (tmp_path / ".summary.json.new").symlink_to("/dev/full")
    assert f"Writing {path}: " in said_when(lambda: write_whole(path, b"the next"))
    assert path.read_bytes() == b"the one before"
