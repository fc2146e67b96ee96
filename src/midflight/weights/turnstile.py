"""Waiting in turn: versions and rejoins wait before the turnstile, and engines that change weights
together wait at the barrier.
"""

import asyncio
from collections.abc import Iterable
from typing import Literal, TypeAlias

from midflight.errors import RequestRejected
from midflight.types import Version, WeightManifest

Point: TypeAlias = Literal["paused", "committed"]


class Ticket:
    """A place before the turnstile. `admitted` ends with `None` when the holder may go in, or with
    the version that took its place.
    """

    def __init__(self) -> None:
        self.admitted: asyncio.Future[Version | None] = asyncio.get_running_loop().create_future()

    def settle(self, superseded_by: Version | None) -> None:
        """Ends the wait. Does nothing where the waiter was cancelled."""
        if not self.admitted.done():
            self.admitted.set_result(superseded_by)


class Turnstile:
    """Lets versions and rejoins in. It never waits: callers await their ticket, and give it back by
    `leave` in every case.

    It is bounded: at most one version waits, and one rejoin for each engine. A newer version takes
    the place of the one that waits, whose waiter is told.
    """

    def __init__(self) -> None:
        self._inside: dict[Ticket, str | None] = {}
        """A version (`None`), or the engines that rejoin. Several rejoin at once, because one that
        hangs must not keep another out.
        """
        self._version: Ticket | None = None
        self._rejoins: dict[str, Ticket] = {}
        self._newest: WeightManifest | None = None

    def for_version(self, manifest: WeightManifest) -> Ticket:
        """A ticket for a version. Raises `RequestRejected` if a newer version, or another one of
        this number, was here before: numbers are never reused.
        """
        self._check(manifest)
        self._newest = manifest
        if self._version is not None:
            self._version.settle(manifest.version)
        ticket = Ticket()
        self._version = ticket
        self._admit()
        return ticket

    def for_rejoin(self, engine: str) -> Ticket | None:
        """A ticket for an engine that rejoins. Returns `None` if it waits here or
        rejoins already.
        """
        if engine in self._rejoins or engine in self._inside.values():
            return None
        ticket = Ticket()
        self._rejoins[engine] = ticket
        self._admit()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Takes back a ticket whose work is done or whose wait was given up. Lets the next in, a
        version before rejoins.
        """
        if self._version is ticket:
            self._version = None
        self._rejoins = {engine: t for engine, t in self._rejoins.items() if t is not ticket}
        self._inside.pop(ticket, None)
        self._admit()

    def _check(self, manifest: WeightManifest) -> None:
        newest = self._newest
        if newest is None or manifest.version > newest.version:
            return
        if manifest.version < newest.version:
            raise RequestRejected(
                (
                    f"publishing version {manifest.version}: version {newest.version} was "
                    "published before; numbers only grow."
                ),
                param="version",
            )
        if manifest.fingerprint != newest.fingerprint:
            raise RequestRejected(
                (
                    f"publishing version {manifest.version}: other weights of this number were "
                    "published before; numbers are never reused."
                ),
                param="version",
            )

    def _admit(self) -> None:
        """Lets a version in when it is empty inside, and rejoins unless a version waits or is
        inside.

        The version let in no longer waits, so a newer one cannot take its place any more.
        """
        if self._version is not None:
            if not self._inside:
                self._enter(self._version, None)
                self._version = None
        elif None not in self._inside.values():
            for engine, ticket in self._rejoins.items():
                self._enter(ticket, engine)
            self._rejoins.clear()

    def _enter(self, ticket: Ticket, engine: str | None) -> None:
        self._inside[ticket] = engine
        ticket.settle(None)


class Barrier:
    """No engine passes a point before every engine has reached it or has left. Everything except
    `reach` is synchronous.

    While the first engine commits, none generates any more. When the first resumes, all serve the
    new version or are in quarantine.
    """

    def __init__(self, engines: Iterable[str]) -> None:
        """Each engine must `leave` in the end, in every case. That and its own deadline bound the
        others' waits.
        """
        members = frozenset(engines)
        self.alone = len(members) == 1
        """True if there is one engine only, which waits for no other."""
        self._missing: dict[Point, set[str]] = {"paused": set(members), "committed": set(members)}
        self._passed: dict[Point, asyncio.Event] = {
            point: asyncio.Event() for point in self._missing
        }

    async def reach(self, point: Point, engine: str) -> None:
        """Waits for the engines that are still on their way there. The wait ends when they have
        come or left.
        """
        self._strike(point, engine)
        await self._passed[point].wait()

    def leave(self, engine: str) -> None:
        """Makes the others stop waiting for this engine. Idempotent."""
        for point in self._missing:
            self._strike(point, engine)

    def _strike(self, point: Point, engine: str) -> None:
        self._missing[point].discard(engine)
        if not self._missing[point]:
            self._passed[point].set()
