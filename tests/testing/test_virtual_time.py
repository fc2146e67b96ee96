"""The virtual clock: waiting is free, hangs and leaks fail at once, interleavings replay from their seed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from midflight.testing.virtual_time import DeadlockError, LeakedTasks, NotVirtual, VirtualTimeLoop, run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_day_of_sleep_takes_no_real_time():
    async def main() -> float:
        await asyncio.sleep(86_400)
        return now()

    started = time.perf_counter()
    assert run_virtual(main) == 86_400.0
    assert time.perf_counter() - started < 1


def test_timers_fire_at_their_exact_times_and_ties_in_order_of_creation():
    async def main() -> list[tuple[float, int]]:
        seen: list[tuple[float, int]] = []
        loop = asyncio.get_running_loop()
        for i in range(50):
            loop.call_at(0.1 * 3 if i % 2 else 1e9 / 1e4, lambda i=i: seen.append((now(), i)))
        await asyncio.sleep(200_000)
        return seen

    odd, even = [(0.1 * 3, i) for i in range(1, 50, 2)], [(1e5, i) for i in range(0, 50, 2)]
    assert run_virtual(main) == odd + even


def test_timeout_ends_a_wait_at_its_deadline():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        return now()

    assert run_virtual(main) == 2.5


def test_condition_queue_and_task_group_work_together():
    async def main() -> tuple[list[int], float]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
        condition = asyncio.Condition()
        got: list[int] = []

        async def produce() -> None:
            for i in range(3):
                await asyncio.sleep(1)
                await queue.put(i)

        async def consume() -> None:
            for _ in range(3):
                item = await queue.get()
                async with condition:
                    got.append(item)
                    condition.notify_all()

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume())
            async with condition:
                await condition.wait_for(lambda: len(got) == 3)
        return got, now()

    assert run_virtual(main) == ([0, 1, 2], 3.0)


def test_a_hang_fails_at_once_and_says_where_each_task_waits():
    async def wait_for_a_reply() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for_a_reply(), name="the agent")

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main)
    message = str(caught.value)
    assert "2 tasks pending" in message
    assert "the agent" in message and "in test_a_hang_fails_at_once_and_says_where_each_task_waits.<locals>.wait_for_a_reply" in message
    assert "await asyncio.Event().wait()" in message


def test_a_hung_run_still_cleans_up():
    cleaned: list[str] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("main")

    with pytest.raises(DeadlockError):
        run_virtual(main)
    assert cleaned == ["main"]


def test_a_deadlock_kept_alive_by_a_heartbeat_is_a_hang_too():
    async def beat() -> None:
        while True:
            await asyncio.sleep(10)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(beat())

    with pytest.raises(DeadlockError, match="1000 virtual seconds"):
        run_virtual(main, max_seconds=1000)


def test_tasks_left_behind_are_cancelled_and_named():
    ended: list[str] = []

    async def linger() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("linger")

    async def main() -> None:
        task = asyncio.create_task(linger(), name="stray")
        await asyncio.sleep(1)
        assert not task.done()

    with pytest.raises(LeakedTasks, match="stray"):
        run_virtual(main)
    assert ended == ["linger"]


def test_an_exception_in_a_callback_fails_the_run():
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, lambda: 1 / 0)
        await asyncio.sleep(2)

    with pytest.raises(ZeroDivisionError):
        run_virtual(main)


def test_to_thread_runs_inline_and_gives_way_once():
    async def main() -> list[str]:
        order: list[str] = []

        async def other() -> None:
            order.append("other")

        async with asyncio.TaskGroup() as group:
            group.create_task(other())
            assert await asyncio.to_thread(lambda: order.append("thread") or 7) == 7
        with pytest.raises(ValueError, match="inside"):
            await asyncio.to_thread(_fail)
        return order

    assert run_virtual(main) == ["other", "thread"]


def _fail() -> None:
    raise ValueError("inside")


def test_cancelling_a_wait_for_a_thread_does_not_undo_its_work():
    async def main() -> list[int]:
        done: list[int] = []
        task = asyncio.create_task(asyncio.to_thread(done.append, 1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return done

    assert run_virtual(main) == [1]


def test_sockets_are_refused_by_name():
    async def main() -> None:
        with pytest.raises(NotVirtual, match="in-memory"):
            await asyncio.open_connection("127.0.0.1", 1)

    run_virtual(main)


def _interleaving(seed: int | None) -> list[int]:
    async def main() -> list[int]:
        order: list[int] = []

        async def step(i: int) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
                order.append(i)

        async with asyncio.TaskGroup() as group:
            for i in range(4):
                group.create_task(step(i))
        return order

    return run_virtual(main, seed=seed)


def test_without_a_seed_callbacks_run_in_the_order_they_were_scheduled():
    assert _interleaving(None) == [0, 1, 2, 3] * 3


def test_a_seed_replays_its_interleaving_and_seeds_differ():
    runs = {seed: _interleaving(seed) for seed in range(30)}
    assert all(_interleaving(seed) == order for seed, order in runs.items())
    assert len({tuple(order) for order in runs.values()}) > 20
    assert all(sorted(order) == sorted([0, 1, 2, 3] * 3) for order in runs.values())


def test_seeds_find_a_lost_update_that_the_plain_order_hides():
    async def main() -> int:
        counter = 0
        first_done = asyncio.Event()

        async def first() -> None:
            nonlocal counter
            await asyncio.sleep(0)
            counter += 1
            first_done.set()

        async def second() -> None:
            nonlocal counter
            await asyncio.sleep(0)
            if first_done.is_set():
                counter += 1

        async with asyncio.TaskGroup() as group:
            group.create_task(first())
            group.create_task(second())
        return counter

    assert run_virtual(main) == 2
    assert {run_virtual(main, seed=seed) for seed in range(20)} == {1, 2}


def test_a_failure_under_a_seed_says_how_to_replay_it():
    async def main() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as caught:
        run_virtual(main, seed=17)
    assert "seed=17" in caught.value.__notes__[0]


def test_a_task_group_cancels_in_the_same_order_every_time():
    def run() -> list[int]:
        ended: list[int] = []

        async def wait(i: int) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(i)

        async def main() -> None:
            with pytest.raises(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    for i in range(40):
                        group.create_task(wait(i))
                    await asyncio.sleep(1)
                    raise ValueError

        run_virtual(main)
        return ended

    padding = [object() for _ in range(1000)]  # moves later allocations, so that addresses differ between the runs
    first = run()
    del padding
    assert run() == first and sorted(first) == list(range(40))


def test_met_deadlines_do_not_pile_up():
    async def main() -> int:
        for _ in range(10_000):
            async with asyncio.timeout(1e5):
                await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return len(loop._timers)

    assert run_virtual(main) < 3000


def test_half_a_million_rounds_take_seconds():
    async def main() -> None:
        for _ in range(250_000):
            await asyncio.sleep(0)
            await asyncio.sleep(0.01)

    started = time.process_time()
    run_virtual(main)
    assert time.process_time() - started < 10


def test_the_loop_stops_without_work():
    loop = VirtualTimeLoop()
    loop.stop()
    loop.run_forever()
    assert loop.time() == 0.0
    loop.close()


async def in_own_thread(work: Callable[[], object]) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        work()
        with suppress(RuntimeError):  # the loop may have ended meanwhile
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, daemon=True).start()
    await done.wait()


def test_time_stands_while_a_thread_computes_and_passes_while_one_waits():
    held = threading.Event()

    def computes() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            sum(range(100))

    async def main() -> list[float]:
        loop, at = asyncio.get_running_loop(), []
        try:
            async with asyncio.timeout(3):
                await in_own_thread(computes)
            at.append(loop.time())
            with suppress(TimeoutError):
                async with asyncio.timeout(3):
                    await in_own_thread(held.wait)
            at.append(loop.time())
            await in_own_thread(computes)
        finally:
            held.set()
        return [*at, loop.time()]

    assert run_virtual(main) == [0.0, 3.0, 3.0]


def test_a_run_that_waits_for_a_thread_that_waits_is_a_hang():
    held = threading.Event()
    try:
        with pytest.raises(DeadlockError):
            run_virtual(lambda: in_own_thread(held.wait))
    finally:
        held.set()
