"""The line of requests that wait for a place on an engine."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from midflight.allowance import Allowance

T = TypeVar("T")


class _Waiter(Generic[T]):
    def __init__(self, choose: Callable[[], T | None], allowance: Allowance) -> None:
        self.choose = choose
        self.allowance = allowance
        self.chosen: asyncio.Future[T] = asyncio.get_running_loop().create_future()


class WaitingLine(Generic[T]):
    """Requests that wait for a place, in order of their tickets. A resumed request keeps its
    ticket, so it goes first.

    No request overtakes another: a place is offered to the first in line, and a new request waits
    behind all older tickets. Bounded by the requests that the gateway admits.
    """

    def __init__(self) -> None:
        self._waiters: list[tuple[int, int, _Waiter[T]]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(
        self,
        ticket: int,
        choose: Callable[[], T | None],
        *,
        give_back: Callable[[T], None],
        allowance: Allowance,
    ) -> T:
        """Waits until `choose` finds a place and every older ticket has one. `serve` wakes the
        wait; the allowance may end it.

        A place that was found for a request that has just ended is given back.
        """
        allowance.raise_if_cut()
        if not self._waiters:
            place = choose()
            if place is not None:
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
        """Offers places from the front until a request finds none. Must be called after every
        change that may make a place.
        """
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
