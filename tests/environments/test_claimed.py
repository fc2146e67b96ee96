"""Rollouts that workers outside claim: each offer is one attempt, and only its worker's word ends it before its deadline."""

from __future__ import annotations

import asyncio

import pytest

from midflight.environments.agent_program import load_environment
from midflight.environments.claimed import OUTSIDE, Board, Claimed, Offer, claims
from midflight.environments.worker_pool import HERE, RolloutPlacement
from midflight.errors import RewardFixed, SessionClosed, UnknownSession
from midflight.testing.virtual_time import run_virtual
from midflight.types import Task, UnclaimedRollouts


class Client:
    """As much of the SDK's as the environment reads."""

    def __init__(self, session_id: str) -> None:
        self.api_key = f"{session_id}.secret"


def run_of(environment: Claimed, session_id: str) -> asyncio.Task[float | None]:
    return asyncio.get_running_loop().create_task(environment(Task("t", "s"), Client(session_id)))  # type: ignore[arg-type]


def test_the_entry_is_found_and_each_run_has_a_board_of_its_own() -> None:
    first, second = (load_environment("midflight.environments.claimed:claimed") for _ in range(2))
    assert isinstance(first, Claimed) and isinstance(second, Claimed) and first.board is not second.board


def test_a_rollout_waits_for_its_workers_reward() -> None:
    async def main() -> None:
        environment = Claimed()
        running = run_of(environment, "mf-1")
        (offer,) = await claims(environment.board, most=5, wait_seconds=10)
        assert (offer.session_id, offer.api_key, offer.task.id) == ("mf-1", "mf-1.secret", "t")
        assert environment.board.claim(5) == [], "claimed once"
        assert "secret" not in repr(offer)
        environment.board.score("mf-1", 0.25)
        assert await running == 0.25
        environment.board.score("mf-1", 0.25)
        with pytest.raises(RewardFixed):
            environment.board.score("mf-1", 0.5)
        assert (environment.board.num_offered, environment.board.num_claimed) == (0, 0)

    run_virtual(main)


def test_what_waits_to_be_claimed_is_known_with_its_ages() -> None:
    async def main() -> None:
        environment = Claimed()
        board = environment.board
        assert board.unclaimed() is None
        await asyncio.sleep(100)
        first = run_of(environment, "mf-1")
        await asyncio.sleep(5)
        second = run_of(environment, "mf-2")
        await asyncio.sleep(2)
        assert board.unclaimed() == UnclaimedRollouts(number=2, seconds=7.0, idle_seconds=7.0, claimed_seconds=None)
        board.claim(1)
        await asyncio.sleep(20)
        assert board.unclaimed() == UnclaimedRollouts(number=1, seconds=22.0, idle_seconds=0.0, claimed_seconds=20.0), "a worker is busy"
        board.score("mf-1", 1.0)
        await first
        await asyncio.sleep(3)
        assert board.unclaimed() == UnclaimedRollouts(number=1, seconds=25.0, idle_seconds=3.0, claimed_seconds=23.0)
        assert board.placement("mf-2") == RolloutPlacement(OUTSIDE, waits=True)
        board.claim(1)
        assert board.unclaimed() is None and board.placement("mf-2") == HERE
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)

    run_virtual(main)


def test_i10_a_silent_worker_costs_the_attempt_and_its_late_reward_is_refused() -> None:
    async def main() -> None:
        environment = Claimed()
        running = run_of(environment, "mf-1")
        await claims(environment.board, most=1, wait_seconds=1)
        running.cancel()  # the rollout's deadline
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(SessionClosed, match="by its deadline"):
            environment.board.score("mf-1", 1.0)
        again = run_of(environment, "mf-2")
        assert [offer.session_id for offer in await claims(environment.board, most=1, wait_seconds=1)] == ["mf-2"], "a new attempt"
        assert environment.board.give_up("mf-2") is None
        assert await again is None

    run_virtual(main)


def test_what_nobody_claimed_cannot_be_scored_and_is_withdrawn_with_its_rollout() -> None:
    async def main() -> None:
        environment = Claimed()
        running = run_of(environment, "mf-1")
        await asyncio.sleep(0)
        with pytest.raises(UnknownSession, match="claim it first"):
            environment.board.score("mf-1", 1.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert await claims(environment.board, most=1, wait_seconds=1) == []

    run_virtual(main)


def test_workers_that_wait_are_served_in_order_and_one_that_goes_passes_its_turn_on() -> None:
    async def main() -> None:
        board = Board()
        loop = asyncio.get_running_loop()
        waiting = [loop.create_task(claims(board, most=1, wait_seconds=60)) for _ in range(3)]
        await asyncio.sleep(1)
        board.offer(Offer(Task("a", "s"), "mf-a", "mf-a.x", loop.create_future()))
        waiting[0].cancel()  # in the moment in which it was woken
        await asyncio.sleep(1)
        assert waiting[1].done() and [offer.session_id for offer in waiting[1].result()] == ["mf-a"]
        assert not waiting[2].done()
        began = loop.time()
        assert await waiting[2] == [] and loop.time() - began == pytest.approx(58)

    run_virtual(main)
