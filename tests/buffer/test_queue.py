"""The waits of `GroupQueue`: what ends each, in which order, and what is observed. On virtual time, where a hang fails at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.facts import Facts

from midflight.buffer.groups import Limits
from midflight.buffer.queue import GroupQueue
from midflight.errors import Stopping
from midflight.testing.virtual_time import run_virtual
from midflight.types import Batch, GroupKey, Reason, StalePolicy, Task
from midflight.types.facts import Booked, Fact, GroupClosed, Leased, Waited

from .keeping import Keeper
from .making import group, key, limits


class Bench(Keeper):
    """Records as a run does: the books first, then whoever waits is woken."""

    def __init__(self, rules: Limits, *, start_version: int = 0) -> None:
        super().__init__(rules, start_version, also=self._recorded)
        self.facts = Facts()
        self.oldest: dict[GroupKey, int | None] = {}
        self.queue = GroupQueue(self.books, record=self.record, running_oldest=self.oldest.get)

    def _recorded(self, fact: Fact) -> None:
        self.facts.apply(fact)
        if isinstance(fact, Booked):
            self.queue.wake()

    async def start(self) -> GroupKey:
        return (await self.queue.admit(self._draw, lambda started: Task(f"task-{started.index}", "letters"))).key

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
        first, second = await bench.start(), await bench.start()
        async with asyncio.TaskGroup() as tasks:
            take = tasks.create_task(bench.queue.take(0))
            await asyncio.sleep(1)
            bench.put(group(first, (0,)))
            await asyncio.sleep(1)
            assert not take.done() and bench.queue.waits["trainer"].wait.for_whom == "generation"
            bench.put(group(second, (0, 0)))
        assert [g.key for g in take.result().groups] == [first, second]
        assert not bench.queue.waits
        assert bench.facts.of(Waited) == [Waited("trainer", "generation", 2.0)]
        (leased,) = bench.facts.of(Leased)
        assert (leased.batch, leased.staleness) == (take.result(), {0: 3})

    check(story)


def test_a_wait_is_counted_while_it_lasts_and_no_second_of_it_twice() -> None:
    async def story() -> None:
        bench = Bench(limits(1, 0))
        first = await bench.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bench.queue.take(0))
            await asyncio.sleep(2)
            bench.queue.count_waits()
            assert bench.facts.of(Waited) == [Waited("trainer", "generation", 2.0)]
            assert bench.queue.waits["trainer"].began == 0
            bench.queue.count_waits()
            await asyncio.sleep(3)
            bench.put(group(first, (0,)))
        assert [wait.seconds for wait in bench.facts.of(Waited)] == [2.0, 3.0]

    check(story)


def test_whom_the_trainer_waits_for_is_observed_piece_by_piece() -> None:
    async def story() -> None:
        bench = Bench(limits(1, 1), start_version=1)
        first, straggler = await bench.start(), await bench.start()
        bench.oldest[straggler] = 0
        async with asyncio.TaskGroup() as tasks:
            take = tasks.create_task(bench.queue.take(1))
            await asyncio.sleep(1)
            bench.put(group(first, (1,)))
            await asyncio.sleep(2)
            assert bench.queue.waits["trainer"].wait.for_whom == "stragglers"
            bench.lose(straggler, (1, 1, 1, 1, 1))
        assert take.result().groups[0].key == first
        assert [(w.for_whom, w.seconds) for w in bench.facts.of(Waited)] == [("generation", 1.0), ("stragglers", 2.0)]
        assert bench.facts.of(GroupClosed) == [GroupClosed(straggler, Reason.NO_REWARD, num_tokens=5)]

    check(story)


def test_admission_is_first_come_first_served() -> None:
    async def story() -> None:
        bench = Bench(limits(1, 0))
        held = await bench.start()
        order: list[str] = []

        async def ask(name: str) -> None:
            await bench.start()
            order.append(name)

        async with asyncio.TaskGroup() as tasks:
            for name in "abc":
                tasks.create_task(ask(name))
                await asyncio.sleep(0.1)
            for index in range(3):
                bench.lose(held if index == 0 else key(index), reason=Reason.TOO_FEW)
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
        first = await bench.start()
        if cause in ("served", "take"):
            bench.put(group(first, (0,)))
        if cause == "served":
            bench.done((await bench.queue.take(0)).lease)
        async with asyncio.TaskGroup() as tasks:
            admit = tasks.create_task(bench.start())
            await asyncio.sleep(1)
            assert not admit.done()
            match cause:
                case "served":
                    bench.serve(1)
                case "end_rollout":
                    bench.free(first)
                case "take":
                    await bench.queue.take(0)
                case _:
                    bench.put(group(first, (0,)))
        assert admit.result() == key(1)

    check(story)


def test_a_group_that_a_waiting_take_requeues_starts_again_although_nothing_else_happens() -> None:
    """The take that closes the group goes on waiting; were admission not woken by it, both would wait for ever."""

    async def story() -> None:
        bench = Bench(limits(1, 0, StalePolicy.REQUEUE), start_version=1)
        bench.put(group(await bench.start(), (0,)))
        async with asyncio.TaskGroup() as tasks:
            admit = tasks.create_task(bench.start())
            await asyncio.sleep(1)
            assert not admit.done()
            take = tasks.create_task(bench.queue.take(1))
            again = await admit
            assert again == key(0, attempt=1)
            bench.put(group(again, (1,)))
        assert take.result().groups[0].key == again

    check(story)


def test_a_trainer_that_asks_again_gets_the_same_batch_even_while_its_next_take_waits() -> None:
    async def story() -> None:
        bench = Bench(limits(1, 1))
        bench.put(group(await bench.start(), (0,)))
        first = await bench.queue.take(0)
        async with asyncio.TaskGroup() as tasks:
            ahead = tasks.create_task(bench.queue.take(1))
            await asyncio.sleep(1)
            assert await bench.queue.take(0) is first
            bench.put(group(await bench.start(), (0,)))
        assert ahead.result().train_version == 1
        assert len(bench.facts.of(Leased)) == 2

    check(story)


def test_a_trainer_that_asks_again_before_its_batch_is_there_does_not_wait_for_its_next_take() -> None:
    async def story() -> None:
        bench = Bench(limits(1, 1))
        first = await bench.start()
        async with asyncio.TaskGroup() as tasks:
            takes = [tasks.create_task(bench.queue.take(version)) for version in (0, 1, 0)]
            await asyncio.sleep(1)
            bench.put(group(first, (0,)))
            await asyncio.sleep(1)
            assert [take.done() for take in takes] == [True, False, True]
            assert takes[0].result() is takes[2].result()
            bench.put(group(await bench.start(), (0,)))
            await asyncio.sleep(1)
            assert takes[1].done()

    check(story)


def test_a_cancelled_take_leaves_its_place_to_the_next() -> None:
    async def story() -> None:
        bench = Bench(limits(1, 0))
        started = await bench.start()
        async with asyncio.TaskGroup() as tasks:
            gone = tasks.create_task(bench.queue.take(0))
            again: asyncio.Task[Batch] = tasks.create_task(bench.queue.take(0))
            await asyncio.sleep(1)
            gone.cancel()
            bench.put(group(started, (0,)))
        assert again.result().groups[0].key == started

    check(story)


def test_close_ends_every_wait() -> None:
    async def story() -> None:
        bench = Bench(limits(1, 0))
        await bench.start()
        waits = [asyncio.ensure_future(bench.start()), asyncio.ensure_future(bench.start()), asyncio.ensure_future(bench.queue.take(0))]
        await asyncio.sleep(1)
        bench.queue.close()
        for ended in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(ended, Stopping)

    check(story)
