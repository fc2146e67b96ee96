"""Who may hand over: one version alone, or the rejoins of any engines; and of the versions that wait only the newest."""

from __future__ import annotations

import asyncio

from midflight.errors import RequestRejected
from midflight.types import Version, WeightManifest


class Ticket:
    """A place before the turnstile. `admitted` ends with `None` when it is this one's turn, or with the version that took its place."""

    def __init__(self) -> None:
        self.admitted: asyncio.Future[Version | None] = asyncio.get_running_loop().create_future()

    def settle(self, superseded_by: Version | None) -> None:
        """A waiter that was cancelled is past caring."""
        if not self.admitted.done():
            self.admitted.set_result(superseded_by)


class Turnstile:
    """Never waits: callers await their ticket, and give it back by `leave` whatever happened.

    Bounded: at most one version waits (a newer one takes its place, and its waiter is told), and one rejoin for each engine.
    """

    def __init__(self) -> None:
        self._inside: dict[Ticket, str | None] = {}
        """A version (`None`), or the engines that rejoin: one that hangs must not keep another out."""
        self._version: Ticket | None = None
        self._rejoins: dict[str, Ticket] = {}
        self._newest: WeightManifest | None = None

    def for_version(self, manifest: WeightManifest) -> Ticket:
        """`RequestRejected` when a newer version, or another one of this number, was here before: numbers are never reused."""
        self._check(manifest)
        self._newest = manifest
        if self._version is not None:
            self._version.settle(manifest.version)
        ticket = self._version = Ticket()
        self._admit()
        return ticket

    def for_rejoin(self, engine: str) -> Ticket | None:
        """`None` when the engine waits here or rejoins already."""
        if engine in self._rejoins or engine in self._inside.values():
            return None
        ticket = self._rejoins[engine] = Ticket()
        self._admit()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The turn is over, or the wait given up. Lets the next in: a version before rejoins."""
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
                f"publishing version {manifest.version}: version {newest.version} was published before; numbers only grow.", param="version"
            )
        if manifest.fingerprint != newest.fingerprint:
            raise RequestRejected(
                f"publishing version {manifest.version}: other weights of this number were published before; numbers are never reused.",
                param="version",
            )

    def _admit(self) -> None:
        """A version, when nobody is inside; rejoins, unless a version waits or is inside.

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
