"""metrics.jsonl: complete lines, no false zeros, no step twice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.observe.facts import Clock, batch, commit, decode, rollout, step

from midflight.errors import ConfigError
from midflight.observe.history import read_journal
from midflight.observe.journal import Journal
from midflight.observe.lines import AlarmLine, ResumeLine
from midflight.observe.observers import Observers
from midflight.observe.run_state import RunState
from midflight.observe.status import Phase
from midflight.types import Batch, Group, GroupKey, Kind, Reason, RolloutKey, Row, Trajectory
from midflight.types.facts import Alarmed, Evaluated, GroupClosed, Leased, RequestFailed, Waited


def opened(path: Path, **options: Any) -> tuple[Observers, RunState, Journal]:
    state = RunState(steps=10, clock=Clock())
    journal = Journal(path, state, **options)
    return Observers([state.apply, journal.apply]), state, journal


def row(length: int) -> Row:
    numbers, yes = np.zeros(length, np.int32), np.ones(length, np.bool_)
    return Row(numbers, yes, yes, numbers.astype(np.float32), numbers, numbers)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_one_complete_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    run, _, _ = opened(path)
    batch(run, 0, {0: 30, 2: 10})
    rollout(run, 1.0)
    rollout(run, 0.0)
    rollout(run, 0.25, source="chain_sum")
    rollout(run, None, error="KeyError: 'answer'", num_tokens=99)
    run.apply(Waited(who="trainer", for_whom="engines", seconds=0.5))
    run.apply(GroupClosed(key=GroupKey(0, 0), reason=Reason.STALE, num_tokens=3))
    commit(run, 0, pause_seconds=0.002)
    commit(run, 0, engine="engine1", pause_seconds=0.003)
    step(run, 1, started=1000.0, ended=1000.5, num_tokens=40, loss=0.125)
    (line,) = lines(path)
    assert (line["kind"], line["step"], line["version"], line["step_seconds"], line["tokens"]) == ("step", 1, 1, 0.5, 40)
    assert (line["groups"], line["staleness"], line["staleness_mean"], line["staleness_max"]) == (16, {"0": 30, "2": 10}, 0.5, 2)
    assert (line["rollouts"], line["reward"]) == (4, pytest.approx(1.25 / 3))
    assert line["reward_by_source"] == {"spell_backward": 0.5, "chain_sum": 0.25}
    assert (line["waits"], line["dropped"]) == ({"trainer for engines": 0.5}, {"stale": 1})
    assert (line["failures"], line["generated_length"], line["truncated_share"]) == ({"KeyError": 1}, 5.0, 0.0)
    assert (line["pause_seconds"], line["stage_seconds"], line["trainer"]) == (0.003, 0.1, {"loss": 0.125})
    assert line["totals"]["rollouts"] == 4 and line["totals"]["max_token_staleness"] == 2


def test_the_last_line_has_the_figures_that_the_run_had_at_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    clock = Clock()
    state = RunState(name="", steps=10, slots=16, clock=clock)
    run = Observers([state.apply, Journal(path, state).apply])
    run.apply(Evaluated(version=0, source="spell_backward", num_tasks=16, mean_reward=0.5))
    state.begin_phase(Phase.TRAINING)
    for version in (1, 2, 3):
        began = clock.now
        batch(run, version - 1, {0: 30, version: 10})
        rollout(run, 1.0, num_versions=2)
        rollout(run, None, error="KeyError: 'answer'")
        run.apply(Waited(who="trainer", for_whom="engines", seconds=0.5))
        run.apply(RequestFailed(session_id="s", status=500, error="x"))
        decode(run, began, began + 1.5, num_tokens=12)
        commit(run, version - 1)
        clock.now += 2.0
        step(run, version, started=clock.now - 1.0, ended=clock.now, num_tokens=40)
    expected, found = state.status(), read_journal(path).status()
    for name in (
        *("step", "version", "seconds", "training_seconds", "totals", "waits", "failures"),
        *("engine_busy", "trainer_busy", "overlap_share", "slots_used", "bound", "advice"),
    ):
        assert getattr(found, name) == getattr(expected, name), name
    assert (found.engine_busy, found.trainer_busy, found.overlap_share, found.slots_used) == (0.75, 0.5, 0.25, 0.375)
    assert read_journal(path).steps[-1].eta_seconds == expected.eta_seconds == 14.0
    assert (found.sources[0].heldout_before, found.sources[0].num_heldout) == (0.5, 16)


def test_what_is_not_known_is_absent_and_never_zero(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run, _, _ = opened(path)
    step(run, 1)
    (line,) = lines(path)
    absent = {"reward", "reward_by_source", "groups", "staleness", "staleness_mean", "staleness_max", "waits", "pause_seconds", "trainer"}
    assert not absent & line.keys()


def test_a_true_zero_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run, _, _ = opened(path)
    rollout(run, 0.0)
    batch(run, 0, {0: 7})
    step(run, 1)
    (line,) = lines(path)
    assert (line["reward"], line["staleness_mean"], line["staleness_max"]) == (0.0, 0.0, 0)


def test_a_line_speaks_of_what_happened_since_the_line_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run, _, _ = opened(path)
    rollout(run, 1.0)
    step(run, 1)
    rollout(run, 0.0)
    rollout(run, 1.0, key=RolloutKey(GroupKey(0, 0), 0, Kind.EVALUATION))
    step(run, 2)
    assert [(line["rollouts"], line["reward"]) for line in lines(path)] == [(1, 1.0), (1, 0.0)]


def test_the_rates_of_a_line_are_those_of_all_the_time_since_the_line_before_however_long(tmp_path: Path) -> None:
    """Engines rest when a long step ends, and all its tokens are told at once."""
    path = tmp_path / "metrics.jsonl"
    clock = Clock()
    state = RunState(steps=10, clock=clock)
    run = Observers([state.apply, Journal(path, state).apply])
    began = clock.now
    decode(run, began, began + 1.0, num_tokens=10)
    clock.now = began + 50.0
    step(run, 1, started=began + 10.0, ended=began + 50.0, num_tokens=4000)
    decode(run, began + 50.0, began + 60.0, num_tokens=1000)
    clock.now = began + 150.0
    step(run, 2, started=began + 70.0, ended=began + 150.0, num_tokens=4000)
    first, second = lines(path)
    assert (first["training_rate"], second["training_rate"]) == (100.0, 50.0)
    assert second["generation_rate"] == 10.0


def test_a_batch_that_was_prefetched_belongs_to_its_own_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run, _, _ = opened(path)
    batch(run, 0, {0: 1})
    batch(run, 1, {1: 1})
    step(run, 1)
    batch(run, 2, {2: 1})
    step(run, 2)
    step(run, 3)
    assert [line["staleness_max"] for line in lines(path)] == [0, 1, 2]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run, _, _ = opened(path)
    step(run, 1, loss=math.nan, grad_norm=math.inf)
    assert lines(path)[0]["trainer"] == {"loss": None, "grad_norm": None}
    assert read_journal(path).steps[0].trainer == {"loss": None, "grad_norm": None}


def test_evaluations_have_lines_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run, _, _ = opened(path)
    run.apply(Evaluated(version=0, source="a", num_tasks=256, mean_reward=0.5))
    run.apply(Evaluated(version=0, source="b", num_tasks=0, mean_reward=None, num_failed=2, error="the sandbox is gone"))
    run.apply(Evaluated(version=9, source="a", num_tasks=60, mean_reward=0.8, num_failed=3, error="gone"))
    found = [[line[key] for key in ("kind", "source", "mean_reward", "num_failed", "error", "incomplete")] for line in lines(path)]
    assert found == [
        ["evaluation", "a", 0.5, 0, None, False],
        ["evaluation", "b", None, 2, "the sandbox is gone", True],
        ["evaluation", "a", 0.8, 3, "gone", False],
    ]


def test_an_alarm_is_a_line_and_survives_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run, _, journal = opened(path)
    run.apply(Evaluated(version=0, source="a", num_tasks=60, mean_reward=0.5, num_failed=4))
    step(run, 1)
    run.apply(Alarmed("failures", "8 of the last 15"))
    step(run, 2)
    run.apply(Alarmed("failures", "9 of the last 15"))
    journal.close()
    _, state, _ = opened(path, resume_at=1)
    assert [(line["kind"], line["version"]) for line in lines(path)] == [("evaluation", 0), ("step", 1), ("alarm", 1), ("resume", 1)]
    assert (lines(path)[-2]["name"], lines(path)[-2]["text"], lines(path)[-2]["step"]) == ("failures", "8 of the last 15", 1)
    assert state.status().sources[0].incomplete


def test_the_length_trained_is_that_of_the_lines_own_batch(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run, _, _ = opened(path)
    for version, lengths in ((0, (2, 4)), (1, (10,))):  # prefetched
        rows = [Trajectory(RolloutKey(GroupKey(0, 0), n), "t", "s", 1.0, (row(length),)) for n, length in enumerate(lengths)]
        run.apply(Leased(Batch(1, version, (Group(GroupKey(0, 0), "t", "s", tuple(rows)),)), {0: sum(lengths)}, {}, {}))
    step(run, 1)
    step(run, 2)
    assert [line["trained_length"] for line in lines(path)] == [3.0, 10.0]


def write_three_steps(path: Path) -> None:
    run, _, journal = opened(path)
    run.apply(Evaluated(version=0, source="a", num_tasks=256, mean_reward=0.5))
    for version in (1, 2, 3):
        rollout(run, 1.0, num_versions=2)
        decode(run, 1000.0, 1000.1, num_tokens=7)
        step(run, version, num_tokens=100)
    journal.close()


def test_a_resumed_run_keeps_the_steps_that_survived_and_writes_none_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_three_steps(path)
    run, _, _ = opened(path, resume_at=2)
    run.apply(Evaluated(version=0, source="a", num_tasks=256, mean_reward=0.9))
    step(run, 2)
    for version in (4, 5):
        step(run, version)
    found = read_journal(path)
    assert [line.version for line in found.steps] == [1, 2, 4, 5]
    assert [line.mean_reward for line in found.evaluations] == [0.5]


def test_a_restored_state_goes_on_from_the_counts_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_three_steps(path)
    run, state, _ = opened(path, resume_at=2)
    step(run, 4, num_tokens=50)
    # The third step is lost, and its 100 tokens are not trained; its rollout ran and its 7 tokens were generated all the same.
    assert (state.totals.trained_tokens, state.totals.rollouts_spanning_versions, state.totals.generated_tokens) == (250, 3, 21)
    assert read_journal(path).steps[-1].step == 3
    assert state.status().sources[0].heldout_before == 0.5


def test_what_happened_before_two_deaths_is_not_forgotten_with_the_lines_that_are(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run, state, journal = opened(path)
    for version in (1, 2, 3):
        decode(run, 1000.0, 1000.1, num_tokens=7)
        state._clock.now += 20.0  # type: ignore[attr-defined]
        step(run, version)
    journal.close()
    opened(path, resume_at=1)[2].close()  # and dies before its first step
    _, state, _ = opened(path, resume_at=1)
    assert (state.step, state.totals.trained_tokens, state.totals.generated_tokens) == (1, 100, 21)
    assert (state.seconds, state.status().start_seconds) == (60.0, 0.0)
    assert [(line["kind"], line["version"], line["seconds"]) for line in lines(path)[1:]] == [("resume", 1, 60.0), ("resume", 1, 60.0)]


def test_a_new_run_starts_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_three_steps(path)
    opened(path)
    assert path.read_text() == ""


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_three_steps(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert [line.version for line in read_journal(path).steps] == [1, 2]
    run, _, _ = opened(path, resume_at=9)
    step(run, 3)
    assert [line.version for line in read_journal(path).steps] == [1, 2, 3]


def test_a_foreign_line_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "recipe"}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:1: not a line of this journal"):
        read_journal(path)


def test_a_missing_journal_is_empty(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "none").steps == ()


def test_every_key_of_an_alarm_or_a_start_is_defined_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    keys = {*AlarmLine.__struct_fields__, *ResumeLine.__struct_fields__}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []
