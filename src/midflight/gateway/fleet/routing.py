"""The choice of an engine for a request. Synchronous."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from typing import TypeAlias

from midflight.types import Version

_NEAR = 1.25
"""Engines with at most this multiple of the lightest load count as equally loaded; among them the
newest version is taken. Below the 1.3 within which the load must stay even."""

_CROWDED = 1.25
"""A session leaves its engine when the engine has this multiple of the mean load. Sessions differ
so much in length that with affinity alone the heaviest of eight engines has 1.8 times the mean. The
gap between this and 1.3 is room for requests that are on their way.
"""

_Entry: TypeAlias = tuple[bool, int, int, str]
"""One engine: whether its slots are full, its load, its order, its name."""

_MAX_PINS = 20_000
"""Twice the sessions that a gateway admits by default. Forgetting the oldest costs that session its
prefix cache, nothing else.
"""


class Loads:
    """The engines that requests may go to, by version and load. Synchronous.

    There is one sorted list for each version, and a fleet serves two or three versions at most. So
    the time of a change or a choice hardly grows with the number of engines.
    """

    def __init__(self) -> None:
        self._lines: dict[Version, list[_Entry]] = {}
        """The engines of each version, in rising order."""
        self._places: dict[str, tuple[Version, _Entry]] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._places)

    def put(
        self, engine: str, *, version: Version, load: int, order: int, full: bool = False
    ) -> None:
        """Adds an engine, or replaces its entry. `load` is the prompt tokens plus the output budget
        of the requests there. If engines are equal, the one with the lower `order` is taken. `full`
        means that it has a request for each of its slots, so that one more would wait.
        """
        self.drop(engine)
        entry = (full, load, order, engine)
        self._places[engine] = version, entry
        bisect.insort(self._lines.setdefault(version, []), entry)
        self._total += load

    def add(self, engine: str, tokens: int, *, full: bool = False) -> None:
        """Adds tokens to the load of an engine; a negative number takes them away."""
        version, entry = self._places[engine]
        line = self._lines[version]
        _, load, order, name = entry
        changed = (full, load + tokens, order, name)
        del line[bisect.bisect_left(line, entry)]
        bisect.insort(line, changed)
        self._places[engine] = version, changed
        self._total += tokens

    def drop(self, engine: str) -> None:
        """Removes an engine, so that no request goes there."""
        place = self._places.pop(engine, None)
        if place is None:
            return
        version, entry = place
        line = self._lines[version]
        del line[bisect.bisect_left(line, entry)]
        if not line:
            del self._lines[version]
        self._total -= entry[1]

    def choose(self, *, pinned: str | None, tokens: int = 0) -> str | None:
        """Chooses the pinned engine if it is there and not crowded. Otherwise chooses the newest
        version among the least loaded engines, and the lightest engine of that version. Engines
        with a free slot come before full ones.

        `tokens` is the load that the request brings. Moving the request costs a prefill of that
        size at most, so a smaller difference in load does not move it. Returns `None` if there is
        no engine.
        """
        if not self._places:
            return None
        least = min([line[0] for line in self._lines.values()])
        full, lightest, _, name = least
        if pinned in self._places and not self._is_crowded(pinned, spare=lightest + tokens):
            return pinned
        if len(self._lines) == 1:
            return name
        newest = max(
            version
            for version, line in self._lines.items()
            if line[0][0] == full and line[0][1] <= lightest * _NEAR
        )
        return self._lines[newest][0][3]

    def _is_crowded(self, engine: str, *, spare: int) -> bool:
        return self._places[engine][1][1] > max(spare, _CROWDED * self._total / len(self._places))


class Pins:
    """The engine that holds each session's prefix. Synchronous and bounded; the pin that was unused
    longest is dropped first.
    """

    def __init__(self, *, max_pins: int = _MAX_PINS) -> None:
        self._engines: OrderedDict[str, str] = OrderedDict()
        self._max_pins = max_pins

    def get(self, affinity: str) -> str | None:
        return self._engines.get(affinity)

    def pin(self, affinity: str, engine: str) -> None:
        """Remembers the engine of a session. An empty affinity belongs to no session and is not
        remembered.
        """
        if not affinity:
            return
        self._engines[affinity] = engine
        self._engines.move_to_end(affinity)
        if len(self._engines) > self._max_pins:
            self._engines.popitem(last=False)

    def forget(self, affinity: str) -> None:
        self._engines.pop(affinity, None)

    def forget_engine(self, engine: str) -> None:
        """Forgets all pins to an engine that is gone. Its sessions are pinned again to the engine
        that they go to next.
        """
        for affinity in [a for a, name in self._engines.items() if name == engine]:
            del self._engines[affinity]

    def __len__(self) -> int:
        return len(self._engines)
