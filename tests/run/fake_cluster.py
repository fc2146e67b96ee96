"""A cluster in this process: its seats are plain objects, and Ray's errors are raised where a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from midflight.run.places.actor import PlaceActor
from midflight.run.places.cluster import Machine


class RayError(Exception):
    """By this name errors of Ray are known."""


class ActorDiedError(RayError):
    pass


class ActorUnavailableError(RayError):
    pass


class OutOfMemoryError(RayError):
    pass


class FakeCluster:
    """`fail` is called before each call, and may raise or wait."""

    def __init__(self, *machines: Machine) -> None:
        self.alive = list(machines) or [Machine("m0", "127.0.0.1", {"CPU": 8.0})]
        self.asked: list[Mapping[str, float]] = []
        self.killed: list[Any] = []
        self.given_back = 0
        self.drained: set[str] = set()
        self.calls: list[str] = []
        self.room = asyncio.Event()
        self.room.set()
        self._sent: list[asyncio.Future[Any]] = []

    async def fail(self, method: str) -> None:
        """Nothing, until a test says so."""

    def machines(self) -> Sequence[Machine]:
        return self.alive

    def leaving(self) -> Collection[str]:
        return self.drained

    def seat(self, resources: Mapping[str, float], *, machine: str = "") -> PlaceActor:
        self.asked.append(resources)
        named = [name.removeprefix("node:") for name in resources if name.startswith("node:")]
        named += [one.address for one in self.alive if one.id == machine]
        return PlaceActor(named[0] if named else "127.0.0.1")

    async def group(self, resources: Mapping[str, float], count: int) -> tuple[Sequence[PlaceActor], Callable[[], None]]:
        await self.room.wait()

        def give_back() -> None:
            self.given_back += 1

        return [self.seat(resources) for _ in range(count)], give_back

    def call(self, seat: PlaceActor, method: str, *given: object) -> asyncio.Future[Any]:
        async def called() -> Any:
            self.calls.append(method)
            await self.room.wait()
            await self.fail(method)
            return await getattr(seat, method)(*given)

        self._sent.append(asyncio.ensure_future(called()))
        return self._sent[-1]

    def kill(self, seat: PlaceActor) -> None:
        self.killed.append(seat)
