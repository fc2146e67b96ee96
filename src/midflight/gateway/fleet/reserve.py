"""An evaluation's claim on one engine. Synchronous: the fleet settles it after every change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from midflight.gateway.fleet.router import Candidate
from midflight.types import Version


class Reservation:
    """One engine keeps `version` for `sessions`, whose requests go there and nowhere else. Bounded by an evaluation's rollouts.

    While another engine is out of quarantine, requests of other sessions go to the others, and handovers too.
    """

    def __init__(self, version: Version) -> None:
        self.version = version
        self.engine: str | None = None
        """`None` while no engine out of quarantine serves the version; one may come back with it."""
        self.sessions: set[str] = set()
        self.over = asyncio.Event()
        """The evaluation has ended, or has to: the version was given up, or nobody serves it any more."""
        self.passable = asyncio.Event()
        """A newer version may come now: this is over, or there is another engine to take it."""

    def settle(self, healthy: Sequence[Candidate], *, newest: Version) -> None:
        """Stays on its engine while that serves the version; else goes on where it is served too. Without such an engine it is over
        as soon as a newer version than its own is known: whatever comes back then comes back with that."""
        same = [c for c in healthy if c.version == self.version]
        if not any(c.name == self.engine for c in same):
            self.engine = min(same, key=lambda c: c.tokens_in_flight).name if same and not self.over.is_set() else None
            if self.engine is None and newest > self.version:
                self.over.set()
        if self.over.is_set() or any(c.name != self.engine for c in healthy):
            self.passable.set()
        else:
            self.passable.clear()
