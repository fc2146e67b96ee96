"""The store's writer: order, durability, bounds, failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import StoreFailed
from midflight.testing.virtual_time import run_virtual
from midflight.trajectories.store import Store
from midflight.trajectories.writer import StoreWriter
from midflight.types.facts import Admitted, GroupFinished

from .making import group, key, task

Clock = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.run, run_virtual], ids=["threads", "virtual"])
def clock(request: pytest.FixtureRequest) -> Clock:
    return request.param


def admit(index: int) -> Admitted:
    return Admitted(key(index), task(index))


def reopened(path: Path) -> int:
    """How many groups are in the file."""
    store = Store(path, run="tests")
    try:
        return len(store.unfinished())
    finally:
        store.close()


def writing(path: Path, story: Callable[[StoreWriter], Coroutine[Any, Any, None]], *, max_pending: int = 100) -> Coroutine[Any, Any, None]:
    """The story beside a running writer, and `close` at the end."""

    async def main() -> None:
        writer = StoreWriter(Store(path, run="tests"), max_pending=max_pending)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(writer.run())
                await story(writer)
                running.cancel()
        finally:
            writer.close()

    return main()


def test_what_was_put_before_a_flush_is_durable_after_it(tmp_path: Path, clock: Clock) -> None:
    async def story(writer: StoreWriter) -> None:
        for index in range(50):
            writer.put(admit(index))
        await writer.flush()
        assert reopened(tmp_path / "store") == 50
        assert await writer.read(lambda store: store.next_position()) == (0, 50)

    clock(writing(tmp_path / "store", story))


def test_what_is_pending_when_the_run_ends_is_written_by_close(tmp_path: Path, clock: Clock) -> None:
    async def story(writer: StoreWriter) -> None:
        for index in range(50):
            writer.put(admit(index))

    clock(writing(tmp_path / "store", story))
    assert reopened(tmp_path / "store") == 50


def test_a_failing_write_ends_the_run_and_every_wait_with_its_cause(tmp_path: Path, clock: Clock) -> None:
    failures: list[StoreFailed] = []

    async def story(writer: StoreWriter) -> None:
        writer.put(GroupFinished(group(key(7)), 1))
        with pytest.raises(StoreFailed) as caught:
            await writer.flush()
        failures.append(caught.value)
        with pytest.raises(StoreFailed, match="I8"):
            writer.put(admit(0))

    with pytest.raises(ExceptionGroup) as ended:
        clock(writing(tmp_path / "store", story))
    assert isinstance(ended.value.exceptions[0], AssertionError)
    assert isinstance(failures[0].__cause__, AssertionError)


def test_room_waits_for_the_disk_and_beyond_the_bound_the_run_ends(tmp_path: Path, clock: Clock) -> None:
    async def story(writer: StoreWriter) -> None:
        await writer.room()
        for index in range(10):
            writer.put(admit(index))
        with pytest.raises(StoreFailed, match="10 records wait"):
            writer.put(admit(10))
        await writer.room()
        writer.put(admit(10))

    clock(writing(tmp_path / "store", story, max_pending=10))
    assert reopened(tmp_path / "store") == 11
