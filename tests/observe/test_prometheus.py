"""Facts as counters in Prometheus' text format."""

from __future__ import annotations

from tests.observe.facts import Clock, batch, commit, decode, rollout, step
from tests.observe.test_observers import tell_everything

from midflight.observe.observers import Observers
from midflight.observe.prometheus import Metrics
from midflight.observe.run_state import RunState
from midflight.observe.status import LearningStatus, Phase
from midflight.types import Accounts, GroupKey, Kind, Reason, RolloutKey
from midflight.types.facts import Evaluated, GroupClosed, RequestFailed, Resumed, TaskDrawn, Waited


def test_every_fact_reaches_the_text() -> None:
    metrics = Metrics()
    tell_everything(metrics)
    rollout(metrics, 0.5)
    rollout(metrics, 0.5)
    text = metrics.text().decode()
    for line in (
        'midflight_engine_tokens_total{engine="engine0"} 10.0',
        'midflight_failed_requests_total{status="503"} 1.0',
        'midflight_rollouts_total{scored="no",source="spell_backward"} 1.0',
        'midflight_rollouts_total{scored="yes",source="spell_backward"} 2.0',
        'midflight_failed_rollouts_total{error="KeyError"} 1.0',
        'midflight_alarms_total{name="failure"} 1.0',
        'midflight_reward_sum{source="spell_backward"} 1.0',
        'midflight_dropped_groups_total{reason="stale"} 1.0',
        'midflight_waited_seconds_total{for_whom="engines",who="trainer"} 1.5',
        'midflight_trained_tokens_by_age_total{age="2"} 7.0',
        'midflight_engine_version{engine="engine0"} 4.0',
        'midflight_engine_quarantined{engine="engine0"} 0.0',
        "midflight_resumes_total 1.0",
        "midflight_turns_spanning_versions_total 1.0",
        "midflight_turns_total 1.0",
        "midflight_prompt_tokens_total 3.0",
        'midflight_turn_output_tokens_bucket{le="1.0"} 0.0',
        'midflight_turn_output_tokens_bucket{le="4.0"} 1.0',
        'midflight_turn_output_tokens_bucket{le="+Inf"} 1.0',
        "midflight_turn_output_tokens_sum 4.0",
    ):
        assert line in text, line


def test_what_is_exported_are_the_figures_of_the_status() -> None:
    """Both observe the same facts, those of an evaluation among them."""
    state, metrics = RunState(clock=Clock()), Metrics()
    state.begin_phase(Phase.TRAINING)
    run = Observers([state.apply, metrics.apply])
    for reward in (1.0, 0.25, None):
        rollout(run, reward, error="KeyError: 'x'")
    for reward in (1.0, None):
        rollout(run, reward, error="ToolError: y", key=RolloutKey(GroupKey(0, 1), 0, Kind.EVALUATION))
    run.apply(RequestFailed(session_id="s", status=503, error="x"))
    run.apply(Waited(who="trainer", for_whom="engines", seconds=1.5))
    decode(run, 1000.0, 1001.0, num_tokens=12)
    batch(run, 0, {0: 5, 3: 2})
    step(run, 1, num_tokens=7)
    commit(run, 1)
    run.apply(Evaluated(version=1, source="a", num_tasks=9, mean_reward=0.75, num_failed=1))
    found: dict[str, float] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    status = state.status()
    totals = status.totals
    assert found["midflight_rollouts_total"] == totals.rollouts == 3
    assert (
        metrics.registry.get_sample_value("midflight_rollouts_total", {"source": "spell_backward", "scored": "no"})
        == totals.failed_rollouts
    )
    assert found["midflight_reward_sum"] == status.sources[0].reward * 2  # type: ignore[operator]
    assert found["midflight_failed_rollouts_total"] == sum(status.failures.values()) == 2
    assert found["midflight_failed_requests_total"] == totals.failed_requests == 1
    assert found["midflight_engine_tokens_total"] == totals.generated_tokens == 12
    assert found["midflight_trained_tokens_total"] == found["midflight_trained_tokens_by_age_total"] == totals.trained_tokens == 7
    assert found["midflight_waited_seconds_total"] == sum(wait.seconds for wait in status.waits) == 1.5
    assert found["midflight_version"] == found["midflight_engine_version"] == status.version == 1
    assert (found["midflight_heldout_reward"], found["midflight_heldout_failed"]) == (status.sources[1].heldout_newest, 1)


def test_what_there_is_to_learn_from_is_told_once_it_is_known() -> None:
    metrics = Metrics()
    assert "midflight_truncated_share" not in metrics.text().decode()
    metrics.learning = lambda: LearningStatus(generated_length=12.5, truncated_share=0.0)
    text = metrics.text().decode()
    assert "midflight_generated_length 12.5" in text and "midflight_truncated_share 0.0" in text
    assert "midflight_reward_spread " not in text


def test_negative_rewards_count_in_the_sum_of_rewards() -> None:
    metrics = Metrics()
    for reward in (1.0, -1.0, -1.0):
        rollout(metrics, reward)
    assert 'midflight_reward_sum{source="spell_backward"} -1.0' in metrics.text().decode()


def test_pools_and_refills_are_told_once_there_are_some() -> None:
    metrics = Metrics()
    metrics.apply(TaskDrawn(GroupKey(0, 2), "hard", {"unseen": 9, "hard": 1}, None))
    metrics.apply(GroupClosed(GroupKey(0, 1), Reason.ZERO_SPREAD, 7, alike="failed"))
    text = metrics.text().decode()
    for line in ('refilled_groups_total{alike="failed"} 1.0', 'drawn_tasks_total{pool="hard"} 1.0', 'pool_tasks{pool="unseen"} 9.0'):
        assert f"midflight_{line}" in text
    assert 'midflight_dropped_groups_total{reason="zero_spread"} 1.0' in text


def test_two_gateways_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    decode(first, 0.0, 1.0)
    assert b'midflight_engine_tokens_total{engine="engine0"}' not in second.text()


def test_the_counters_of_a_resumed_run_go_on_where_those_before_the_crash_stood() -> None:
    metrics = Metrics()
    accounts = Accounts(
        6, 1, 1, 0, 2, {"stale": 2}, received_tokens=70, waiting_tokens=20, trained_tokens=40, masked_tokens={"stale": 3},
        dropped_tokens={"no_reward": 7},
    )  # fmt: skip
    metrics.apply(Resumed(accounts, 5, {"a": 5}, {"a": 1}, {"a": 2.5}))
    metrics.accounts = lambda: accounts
    text = metrics.text().decode()
    for line in (
        'midflight_rollouts_total{scored="yes",source="a"} 5.0',
        'midflight_rollouts_total{scored="no",source="a"} 1.0',
        'midflight_reward_sum{source="a"} 2.5',
        'midflight_dropped_groups_total{reason="stale"} 2.0',
        "midflight_trained_tokens_total 40.0",
        'midflight_groups{state="running"} 1.0',
        'midflight_groups{state="dropped"} 2.0',
        'midflight_tokens{fate="waiting",reason=""} 20.0',
        'midflight_tokens{fate="trained",reason=""} 40.0',
        'midflight_tokens{fate="masked",reason="stale"} 3.0',
        'midflight_tokens{fate="dropped",reason="no_reward"} 7.0',
    ):
        assert line in text, line
