"""Which engine takes a request: a pure choice, and the memory of which session was where."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from midflight.types import Version

_NEAR = 1.25
"""Engines with at most this multiple of the lightest load count as equally loaded; among them the newest version is taken.
Below the 1.3 within which the load must stay even."""

_CROWDED = 1.25
"""A session leaves its engine when that has this multiple of the mean load. Sessions differ so much in length that affinity
alone leaves the heaviest of eight engines at 1.8 times the mean; between this and 1.3 there is room for requests on their way."""

_MAX_PINS = 20_000
"""Twice the sessions a gateway admits by default. Forgetting the oldest costs that session its prefix cache, nothing else."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine as the router sees it. `routable`: attached, not in quarantine, not held."""

    name: str
    version: Version
    tokens_in_flight: int
    """Prompt tokens plus output budget of the requests there."""
    routable: bool


def choose(candidates: Sequence[Candidate], *, pinned: str | None, tokens: int = 0) -> str | None:
    """The pinned engine if it is routable and not crowded; else the newest version among the least loaded, the lightest first.

    `tokens` is the load the request brings: to move it costs a prefill of that size at most, so a smaller difference moves
    nobody. `None` if no engine is routable. Equal engines are taken in the order given.
    """
    routable = [c for c in candidates if c.routable]
    if not routable:
        return None
    lightest = min(c.tokens_in_flight for c in routable)
    home = next((c for c in routable if c.name == pinned), None)
    if home is not None and not _is_crowded(home, routable, spare=lightest + tokens):
        return pinned
    near = (c for c in routable if c.tokens_in_flight <= lightest * _NEAR)
    return min(near, key=lambda c: (-c.version, c.tokens_in_flight)).name


def _is_crowded(home: Candidate, routable: Sequence[Candidate], *, spare: int) -> bool:
    mean = sum(c.tokens_in_flight for c in routable) / len(routable)
    return home.tokens_in_flight > max(spare, _CROWDED * mean)


class Pins:
    """The engine that holds each session's prefix. Synchronous, bounded; the longest unused pin goes first."""

    def __init__(self, *, max_pins: int = _MAX_PINS) -> None:
        self._engines: OrderedDict[str, str] = OrderedDict()
        self._max_pins = max_pins

    def get(self, affinity: str) -> str | None:
        return self._engines.get(affinity)

    def pin(self, affinity: str, engine: str) -> None:
        """An empty affinity is nobody's and is not remembered."""
        if not affinity:
            return
        self._engines[affinity] = engine
        self._engines.move_to_end(affinity)
        if len(self._engines) > self._max_pins:
            self._engines.popitem(last=False)

    def forget(self, affinity: str) -> None:
        self._engines.pop(affinity, None)

    def forget_engine(self, engine: str) -> None:
        """The engine is gone: its sessions are pinned again where they go next."""
        for affinity in [a for a, name in self._engines.items() if name == engine]:
            del self._engines[affinity]

    def __len__(self) -> int:
        return len(self._engines)
