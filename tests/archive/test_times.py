"""Timelines that are too long to be read at once: by parts, found by time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from midflight.archive import times
from midflight.archive.times import Times, before_newest, handover_seconds, part_from
from midflight.observe.timeline import CommitTimed, RolloutTimed, RunStarted, StepTimed, Timed


def line(at: int) -> Timed:
    """Written at that second."""
    return RolloutTimed((0, at, 0, 0), "sums", at - 1.0, float(at), 1.0, 4) if at % 3 else StepTimed(at, at, at - 0.5, float(at), 9)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of 3 000 seconds, a line each; one that a crash cut short in between. A part is about a hundred lines."""
    monkeypatch.setattr(times, "NEWEST_BYTES", 10_000)
    lines = [msgspec.json.encode(line(at)) for at in range(1, 3001)]
    lines.insert(1500, b'{"kind":"roll')
    (tmp_path / "timeline.jsonl").write_bytes(b"\n".join([msgspec.json.encode(RunStarted(0.0, 1.0)), *lines]) + b"\n")
    return tmp_path


def ends(of: Times) -> list[float]:
    return sorted(one.ended for one in (*of.rollouts, *of.steps))


def read(folder: Path, since: float) -> tuple[list[float], times.TimelinePart]:
    part = part_from(folder, since)
    assert part is not None
    found = Times(folder, part)
    assert found.refresh() and not found.refresh(), "a part does not change"
    return ends(found), part


@pytest.mark.parametrize("since", [0.0, 1.0, 2.0, 777.0, 1499.5, 1500.5, 1501.0, 2000.25])
def test_a_part_begins_with_the_first_line_of_its_time(folder: Path, since: float) -> None:
    found, part = read(folder, since)
    assert found[0] == max(1.0, float(-(-since // 1))) and found == [found[0] + n for n in range(len(found))]
    assert 80 < len(found) < 200 and part.later == found[-1] + 1


def test_from_the_newest_part_back_to_the_first_and_forth_again_nothing_is_left_out(folder: Path) -> None:
    newest = Times(folder, newest=times.NEWEST_BYTES)
    newest.refresh()
    seen, since = set(ends(newest)), before_newest(folder)
    assert max(seen) == 3000.0 and min(seen) > 2800.0
    while since is not None:
        found, part = read(folder, since)
        seen |= set(found)
        since = part.earlier
    assert seen == {float(at) for at in range(1, 3001)}
    since, seen = 0.0, set[float]()
    while (part := part_from(folder, since)) is not None:
        seen |= set(read(folder, since)[0])
        assert part.later is not None and part.later > since
        since = part.later
    assert seen | set(ends(newest)) == {float(at) for at in range(1, 3001)}


def test_what_the_newest_part_has_needs_no_other_and_a_short_timeline_is_whole(folder: Path, tmp_path: Path) -> None:
    assert part_from(folder, 2990.0) is None and part_from(folder, 1e9) is None
    (folder / "timeline.jsonl").write_bytes(msgspec.json.encode(line(1)) + b"\n")
    assert before_newest(folder) is None and part_from(folder, 0.0) is None
    assert before_newest(tmp_path / "nothing") is None and part_from(tmp_path / "nothing", 0.0) is None


def test_a_handover_is_as_long_as_that_of_its_slowest_engine_whichever_was_the_last() -> None:
    commits = [CommitTimed("a", 3, 1.0, 0.5, 0.25), CommitTimed("b", 3, 1.5, 0.125, 0.5), CommitTimed("a", 4, 2.0, 0.25, 0.125)]
    assert handover_seconds(commits) == {3: (0.5, 0.5), 4: (0.25, 0.125)}
