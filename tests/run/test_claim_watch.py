"""Rollouts that nobody claims: nothing ends their wait, and people are told what it is."""

from __future__ import annotations

import asyncio

from midflight.environments.claimed import Board, Offer
from midflight.run.rollout.claim_watch import ClaimWatch
from midflight.testing.virtual_time import run_virtual
from midflight.types import Task, facts


def offer(session: str) -> Offer:
    return Offer(Task("t", "s"), session, "key", asyncio.get_running_loop().create_future())


def test_an_alarm_says_that_nobody_claims_since_when_and_what_to_do_and_again_when_that_has_doubled() -> None:
    async def main() -> None:
        said: list[tuple[float, facts.Alarmed]] = []
        loop, board = asyncio.get_running_loop(), Board()
        began = loop.time()
        watch = ClaimWatch(board, lambda alarm: said.append((loop.time() - began, alarm)), stall_seconds=120.0, where="run/endpoint.json")

        async def looks(seconds: float) -> None:
            for _ in range(int(seconds)):
                await asyncio.sleep(1)
                watch.look()

        await looks(300)
        assert said == [], "nothing waits"
        first, second = offer("mf-1"), offer("mf-2")
        board.offer(first)
        board.offer(second)
        await looks(600)
        assert [at for at, _ in said] == [420, 540, 780] and {alarm.name for _, alarm in said} == {"unclaimed"}
        text = said[0][1].text
        assert "nobody has claimed a rollout for 2 min 00 s: 2 rollouts wait to be claimed, the oldest for 2 min 00 s" in text
        assert "no worker has claimed one so far" in text and "Start workers" in text and "run/endpoint.json" in text
        board.claim(1)
        await looks(500)
        assert len(said) == 3, "a worker is busy with the one that it claimed"
        board.withdraw(first)
        await looks(119)
        assert len(said) == 3
        await looks(1)
        assert len(said) == 4 and "1 rollout waits to be claimed, for 20 min 20 s; the last claim was 10 min 20 s ago" in said[3][1].text

    run_virtual(main)
