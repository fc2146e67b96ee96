"""Bounds that follow from others: of a pause, of requests, of what outlives its client, of finished rollouts."""

from __future__ import annotations

from typing import Literal

import pytest
from tests.gateway.generating import TOKENIZER

from midflight.config.derived import machine_bytes
from midflight.config.sections import Config, GatewaySection, RolloutSection, WeightsSection
from midflight.errors import Overloaded
from midflight.run.engine.engine_process import lease_seconds
from midflight.run.rollout.serving import Serving
from midflight.run.rollout.system import buffer_limits
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types.facts import record_nothing


@pytest.mark.parametrize(
    ("commit", "commit_seconds", "expected"),
    [("rolling", 30.0, 30.0), ("rolling", 5.0, 30.0), ("rolling", 60.0, 60.0), ("barrier", 30.0, 120.0), ("barrier", 5.0, 30.0)],
)
def test_an_engine_stays_paused_for_as_long_as_a_commit_may_take(
    commit: Literal["rolling", "barrier"], commit_seconds: float, expected: float
) -> None:
    """30 s at least; in a barrier three phases may each wait for another engine, and a fourth is spare."""
    assert lease_seconds(WeightsSection(commit=commit, commit_seconds=commit_seconds)) == expected


def test_as_many_requests_as_sessions_are_under_way_and_outlive_their_client_for_a_fourth_of_their_deadline() -> None:
    async def main() -> None:
        config = Config(gateway=GatewaySection(max_sessions=2, request_seconds=80))
        engine = ScriptedEngine("e0", tokenizer=TOKENIZER)
        requests = Serving(config, TOKENIZER, [engine], record=record_nothing, version=0, anonymous=False).gateway.requests
        assert requests.orphan_seconds == 20
        requests.num_running = 1
        requests.check_room()
        requests.num_running = 2
        with pytest.raises(Overloaded, match=r"2 requests are under way.*raise gateway\.max_sessions"):
            requests.check_room()

    run_virtual(main)


@pytest.mark.parametrize("shards", [1, 3])
def test_finished_rollouts_of_all_shards_may_take_a_quarter_of_the_memory(shards: int) -> None:
    assert buffer_limits(RolloutSection(), shards=shards).buffer_bytes == machine_bytes() // 4 // shards
