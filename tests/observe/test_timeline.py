"""timeline.jsonl: when everything happened, in seconds of the run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.observe.facts import KEY, batch

from midflight.errors import ConfigError
from midflight.observe.journal import Journal
from midflight.observe.run_state import RunState
from midflight.observe.timeline import BatchTimed, CommitTimed, RolloutTimed, RunStarted, StepTimed, WaitTimed, read_timeline
from midflight.types import TurnTimes
from midflight.types.facts import EngineStepped, RolloutEnded, Stepped, Waited, WeightsCommitted


def test_rollouts_and_steps_have_their_times_in_seconds_of_the_run(tmp_path: Path) -> None:
    state = RunState(steps=10)
    state.restore(step=0, version=0, totals=state.totals, seconds=100.0)  # it ran for 100 s before
    journal = Journal(tmp_path / "metrics.jsonl", state)
    now = time.monotonic()
    shift = state.seconds - now  # from the clock of the facts to that of the run
    turn = TurnTimes(now - 3.0, now - 1.0, (("engine0", now - 2.9),), ((7, now - 2.5), (8, now - 1.5)), 40)
    journal.apply(RolloutEnded(KEY, "sums", 1.0, 40, 2, 4.0, None, started=now - 4.0, times=(turn,)))
    batch(journal, 8, {0: 40})
    journal.apply(Stepped(1, 9, now - 0.5, now - 0.25, 640, {}))
    journal.apply(WeightsCommitted("engine0", 9, stage_seconds=0.2, pause_seconds=0.05))
    journal.close()
    began, rollout, leased, step, commit = read_timeline(tmp_path / "timeline.jsonl")
    assert isinstance(began, RunStarted) and began.wall == pytest.approx(time.time(), abs=60)
    assert isinstance(rollout, RolloutTimed) and (rollout.key, rollout.reward) == ((0, 1, 0, 2), 1.0)
    assert (rollout.began, rollout.ended) == (pytest.approx(now - 4.0 + shift, abs=0.1), pytest.approx(now + shift, abs=0.1))
    (made,) = rollout.turns
    assert made.ended - made.began == pytest.approx(2.0, abs=1e-5) and made.placed[0][0] == "engine0"
    assert [version for version, _ in made.sampled] == [7, 8] and made.sampled[1][1] - made.sampled[0][1] == pytest.approx(1.0, abs=1e-5)
    assert isinstance(leased, BatchTimed) and len(leased.groups) == 16 and leased.train_version == 8
    assert isinstance(step, StepTimed) and step.ended - step.began == pytest.approx(0.25, abs=1e-5) and step.version == 9
    assert isinstance(commit, CommitTimed) and (commit.engine, commit.version, commit.pause_seconds) == ("engine0", 9, 0.05)


def test_engine_steps_and_hand_overs_between_loops_have_no_line_and_a_wait_has(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", RunState(steps=10))
    journal.apply(EngineStepped("engine0", 0.0, 1.0, 4, 4))
    journal.apply(Waited("trainer", "generation", 0.001))
    journal.apply(Waited("trainer", "generation", 0.5))
    journal.close()
    _, wait = read_timeline(tmp_path / "timeline.jsonl")
    assert isinstance(wait, WaitTimed) and wait.ended - wait.began == pytest.approx(0.5, abs=1e-5)


def test_rollouts_that_end_together_are_written_together_and_before_what_follows(tmp_path: Path) -> None:
    journal, path = Journal(tmp_path / "metrics.jsonl", RunState(steps=10)), tmp_path / "timeline.jsonl"
    for _ in range(20):
        journal.apply(RolloutEnded(KEY, "sums", 1.0, 40, 2, 4.0, None))
    assert len(read_timeline(path)) < 21
    journal.apply(Waited("trainer", "generation", 0.5))
    assert [type(line) for line in read_timeline(path)] == [RunStarted, *[RolloutTimed] * 20, WaitTimed]
    journal.close()


def test_a_run_that_goes_on_keeps_its_lines_and_says_when_it_began_again(tmp_path: Path) -> None:
    for resume_at in (None, 0):
        Journal(tmp_path / "metrics.jsonl", RunState(steps=10), resume_at=resume_at).close()
    assert [type(line) for line in read_timeline(tmp_path / "timeline.jsonl")] == [RunStarted, RunStarted]


def test_a_torn_last_line_is_left_out_and_a_foreign_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    assert read_timeline(path) == []
    path.write_text('{"kind":"start","at":0.0,"wall":1.5}\n{"kind":"sta')
    assert read_timeline(path) == [RunStarted(0.0, 1.5)]
    path.write_text("no json\n")
    with pytest.raises(ConfigError, match=r"timeline.jsonl: not a line of a timeline.*move the file away"):
        read_timeline(path)
