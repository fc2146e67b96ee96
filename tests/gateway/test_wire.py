"""Reading bodies: what clients may fill the memory with, together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest

from midflight.errors import Overloaded
from midflight.testing.virtual_time import run_virtual
from midflight.wire import edge as wire


def sending(*sizes: int, wait: asyncio.Event | None = None) -> Callable[[], Awaitable[MutableMapping[str, Any]]]:
    """A client whose body has parts of these sizes; the last one comes after `wait`."""
    left = list(sizes)

    async def receive() -> MutableMapping[str, Any]:
        size = left.pop(0)
        if wait is not None and not left:
            await wait.wait()
        return {"type": "http.request", "body": b"x" * size, "more_body": bool(left)}

    return receive


def test_bodies_on_their_way_are_bounded_together_and_who_comes_too_much_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_INCOMING_BYTES", 100)

    async def main() -> None:
        rest = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(wire.read_body(sending(60, 10, wait=rest)))
            await asyncio.sleep(1)
            with pytest.raises(Overloaded):
                await wire.read_body(sending(30, 11, 1))
            assert len(await wire.read_body(sending(30, 10))) == 40, "the body refused holds nothing any more"
            slow_one_too_late = tasks.create_task(wire.read_body(sending(20, 10, wait=asyncio.Event())))
            await asyncio.sleep(1)
            slow_one_too_late.cancel()
            rest.set()
        assert len(slow.result()) == 70
        assert len(await wire.read_body(sending(50, 50))) == 100, "nor do those that came or were given up"

    run_virtual(main)
