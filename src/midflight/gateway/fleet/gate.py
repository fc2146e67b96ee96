"""Who may not dispatch, and who waits: named holds, and the line of requests before the engines."""

from __future__ import annotations

import asyncio
import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from midflight.allowance import Allowance

T = TypeVar("T")


class Holds:
    """Named holds, of all engines or of one. Synchronous. An engine is free when nobody holds it, nor all (DECISIONS 17)."""

    def __init__(self) -> None:
        self._all: set[str] = set()
        self._one: defaultdict[str, set[str]] = defaultdict(set)

    def hold(self, owner: str, engine: str | None = None) -> None:
        """Idempotent per owner and engine; `None` holds every engine, also those attached later."""
        (self._all if engine is None else self._one[engine]).add(owner)

    def release(self, owner: str, engine: str | None = None) -> None:
        """Lifts this owner's hold only; none there is not an error."""
        if engine is None:
            self._all.discard(owner)
        elif engine in self._one:
            self._one[engine].discard(owner)
            self._drop_empty(engine)

    def forget(self, engine: str) -> None:
        """Drops the holds of an engine that is detached."""
        self._one.pop(engine, None)

    def owners(self, engine: str) -> tuple[str, ...]:
        """Who holds the engine, by name."""
        return tuple(sorted(self._all | self._one.get(engine, set())))

    @property
    def shut(self) -> bool:
        """Whether somebody holds all engines."""
        return bool(self._all)

    def _drop_empty(self, engine: str) -> None:
        if not self._one[engine]:
            del self._one[engine]


class _Waiter(Generic[T]):
    def __init__(self, choose: Callable[[], T | None], allowance: Allowance) -> None:
        self.choose = choose
        self.allowance = allowance
        self.chosen: asyncio.Future[T] = asyncio.get_running_loop().create_future()


class Line(Generic[T]):
    """Requests waiting for a place, in order of their tickets (P1). A resumed request keeps its ticket, so it goes first.

    Nobody overtakes: a place is offered to the first in line, and who arrives stands behind all older tickets.
    Bounded by the requests that the gateway admits.
    """

    def __init__(self) -> None:
        self._waiters: list[tuple[int, int, _Waiter[T]]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, ticket: int, choose: Callable[[], T | None], *, give_back: Callable[[T], None], allowance: Allowance) -> T:
        """Waits until `choose` finds a place and every older ticket has one; woken by `serve`, ended by the allowance too.

        A place found for a request that has just ended is given back.
        """
        allowance.raise_if_cut()
        if not self._waiters and (place := choose()) is not None:
            return place
        waiter = _Waiter(choose, allowance)
        self._arrivals += 1
        entry = (ticket, self._arrivals, waiter)
        bisect.insort(self._waiters, entry)
        self.serve()
        try:
            async with allowance:
                return await waiter.chosen
        except BaseException:
            if waiter.chosen.done() and not waiter.chosen.cancelled():
                give_back(waiter.chosen.result())
            self._leave(entry)
            raise

    def serve(self) -> None:
        """Offers places from the front until one finds none. To be called after every change that may make a place."""
        while self._waiters:
            waiter = self._waiters[0][2]
            if not waiter.chosen.done():
                place = waiter.choose()
                if place is None:
                    return
                waiter.chosen.set_result(place)
            self._waiters.pop(0)

    def allowances(self) -> Iterable[Allowance]:
        return (waiter.allowance for _, _, waiter in self._waiters)

    def _leave(self, entry: tuple[int, int, _Waiter[T]]) -> None:
        if entry in self._waiters:
            self._waiters.remove(entry)
            self.serve()
