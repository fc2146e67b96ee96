"""The reservation of an engine for an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from midflight.gateway.fleet.leases import Member
from midflight.types import Version


class Reservation:
    """One engine keeps `version` for `sessions`. Their requests go to this engine and nowhere else.
    Bounded by an evaluation's rollouts.

    While another engine is out of quarantine, requests of other sessions and handovers go to the
    others.
    """

    def __init__(self, version: Version) -> None:
        self.version = version
        self.engine: str | None = None
        """`None` while no engine out of quarantine serves the version. An engine may come back with
        it.
        """
        self.sessions: set[str] = set()
        self.over = asyncio.Event()
        """Set when the evaluation has ended, or must end because the version was given up or no
        engine serves it any more.
        """
        self.passable = asyncio.Event()
        """Set while a newer version may come, because this is over or another engine can take
        it.
        """

    def move(self, healthy: Iterable[Member], *, newest: Version) -> None:
        """Moves to another engine that serves the version, because its own no longer does. Without
        such an engine the reservation is over as soon as a newer version is known, because any
        engine that comes back will then come back with the newer version.
        """
        same = [member for member in healthy if member.version == self.version]
        self.engine = None
        if same and not self.over.is_set():
            self.engine = min(same, key=lambda member: member.tokens_in_flight).name
        if self.engine is None and newest > self.version:
            self.over.set()

    def let_pass(self, *, others: bool) -> None:
        """Sets or clears `passable`. `others` is true if another engine is out of quarantine."""
        if self.over.is_set() or others:
            self.passable.set()
        else:
            self.passable.clear()
