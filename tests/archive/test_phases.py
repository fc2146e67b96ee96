"""The phases of a run: its training by its summary, stretches of it by the lines of its journal."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from midflight.archive.phases import phases_of
from midflight.observe.history import JournalHistory
from midflight.observe.lines import StepLine
from midflight.observe.status import Bound, Totals
from midflight.observe.summary import Summary


def line(number: int, at: float, engine: float, trainer: float, **more: float) -> StepLine:
    """A step that ended `at` seconds after training began, with the seconds of it in which engines and trainer were busy."""
    shares = {"engine_busy": engine / at, "trainer_busy": trainer / at, **{name: seconds / at for name, seconds in more.items()}}
    return StepLine(
        step=number, version=number, seconds=20.0 + at, step_seconds=1.0, tokens=1, rollouts=1, generation_rate=1.0, training_rate=1.0,
        totals=Totals(), training_seconds=at, waits={"trainer for generation": 0.5}, **shares,  # type: ignore[arg-type]
    )  # fmt: skip


def journal(lines: Sequence[StepLine]) -> JournalHistory:
    return JournalHistory(steps=tuple(lines))


def test_the_training_has_the_figures_of_the_summary_and_the_rest_of_the_time_is_one_phase() -> None:
    summary = Summary(
        seconds=14.0,
        training_seconds=10.0,
        engine_busy=0.9,
        trainer_busy=0.4,
        bound=Bound.GENERATION,
        waits={"trainer for generation": 1.5},
    )
    rest, training = phases_of(journal([line(1, 5.0, 4.5, 2.0), line(2, 9.5, 8.6, 3.8)]), summary)
    assert (rest.seconds, rest.steps, rest.verdict) == (4.0, 0, "")
    assert (training.name, training.seconds, training.steps) == ("training", 10.0, 2)
    assert training.verdict == "generation-bound: engines busy 90%, trainer busy 40%" and training.waits == {"trainer for generation": 1.5}


def test_a_stretch_is_what_the_shares_of_its_two_ends_leave_of_it() -> None:
    """Six steps of 2 s. In the first 4 s engines were busy for 4 and the trainer for 1, in the next for 2 and 2, in the last for 1 and 4."""
    lines = [line(1, 2.0, 2.0, 0.5), line(2, 4.0, 4.0, 1.0), line(3, 6.0, 5.0, 2.0)]
    lines += [line(4, 8.0, 6.0, 3.0), line(5, 10.0, 6.5, 5.0), line(6, 12.0, 7.0, 7.0)]
    found = phases_of(journal(lines), Summary(seconds=30.0, training_seconds=12.0))[2:]
    assert [(one.name, one.seconds, one.steps) for one in found] == [
        ("steps 1 to 2", 4.0, 2),
        ("steps 3 to 4", 4.0, 2),
        ("steps 5 to 6", 4.0, 2),
    ]
    assert [one.engine_busy for one in found] == [pytest.approx(share) for share in (1.0, 0.5, 0.25)]
    assert [one.trainer_busy for one in found] == [pytest.approx(share) for share in (0.25, 0.5, 1.0)]
    assert [one.bound for one in found] == [Bound.GENERATION, Bound.BALANCED, Bound.TRAINER]
    assert found[0].waits == {"trainer for generation": 1.0}


def test_slots_that_were_free_are_idle_beside_a_trainer_that_seldom_waits() -> None:
    lines = [line(number, 2.0 * number, 2.0 * number, 1.9 * number, slots_used=0.5 * number) for number in range(1, 7)]
    found = phases_of(journal(lines), Summary(seconds=30.0, training_seconds=12.0))[-1]
    assert found.slots_used == pytest.approx(0.25) and found.bound is Bound.TRAINER
    assert "engines busy 100% (25% of their slots)" in found.verdict


def test_after_a_resume_the_stretches_are_those_of_the_last_start() -> None:
    lines = [line(number, 2.0 * number, 2.0 * number, number) for number in range(1, 7)]
    lines += [line(number + 6, 3.0 * number, 3.0 * number, number) for number in range(1, 7)]
    found = phases_of(journal(lines), Summary(seconds=60.0, training_seconds=18.0))
    assert [one.name for one in found[2:]] == ["steps 7 to 8", "steps 9 to 10", "steps 11 to 12"]
    assert found[1].steps == 6 and found[2].seconds == 6.0


def test_a_run_without_training_or_of_an_older_version_has_no_phases() -> None:
    assert phases_of(JournalHistory(), Summary(seconds=5.0)) == []
    assert phases_of(journal([line(1, 2.0, 1.0, 1.0)]), Summary(seconds=5.0)) == []
