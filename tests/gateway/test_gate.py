"""The gate: named holds, and a line that nobody overtakes."""

from __future__ import annotations

import asyncio

from midflight.allowance import Allowance
from midflight.gateway.fleet.holds import Holds
from midflight.gateway.fleet.waiting_line import WaitingLine
from midflight.testing.virtual_time import run_virtual


def test_an_engine_is_free_when_no_owner_holds_it_nor_all() -> None:
    holds = Holds()
    holds.hold("operator")
    holds.hold("handover", "a")
    holds.hold("handover", "a")
    assert (holds.owners("a"), holds.owners("b"), holds.shut) == (("handover", "operator"), ("operator",), True)
    holds.release("operator")
    assert (holds.owners("a"), holds.owners("b"), holds.shut) == (("handover",), (), False)
    holds.release("operator", "a")
    assert holds.owners("a") == ("handover",), "an owner lifts only its own hold"
    holds.release("handover", "a")
    assert holds.owners("a") == ()


class Places:
    """A number of places to give, and who got one."""

    def __init__(self) -> None:
        self.num_free = 0
        self.given: list[str] = []
        self.back: list[str] = []
        self.line: WaitingLine[str] = WaitingLine()

    def give(self, num: int) -> None:
        self.num_free += num
        self.line.serve()

    def choose(self, who: str) -> str | None:
        if self.num_free == 0:
            return None
        self.num_free -= 1
        self.given.append(who)
        return who

    async def wait(self, ticket: int, who: str, *, seconds: float = 100.0) -> str:
        return await self.line.wait(ticket, lambda: self.choose(who), give_back=self.back.append, allowance=Allowance(seconds))


def test_places_go_in_order_of_tickets_whenever_they_come_free() -> None:
    async def main() -> None:
        places = Places()
        async with asyncio.TaskGroup() as group:
            for ticket in (3, 1, 2):
                group.create_task(places.wait(ticket, f"t{ticket}"))
            await asyncio.sleep(0)
            places.give(1)
            group.create_task(places.wait(0, "resumed"))
            await asyncio.sleep(0)
            assert places.given == ["t1"]
            places.give(2)
            assert places.given == ["t1", "resumed", "t2"]
            places.give(1)
        assert places.given == ["t1", "resumed", "t2", "t3"]
        assert len(places.line) == 0

    run_virtual(main())


def test_who_gives_up_leaves_the_line_and_hands_back_a_place_it_was_just_given() -> None:
    async def main() -> None:
        places = Places()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(places.wait(0, "first"))
            second = group.create_task(places.wait(1, "second"))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
            assert len(places.line) == 1
            places.give(1)
            second.cancel()
        assert (places.given, places.back, len(places.line)) == (["second"], ["second"], 0)

    run_virtual(main())
