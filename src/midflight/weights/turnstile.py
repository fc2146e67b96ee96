"""Who may hand over: one at a time, and of the versions that wait only the newest."""

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
        self._inside: Ticket | None = None
        self._version: Ticket | None = None
        self._rejoins: dict[str, Ticket] = {}
        self._newest: WeightManifest | None = None

    def for_version(self, manifest: WeightManifest) -> Ticket:
        """`RequestRejected` when a newer version, or another one of this number, was here before: numbers are never reused."""
        self._check(manifest)
        self._newest = manifest
        if self._version is not None:
            self._version.settle(manifest.version)
        self._version = Ticket()
        return self._admitted_if_free(self._version)

    def for_rejoin(self, engine: str) -> Ticket | None:
        """`None` when the engine waits here already."""
        if engine in self._rejoins:
            return None
        self._rejoins[engine] = Ticket()
        return self._admitted_if_free(self._rejoins[engine])

    def leave(self, ticket: Ticket) -> None:
        """The turn is over, or the wait given up. Lets the next one in: versions before rejoins."""
        if self._version is ticket:
            self._version = None
        self._rejoins = {engine: t for engine, t in self._rejoins.items() if t is not ticket}
        if self._inside is ticket:
            self._inside = None
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

    def _admitted_if_free(self, ticket: Ticket) -> Ticket:
        if self._inside is None:
            self._admit()
        return ticket

    def _admit(self) -> None:
        """The one let in no longer waits, so a newer version cannot take its place any more."""
        if self._version is not None:
            self._inside, self._version = self._version, None
        elif self._rejoins:
            self._inside = self._rejoins.pop(next(iter(self._rejoins)))
        if self._inside is not None:
            self._inside.settle(None)
