"""What a tracker hears of a journal, and that a run which goes on tells nothing twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from tests.trackers.journals import evaluation, resumed, samples, step
from tests.trackers.own import Forgets, Notes

from midflight.observe.lines import AlarmLine, CheckpointLine, Line, StepLine
from midflight.trackers.delivery import DeliveryLog, histograms, tell
from midflight.trackers.tracker import TrackedRun, Tracker


def heard(tracker: Notes, folder: Path, *lines: Line) -> list[list[Any]]:
    """The calls that the lines lead to."""
    tracker.path = folder / "notes.jsonl"
    tracker.path.unlink(missing_ok=True)
    told = DeliveryLog(folder / "notes.told")
    for line in lines:
        tell(tracker, line, told)
    return [json.loads(note) for note in tracker.path.read_text().splitlines()] if tracker.path.exists() else []


def test_a_step_is_its_numbers_and_its_histograms(tmp_path: Path) -> None:
    numbers, rewards, ages = heard(Notes(), tmp_path, step(3))
    assert numbers[:2] == ["scalars", 3] and numbers[2]["rollout/reward_mean"] == 0.5 and numbers[2]["train/grad_norm"] == 0.7
    assert rewards == ["histogram", 3, "rollout/reward_histogram", [0.0, 0.5, 1.0], [6, 2]]
    assert ages == ["histogram", 3, "train/staleness_histogram", [-0.5, 0.5, 1.5, 2.5], [30, 0, 10]], "an age that no token has is a gap"


def test_evaluations_and_samples_come_with_their_step(tmp_path: Path) -> None:
    score, table = heard(Notes(), tmp_path, evaluation(4, 0.75), samples(4))
    assert score == ["scalars", 4, {"eval/spell/reward": 0.75, "eval/spell/num_tasks": 8.0, "eval/spell/num_failed": 0.0}]
    assert table[:3] == ["table", 4, "rollout/samples"] and table[3] == ["source", "task", "reward", "prompt", "completion"]
    assert table[4] == [["spell", "7", 1.0, "spell | abc", "<b>cba</b>\nDone"]]


def test_an_alarm_is_a_row_of_a_table_and_told_once(tmp_path: Path) -> None:
    alarm = AlarmLine(version=4, step=4, seconds=9.0, name="off_policy", text="k1 is 0.5")
    assert heard(Notes(), tmp_path, alarm, alarm) == [["table", 4, "alarms", ["alarm", "text"], [["off_policy", "k1 is 0.5"]]]]


def test_a_checkpoint_is_its_digest_in_a_table_and_none_without_one(tmp_path: Path) -> None:
    kept = CheckpointLine(version=4, step=4, seconds=9.0, digest="ab" * 32)
    bare = CheckpointLine(version=5, step=5, seconds=9.5)
    assert heard(Notes(), tmp_path, kept, kept, bare) == [["table", 4, "digests", ["version", "digest"], [["4", "ab" * 32]]]]


def steps_of(calls: list[list[Any]]) -> list[int | str]:
    return [call[1] if call[0] == "scalars" else f"rewind {call[1]}" for call in calls if call[0] in ("scalars", "rewind")]


def test_what_was_told_is_not_told_again_after_a_start(tmp_path: Path) -> None:
    assert steps_of(heard(Notes(), tmp_path, step(1), step(2), evaluation(2, 0.5))) == [1, 2, 2]
    assert steps_of(heard(Notes(), tmp_path, step(1), step(2), evaluation(2, 0.5), evaluation(2, 0.25, "add"), step(3))) == [2, 3]


def test_steps_that_are_made_again_are_told_again_only_where_the_first_were_taken_away(tmp_path: Path) -> None:
    """A checkpoint of step 2; steps 3 and 4 are lost, and made again."""
    for tracker, expected in ((Notes(), [5]), (Forgets(), ["rewind 2", 3, 4, 5])):
        folder = tmp_path / type(tracker).__name__
        folder.mkdir()
        heard(tracker, folder, *(step(n) for n in (1, 2, 3, 4)))
        again = (step(1), step(2), resumed(2, 9.0), step(3, 0.9), step(4, 0.9), step(5, 0.9))
        assert steps_of(heard(tracker, folder, *again)) == expected
        assert steps_of(heard(tracker, folder, *again, step(6))) == [6], "the line of the resume is told once too"


def test_a_second_resume_at_the_same_step_counts_by_itself(tmp_path: Path) -> None:
    first = (step(1), step(2), resumed(2, 9.0), step(3))
    heard(Forgets(), tmp_path, *first)
    assert steps_of(heard(Forgets(), tmp_path, step(1), step(2), resumed(2, 9.0), resumed(2, 12.0), step(3))) == ["rewind 2", 3]


def test_a_tracker_that_fails_on_a_step_lacks_it_and_has_no_other_twice(tmp_path: Path) -> None:
    class Picky(Notes):
        def scalars(self, step: int, numbers: Any) -> None:
            if step == 2:
                raise ConnectionError
            super().scalars(step, numbers)

    tracker, told = Picky(), DeliveryLog(tmp_path / "picky.told")
    tracker.path = tmp_path / "notes.jsonl"
    for line in (step(1), step(2), step(2), step(3)):
        try:
            tell(tracker, line, told)
        except ConnectionError:
            assert line.step == 2
    assert steps_of([json.loads(note) for note in tracker.path.read_text().splitlines()]) == [1, 3]


def test_a_tracker_that_shows_nothing_is_one_too(tmp_path: Path) -> None:
    told = DeliveryLog(tmp_path / "x.told")
    for line in (step(1), evaluation(1, 0.5), samples(1), resumed(1, 2.0)):
        tell(Tracker(), line, told)
    assert Tracker().open(TrackedRun("a", "b", tmp_path, {})) is None


def test_lines_of_earlier_versions_have_no_histograms() -> None:
    old = msgspec.structs.replace(step(1), histograms=None, staleness=None)
    assert list(histograms(old)) == [] and isinstance(old, StepLine)
