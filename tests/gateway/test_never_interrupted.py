"""At the agent's edge: whatever happens to the engines, every dialect gives the undisturbed answer."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.asked import Told, asked, requests
from tests.gateway.site import Site

from midflight.testing.virtual_time import run_virtual
from midflight.types import GroupKey, PauseMode, RolloutKey, SamplingParams

STOP = "th"
REQUESTS = requests(60, stop=STOP)


async def all_told(events: list[tuple[float, str, int]]) -> tuple[dict[tuple[str, bool], Told], int, int]:
    """Every request at once, streamed and not, each in a session of its own; and how many turns and rows were recorded."""
    site = Site()
    async with site.http() as http:
        handles, tasks = [], {}
        async with asyncio.TaskGroup() as group:
            disturbance = group.create_task(site.disturb(events))
            for number, (name, stream) in enumerate((n, s) for n in REQUESTS for s in (False, True)):
                key = RolloutKey(GroupKey(0, number), 0)
                handle = site.gateway.open(key, sampling=SamplingParams(max_tokens=60), tracked=True)
                handles.append(handle)
                tasks[name, stream] = group.create_task(asked(http, handle.base_url, REQUESTS[name], stream=stream))
            await disturbance
        records = [site.gateway.close(handle.session_id) for handle in handles]
    assert all(record.failed_requests == 0 for record in records)
    told = {key: task.result() for key, task in tasks.items()}
    return told, sum(r.num_turns for r in records), sum(row.num_trainable for r in records for row in r.rows)


CALM = None


def calm() -> tuple[dict[tuple[str, bool], Told], int, int]:
    global CALM
    CALM = CALM or run_virtual(all_told([]))
    return CALM


def test_streamed_and_whole_answers_of_a_calm_site_are_the_same() -> None:
    told, turns, _ = calm()
    for name in REQUESTS:
        assert told[name, True] == told[name, False], name
    assert turns == 2 * (6 + 4 + 8)
    assert any(STOP not in choice.text and choice.ended == "stop" for choice in told["eight prompts", False].choices.values())
    assert len({choice.text for choice in told["four choices", False].choices.values()}) == 4
    for name, answer in told.items():
        for choice in answer.choices.values():
            assert choice.ids and (len(choice.logprobs) == len(choice.ids) or name[0] == "messages"), name
        assert sum(completion for _, completion in answer.usage) == sum(len(choice.ids) for choice in answer.choices.values())


PAUSES = [f"pause by {mode}" for mode in PauseMode]
EVENT = st.tuples(
    st.floats(0.0, 0.3),
    st.sampled_from(["abort", "abort", "restart", "stall", "nonsense", *PAUSES]),
    st.integers(0, 1),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(EVENT, min_size=1, max_size=8))
def test_i5_no_schedule_of_pauses_aborts_and_deaths_changes_any_answer_in_any_dialect(events: list[tuple[float, str, int]]) -> None:
    assert run_virtual(all_told(events)) == calm()


@pytest.mark.parametrize("what", ["abort", "restart", "stall", "nonsense", *PAUSES])
def test_each_disturbance_twice_in_mid_answer_changes_nothing(what: str) -> None:
    assert run_virtual(all_told([(0.05, what, 0), (0.1, what, 1)])) == calm()
