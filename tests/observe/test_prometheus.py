"""Facts as counters in Prometheus' text format."""

from __future__ import annotations

from tests.observe.facts import decode, rollout
from tests.observe.test_observers import tell_everything

from midflight.observe.prometheus import Metrics


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
    ):
        assert line in text, line


def test_negative_rewards_count_in_the_sum_of_rewards() -> None:
    metrics = Metrics()
    for reward in (1.0, -1.0, -1.0):
        rollout(metrics, reward)
    assert 'midflight_reward_sum{source="spell_backward"} -1.0' in metrics.text().decode()


def test_two_gateways_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    decode(first, 0.0, 1.0)
    assert b'midflight_engine_tokens_total{engine="engine0"}' not in second.text()
