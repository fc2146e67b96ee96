"""The waits of `GroupQueue`: what ends each, in which order, and what is observed. On virtual time, where a hang fails at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.facts import Facts

from midflight.buffer import Closed, GroupQueue, Limits
from midflight.errors import Stopping
from midflight.testing.virtual_time import run_virtual
from midflight.types import Batch, GroupKey, Reason, StalePolicy
from midflight.types.facts import GroupClosed, Leased, Waited

from .making import group, key, limits


class Bench:
    def __init__(self, rules: Limits) -> None:
        self.facts = Facts()
        self.oldest: dict[GroupKey, int | None] = {}
        self.closed: list[Closed] = []
        self.queue = GroupQueue(rules, record=self.facts.apply, running_oldest=self.oldest.get, closed=self.closed.append)
        self.drawn = 0

    async def admit(self) -> GroupKey:
        return await self.queue.admit(self._draw)

    def _draw(self) -> GroupKey:
        self.drawn += 1
        return key(self.drawn - 1)


def check(story: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await story()

    run_virtual(main)


def test_take_is_woken_by_the_put_that_completes_its_batch() -> None:
    async def story() -> None:
        bench = Bench(limits(2, 0))
        first, second = await bench.admit(), await bench.admit()
        async with asyncio.TaskGroup() as tasks:
            take = tasks.create_task(bench.queue.take(0))
            await asyncio.sleep(1)
            bench.queue.put(group(first, (0,)))
            await asyncio.sleep(1)
            assert not take.done() and bench.queue.waits["trainer"].for_whom == "generation"
            bench.queue.put(group(second, (0, 0)))
        assert [g.key for g in take.result().groups] == [first, second]
        assert not bench.queue.waits
        assert bench.facts.of(Waited) == [Waited("trainer", "generation", 2.0)]
        assert bench.facts.of(Leased) == [Leased(train_version=0, num_groups=2, num_tokens=3, staleness={0: 3})]

    check(story)


def test_whom_the_trainer_waits_for_is_observed_piece_by_piece() -> None:
    async def story() -> None:
        bench = Bench(limits(1, 1))
        first, straggler = await bench.admit(), await bench.admit()
        bench.oldest[straggler] = 0
        bench.queue.restart(1)
        async with asyncio.TaskGroup() as tasks:
            take = tasks.create_task(bench.queue.take(1))
            await asyncio.sleep(1)
            bench.queue.put(group(first, (1,)))
            await asyncio.sleep(2)
            assert bench.queue.waits["trainer"].for_whom == "stragglers"
            bench.queue.drop(straggler, Reason.NO_REWARD, num_tokens=5)
        assert take.result().groups[0].key == first
        assert [(w.for_whom, w.seconds) for w in bench.facts.of(Waited)] == [("generation", 1.0), ("stragglers", 2.0)]
        assert bench.facts.of(GroupClosed) == [GroupClosed(straggler, Reason.NO_REWARD, num_tokens=5)]

    check(story)


def test_admission_is_first_come_first_served() -> None:
    async def story() -> None:
        bench = Bench(limits(1, 0))
        held = await bench.admit()
        order: list[str] = []

        async def ask(name: str) -> None:
            await bench.admit()
            order.append(name)

        async with asyncio.TaskGroup() as tasks:
            for name in "abc":
                tasks.create_task(ask(name))
                await asyncio.sleep(0.1)
            for index in range(3):
                bench.queue.drop(held if index == 0 else key(index), Reason.TOO_FEW)
                await asyncio.sleep(0.1)
        assert order == ["a", "b", "c"]

    check(story)


@pytest.mark.parametrize("cause", ["served", "end_rollout", "take", "put"])
def test_admission_is_woken_by_everything_that_can_make_room(cause: str) -> None:
    async def story() -> None:
        rules = {
            "served": limits(1, 0),
            "end_rollout": limits(1, 4, max_in_flight=1),
            "take": limits(1, 4, buffer_groups=1),
            "put": limits(1, 0, min_group_size=1, drop_zero_spread=True),
        }[cause]
        bench = Bench(rules)
        first = await bench.admit()
        if cause in ("served", "take"):
            bench.queue.put(group(first, (0,)))
        if cause == "served":
            bench.queue.done((await bench.queue.take(0)).lease)
        async with asyncio.TaskGroup() as tasks:
            admit = tasks.create_task(bench.admit())
            await asyncio.sleep(1)
            assert not admit.done()
            match cause:
                case "served":
                    bench.queue.served(1)
                case "end_rollout":
                    bench.queue.end_rollout(first)
                case "take":
                    await bench.queue.take(0)
                case _:
                    bench.queue.put(group(first, (0,)))
        assert admit.result() == key(1)

    check(story)


def test_a_group_that_a_waiting_take_requeues_starts_again_although_nothing_else_happens() -> None:
    """The take that closes the group goes on waiting; were admission not woken by it, both would wait for ever."""

    async def story() -> None:
        bench = Bench(limits(1, 0, StalePolicy.REQUEUE))
        bench.queue.put(group(await bench.admit(), (0,)))
        async with asyncio.TaskGroup() as tasks:
            admit = tasks.create_task(bench.admit())
            await asyncio.sleep(1)
            assert not admit.done()
            bench.queue.restart(1)
            bench.queue.served(1)
            take = tasks.create_task(bench.queue.take(1))
            again = await admit
            assert again == key(0, attempt=1)
            bench.queue.put(group(again, (1,)))
        assert take.result().groups[0].key == again

    check(story)


def test_a_trainer_that_asks_again_gets_the_same_batch_even_while_its_next_take_waits() -> None:
    async def story() -> None:
        bench = Bench(limits(1, 1))
        bench.queue.put(group(await bench.admit(), (0,)))
        first = await bench.queue.take(0)
        async with asyncio.TaskGroup() as tasks:
            ahead = tasks.create_task(bench.queue.take(1))
            await asyncio.sleep(1)
            assert await bench.queue.take(0) is first
            bench.queue.put(group(await bench.admit(), (0,)))
        assert ahead.result().train_version == 1
        assert len(bench.facts.of(Leased)) == 2

    check(story)


def test_a_trainer_that_asks_again_before_its_batch_is_there_does_not_wait_for_its_next_take() -> None:
    async def story() -> None:
        bench = Bench(limits(1, 1))
        first = await bench.admit()
        async with asyncio.TaskGroup() as tasks:
            takes = [tasks.create_task(bench.queue.take(version)) for version in (0, 1, 0)]
            await asyncio.sleep(1)
            bench.queue.put(group(first, (0,)))
            await asyncio.sleep(1)
            assert [take.done() for take in takes] == [True, False, True]
            assert takes[0].result() is takes[2].result()
            bench.queue.put(group(await bench.admit(), (0,)))
            await asyncio.sleep(1)
            assert takes[1].done()

    check(story)


def test_a_cancelled_take_leaves_its_place_to_the_next() -> None:
    async def story() -> None:
        bench = Bench(limits(1, 0))
        started = await bench.admit()
        async with asyncio.TaskGroup() as tasks:
            gone = tasks.create_task(bench.queue.take(0))
            again: asyncio.Task[Batch] = tasks.create_task(bench.queue.take(0))
            await asyncio.sleep(1)
            gone.cancel()
            bench.queue.put(group(started, (0,)))
        assert again.result().groups[0].key == started

    check(story)


def test_close_ends_every_wait() -> None:
    async def story() -> None:
        bench = Bench(limits(1, 0))
        await bench.admit()
        waits = [asyncio.ensure_future(bench.admit()), asyncio.ensure_future(bench.admit()), asyncio.ensure_future(bench.queue.take(0))]
        await asyncio.sleep(1)
        bench.queue.close()
        for ended in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(ended, Stopping)

    check(story)
