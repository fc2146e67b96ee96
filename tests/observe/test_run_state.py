"""Facts added up."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.observe.facts import Clock, batch, commit, decode, rollout, step

from midflight.config import load_config
from midflight.config.cores import CoreUse, core_use
from midflight.observe.bottleneck import find_bottleneck
from midflight.observe.readable import heldout
from midflight.observe.rolling import Mean, Rate
from midflight.observe.run_state import RunState
from midflight.observe.status import Bound, Phase, Status, Totals, WarmStartStatus
from midflight.types import Accounts, GroupKey, Kind, RolloutKey
from midflight.types.facts import (
    Checkpointed,
    EngineStepped,
    Evaluated,
    Quarantined,
    Rejoined,
    RequestFailed,
    Resumed,
    Waited,
    WentBack,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> RunState:
    return RunState(name="demo", steps=10, clock=clock)


def test_before_the_first_fact_nothing_is_known_and_nothing_is_zero_that_is_not(state: RunState) -> None:
    status = state.status()
    assert (status.reward, status.eta_seconds, status.overlap_share, status.bound) == (None, None, None, Bound.UNKNOWN)


def test_rewards_are_means_per_source_and_a_lost_rollout_is_no_zero(state: RunState) -> None:
    for reward in (1.0, 0.0, None):
        rollout(state, reward)
    rollout(state, 0.25, source="chain_sum")
    by_name = {source.name: source for source in state.status().sources}
    assert by_name["spell_backward"].reward == 0.5 and by_name["chain_sum"].reward == 0.25
    assert state.status().reward == pytest.approx(1.25 / 3)
    assert (state.totals.rollouts, state.totals.failed_rollouts) == (4, 1)


def test_rollouts_spanning_versions_are_those_with_more_than_one(state: RunState) -> None:
    for num_versions in (0, 1, 2, 5):
        rollout(state, 1.0, num_versions=num_versions)
    assert state.totals.rollouts_spanning_versions == 2


def test_evaluation_rollouts_count_as_evaluation_only(state: RunState) -> None:
    state.begin_phase(Phase.EVALUATION, num_tasks=20)
    rollout(state, 1.0, key=RolloutKey(GroupKey(0, 1), 0, Kind.EVALUATION), num_versions=2)
    status = state.status()
    assert (status.evaluated, status.to_evaluate) == (1, 20)
    assert status.totals == Totals() and status.reward is None


def test_an_update_is_a_version_that_goes_live_not_a_commit_of_an_engine(state: RunState) -> None:
    for version in (0, 1, 2):
        commit(state, version)
        commit(state, version, engine="engine1")
    assert state.totals.weight_updates == 2


def test_the_oldest_trained_token_is_remembered_and_empty_ages_do_not_count(state: RunState) -> None:
    batch(state, 5, {0: 10, 3: 1})
    batch(state, 6, {0: 10, 1: 4, 9: 0})
    assert state.totals.max_token_staleness == 3
    assert state.staleness() == {0: 20, 1: 4, 3: 1, 9: 0}


def test_overlap_is_the_time_both_computed_over_the_time_of_training(state: RunState, clock: Clock) -> None:
    decode(state, 990.0, 1000.0)
    state.begin_phase(Phase.TRAINING)
    decode(state, 1000.0, 1006.0)
    decode(state, 1004.0, 1007.0, engine="engine1")
    step(state, 1, started=1005.0, ended=1009.0)
    clock.now = 1010.0
    state.begin_phase(Phase.EVALUATION)
    clock.now = 1099.0
    status = state.status()
    assert (status.engine_busy, status.trainer_busy, status.overlap_share) == pytest.approx((0.7, 0.4, 0.2))


@pytest.mark.parametrize(
    ("running", "decoding", "step_seconds", "expected", "bound", "advice"),
    [
        ((8, 8, 8, 8, 8), 2.0, 3.0, (1.0, 1.0, 0.3), Bound.GENERATION, "engine.count"),  # the trainer waits for 7 of 10 seconds
        (
            (2, 2, 2, 2, 2),
            2.0,
            3.0,
            (1.0, 0.25, 0.3),
            Bound.GENERATION,
            "75% of the engines' slots are free: a larger rollout.max_in_flight",
        ),
        (
            (8, 1, 1, 1, 1),
            2.0,
            9.5,
            (1.0, 0.3, 0.95),
            Bound.TRAINER,
            "the engines are idle 70%",
        ),  # one straggler keeps the engine computing
        ((8, 8, 8, 8, 6), 2.0, 9.0, (1.0, 0.95, 0.9), Bound.BALANCED, "equally busy"),
        ((8, 8, 8, 8, 8), 1.0, 5.5, (0.5, 0.5, 0.55), Bound.BALANCED, "both sides wait"),  # for agents, or for each other
    ],
)
def test_the_verdict_knows_an_engine_that_computes_for_one_request_from_a_full_one(
    clock: Clock,
    running: tuple[int, ...],
    decoding: float,
    step_seconds: float,
    expected: tuple[float, float, float],
    bound: Bound,
    advice: str,
) -> None:
    """Every two seconds of ten, an engine of eight slots decodes for `decoding` seconds. The second number is slots in use times seconds, over 80."""
    state = RunState(slots=8, clock=clock)
    state.begin_phase(Phase.TRAINING)
    for number, together in enumerate(running):
        state.apply(EngineStepped("engine0", 1000.0 + 2 * number, 1000.0 + 2 * number + decoding, 1, together))
    step(state, 1, started=1000.0, ended=1000.0 + step_seconds)
    clock.now = 1010.0
    status = state.status()
    assert (status.engine_busy, status.slots_used, status.trainer_busy) == pytest.approx(expected)
    assert status.bound is bound and advice in status.advice


def test_waits_are_shares_of_the_training_phase_longest_first(state: RunState, clock: Clock) -> None:
    state.apply(Waited(who="admission", for_whom="start", seconds=99.0))
    state.begin_phase(Phase.TRAINING)
    state.apply(Waited(who="admission", for_whom="trainer", seconds=1.0))
    state.apply(Waited(who="trainer", for_whom="engines", seconds=2.0))
    state.apply(Waited(who="trainer", for_whom="engines", seconds=1.0))
    clock.now = 1010.0
    assert [(w.who, w.for_whom, w.seconds, w.share) for w in state.status().waits] == [
        ("trainer", "engines", 3.0, 0.3),
        ("admission", "trainer", 1.0, 0.1),
    ]


def test_the_eta_is_the_steps_left_times_the_recent_time_per_step(state: RunState, clock: Clock) -> None:
    state.begin_phase(Phase.TRAINING)
    for number in (1, 2, 3):
        clock.now = 1000.0 + 2 * number
        step(state, number, started=clock.now - 1, ended=clock.now)
    assert state.status().eta_seconds == pytest.approx(7 * 2.0)
    clock.now += 0.5
    assert state.status().eta_seconds == pytest.approx(13.5)


def test_speed_is_of_the_recent_past_and_falls_to_zero(state: RunState, clock: Clock) -> None:
    clock.now = 1100.0
    decode(state, 1090.0, 1090.0, num_tokens=0)
    decode(state, 1099.0, 1100.0, num_tokens=500)
    step(state, 1, started=1099.0, ended=1100.0, num_tokens=100)
    assert state.status().generation_rate == pytest.approx(50.0)
    clock.now = 1200.0
    assert (state.status().generation_rate, state.status().num_running) == (0.0, 0)


def test_heldout_scores_are_the_first_and_the_last(state: RunState) -> None:
    state.apply(Evaluated(version=0, source="a", num_tasks=256, mean_reward=0.5))
    assert (state.status().sources[0].heldout_before, state.status().sources[0].heldout_after) == (0.5, None)
    state.apply(Evaluated(version=5, source="a", num_tasks=256, mean_reward=0.7))
    state.apply(Evaluated(version=9, source="a", num_tasks=256, mean_reward=0.9))
    assert (state.status().sources[0].heldout_before, state.status().sources[0].heldout_after) == (0.5, 0.9)


def test_heldout_tasks_without_a_score_are_counted_also_where_there_is_no_score_at_all(state: RunState) -> None:
    state.apply(Evaluated(version=0, source="a", num_tasks=0, mean_reward=None, num_failed=64))
    assert heldout(state.status().sources[0]) == "– (64 of 64 tasks failed: do not compare)"
    state.apply(Evaluated(version=5, source="a", num_tasks=62, mean_reward=0.7, num_failed=2))
    assert heldout(state.status().sources[0]) == "– → 0.700 (64 and 2 of 64 tasks failed: do not compare)"
    state.apply(Evaluated(version=0, source="b", num_tasks=64, mean_reward=0.5))
    assert heldout(state.status().sources[1]) == "0.500 (64 tasks)"
    state.apply(Evaluated(version=5, source="b", num_tasks=62, mean_reward=0.7, num_failed=2))
    assert heldout(state.status().sources[1]) == "0.500 → 0.700 (0 and 2 of 64 tasks failed)"


def test_failures_are_counted_by_class_those_of_evaluations_too(state: RunState) -> None:
    for error in ("KeyError: 'x'", "KeyError: 'y'", None):
        rollout(state, None, error=error)
    rollout(state, None, error="ToolError: x", key=RolloutKey(GroupKey(0, 1), 0, Kind.EVALUATION))
    assert state.status().failures == {"KeyError": 2, "no reward": 1, "ToolError": 1}


def test_the_readings_that_matter_are_those_of_the_last_step(state: RunState) -> None:
    step(state, 1, **{"mismatch/mean": 0.1, "grad_norm": 1.0})
    step(state, 2, **{"mismatch/mean": 0.2, "rho/max": 7.0, "grad_norm": math.nan})
    found = msgspec.json.decode(msgspec.json.encode(state.status()), type=Status).trainer
    assert found == {"mismatch/mean": 0.2, "grad_norm": None}


def test_engines_in_quarantine_and_dropped_groups_are_shown(state: RunState) -> None:
    state.accounts = lambda: Accounts(dropped={"stale": 1})
    state.apply(Quarantined(engine="engine0", error="x"))
    state.apply(Quarantined(engine="engine1", error="x"))
    state.apply(Rejoined(engine="engine0", version=3))
    state.apply(RequestFailed(session_id="s", status=500, error="x"))
    status = state.status()
    assert (status.quarantined, status.dropped, status.totals.failed_requests) == (("engine1",), {"stale": 1}, 1)


def test_a_status_survives_the_trip_to_the_launcher(state: RunState, clock: Clock) -> None:
    state.begin_phase(Phase.TRAINING)
    rollout(state, 1.0)
    batch(state, 0, {0: 3, 1: 4})
    decode(state, 1000.0, 1001.0)
    step(state, 1)
    state.apply(Waited(who="trainer", for_whom="engines", seconds=0.5))
    clock.now = 1002.0
    status = replace(state.status(), warm_start=WarmStartStatus(3, 100, loss=1.5))
    assert msgspec.json.decode(msgspec.json.encode(status), type=Status) == status
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=Status) == status


@pytest.mark.parametrize(
    ("engine", "trainer", "expected"),
    [(0.9, 0.5, Bound.GENERATION), (0.5, 0.9, Bound.TRAINER), (0.9, 0.85, Bound.BALANCED), (None, None, Bound.UNKNOWN)],
)
def test_the_side_with_less_idle_time_bounds_the_run(engine: float | None, trainer: float | None, expected: Bound) -> None:
    bound, advice = find_bottleneck(engine_busy=engine, trainer_busy=trainer)
    assert bound is expected
    assert ("50%" in advice) == (expected in (Bound.GENERATION, Bound.TRAINER))


FULL = CoreUse(are_full=True, can_lend=True, can_shift=True)


def test_full_cores_are_not_asked_for_more_engines_or_threads() -> None:
    for used in (None, 0.9):
        _, advice = find_bottleneck(engine_busy=1.0, trainer_busy=0.5, slots_used=used, cores=FULL)
        assert "every core computes already" in advice and "engine.lend = true" in advice and "fewer trainer.threads" in advice
        assert "more engine.count" not in advice and "more cores" in advice
        _, bare = find_bottleneck(engine_busy=1.0, trainer_busy=0.5, slots_used=used, cores=CoreUse(are_full=True))
        assert "engine.lend" not in bare and "trainer.threads" not in bare and "environment.max_tokens" in bare
    _, free = find_bottleneck(engine_busy=1.0, trainer_busy=0.5)
    assert "more engine.count" in free


def test_a_trainer_on_full_cores_gets_threads_of_the_engines() -> None:
    _, advice = find_bottleneck(engine_busy=0.5, trainer_busy=1.0, cores=FULL)
    assert "more trainer.threads for fewer engine.threads or engine.count" in advice
    _, waiting = find_bottleneck(engine_busy=0.5, trainer_busy=0.5, slots_used=0.2, cores=FULL)
    assert "max_in_flight" in waiting, "what waits for agents needs no cores"


def test_a_run_knows_whether_engines_and_trainer_have_all_cores() -> None:
    def use(*overrides: str, cores: int = 2) -> CoreUse:
        return core_use(load_config(None, overrides), cores)

    one = {"can_give": False, "has_one_engine": True}
    assert use() == CoreUse(are_full=True, can_lend=True, **one), "an engine and a trainer with a thread each"
    assert use(cores=3) == CoreUse(has_one_engine=True)
    assert use("trainer.threads=2", cores=3) == CoreUse(are_full=True, can_lend=True, can_shift=True, **one)
    assert use("engine.lend=true") == CoreUse(are_full=True, **one)
    assert use("engine.device=cuda") == CoreUse(has_one_engine=True)
    assert use("engine.threads=2") == CoreUse(are_full=True, can_lend=True, has_one_engine=True)
    assert use("engine.count=2") == CoreUse(are_full=True, can_lend=True)


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_a_run_of_one_engine_with_one_thread_is_never_told_to_have_fewer(cores: int) -> None:
    """The demo's own run, whichever side bounds it."""
    used = core_use(load_config(Path("configs/demo.toml"), []), cores)
    for engine, trainer, slots in ((0.5, 1.0, None), (1.0, 0.95, 0.3), (1.0, 0.5, 0.9), (0.5, 0.5, 0.2), (0.9, 0.9, 0.9)):
        _, advice = find_bottleneck(engine_busy=engine, trainer_busy=trainer, slots_used=slots, cores=used)
        assert "fewer" not in advice, advice
    _, several = find_bottleneck(engine_busy=0.5, trainer_busy=1.0, cores=core_use(load_config(None, ["engine.count=2"]), 9))
    assert "or fewer engines" in several


def test_a_rate_forgets_what_left_its_window() -> None:
    rate = Rate(10.0)
    assert rate.per_second(3.0) == 0.0
    rate.add(0.0, 0.0, 100)
    rate.add(5.0, 5.0, 50)
    assert rate.per_second(10.0) == 15.0
    assert rate.per_second(12.0) == 5.0
    for tick in range(200, 400):
        rate.add(tick / 10, tick / 10 + 0.01, 2)
    assert rate.per_second(40.0) == pytest.approx(20.0)


def test_a_rate_of_steps_that_are_longer_than_its_window_is_that_of_the_step() -> None:
    rate = Rate(10.0)
    rate.add(0.0, 40.0, 4000)
    assert rate.per_second(40.0) == 100.0
    assert (rate.per_second(50.0), rate.per_second(51.0)) == (80.0, 0.0)
    rate.add(50.0, 70.0, 1000)
    assert rate.per_second(70.0) == 50.0
    rate.add(70.0, 75.0, 500)
    assert rate.per_second(75.0) == 75.0, "half of the window is of the step before"


def test_a_rate_bears_an_instant_that_is_told_after_a_long_step_and_left_the_window() -> None:
    rate = Rate(10.0)
    rate.add(0.0, 40.0, 4000)
    rate.add(10.0, 10.0, 7)
    rate.add(39.0, 39.5, 20)
    assert rate.per_second(45.0) == pytest.approx((500 + 20) / 10)


def test_a_mean_of_nothing_is_unknown() -> None:
    mean = Mean(2)
    assert mean.value() is None
    for number in (1.0, 2.0, 4.0):
        mean.add(number)
    assert mean.value() == 3.0


def test_a_resumed_run_counts_what_the_store_has_of_the_whole_run(state: RunState) -> None:
    state.restore(step=2, version=2, totals=Totals(generated_tokens=50, trained_tokens=99, rollouts=3, failed_requests=4))
    accounts = Accounts(trained=4, dropped={"requeued": 10}, received_tokens=60, trained_tokens=30, waiting_tokens=30)
    state.apply(Resumed(accounts, 5, {"a": 5, "b": 2}, {"a": 1}, {"a": 2.5}))
    totals, status = state.totals, state.status()
    # 60 tokens of rollouts that ended and 5 of turns that are given again: more than the journal's last line knew of.
    assert (totals.generated_tokens, totals.trained_tokens, totals.rollouts, totals.failed_rollouts) == (65, 30, 8, 1)
    assert totals.failed_requests == 4
    assert [(source.name, source.num_rollouts) for source in status.sources] == [("a", 6), ("b", 2)]


def test_steps_that_a_trainer_takes_back_while_the_process_lives_do_not_count(state: RunState) -> None:
    for version in (1, 2, 3):
        step(state, version)
        if version == 2:
            state.apply(Checkpointed(1))
    state.apply(WentBack(1, 5, ()))
    assert (state.step, state.totals.trained_tokens) == (1, 100)
    step(state, 6)
    assert (state.step, state.totals.trained_tokens, state.status().version) == (2, 200, 6)
