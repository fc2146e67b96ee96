"""An engine reserved for an evaluation: who is sent there, what counts as served, and what becomes of it."""

from __future__ import annotations

import asyncio

import pytest
from tests.gateway.generating import generated

from midflight.allowance import Expired
from midflight.errors import EngineUnavailable
from midflight.gateway.answers.generation import Generator
from midflight.gateway.fleet.fleet import Fleet
from midflight.gateway.fleet.reservation import Reservation
from midflight.testing.script import Script
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import Finish, FinishReason, GenerateRequest, SamplingParams

from .test_fleet import fleet_of, manifest, place

DEAD = EngineUnavailable("dead")


def reserved_fleet(names: str = "ab") -> tuple[Fleet, Reservation]:
    """All engines serve version 0; `a` is reserved for the session `eval`."""
    fleet = fleet_of(*(ScriptedEngine(name) for name in names))
    reservation = fleet.reserve(0)
    reservation.sessions.add("eval")
    assert fleet.reserved() == "a"
    return fleet, reservation


async def where(fleet: Fleet, affinity: str = "", tokens: int = 10) -> str:
    return (await place(fleet, affinity=affinity, tokens=tokens)).engine.name


def test_its_sessions_go_there_and_all_others_elsewhere_whatever_the_load_and_wherever_they_were() -> None:
    async def main() -> None:
        fleet = fleet_of(ScriptedEngine("a"), ScriptedEngine("b"))
        assert await where(fleet, "train", 10) == "a"
        assert await where(fleet, "other", 1000) == "b"
        reservation = fleet.reserve(0)
        assert reservation.engine == "a", "the lighter one"
        reservation.sessions.add("eval")
        assert [await where(fleet, "eval", 5000) for _ in range(3)] == ["a"] * 3
        assert [await where(fleet, "train", 1000) for _ in range(3)] == ["b"] * 3
        fleet.unreserve(reservation)
        assert await where(fleet, "train", 10) == "b", "its prefix is there now"

    run_virtual(main())


def test_it_does_not_count_as_serving_until_it_serves_what_the_others_do() -> None:
    async def main() -> None:
        fleet, reservation = reserved_fleet()
        told: list[int] = []
        fleet.on_served = told.append
        fleet.served("b", 1)
        fleet.served("b", 2)
        assert (fleet.served_version(), fleet.current_version()) == (2, 2)
        fleet.unreserve(reservation)
        assert fleet.reserved() is None, "a handover may bring it a version"
        assert fleet.served_version() == 2 and await where(fleet, tokens=10_000) == "b", "it is behind, and gets nothing yet"
        fleet.served("a", 2)
        assert await where(fleet) == "a" and told == [1, 2]
        assert not any(state.reserved for state in fleet.states())

    run_virtual(main())


def test_an_engine_alone_is_shared_and_takes_no_version() -> None:
    async def main() -> None:
        fleet, reservation = reserved_fleet("a")
        assert [await where(fleet, "eval"), await where(fleet, "train")] == ["a", "a"]
        assert fleet.served_version() == 0 and not reservation.passable.is_set()
        fleet.unreserve(reservation)
        assert reservation.passable.is_set()
        fleet.served("a", 1)
        assert fleet.served_version() == 1 and reservation.over.is_set()

    run_virtual(main())


def test_i2_an_engine_left_alone_is_shared_only_while_it_is_not_behind() -> None:
    async def main() -> None:
        fleet, _ = reserved_fleet()
        fleet.quarantine("b", DEAD)
        assert await where(fleet) == "a"
        fleet.served("b", 1)
        fleet.quarantine("b", DEAD)
        with pytest.raises(Expired):
            await place(fleet, seconds=1.0)
        assert fleet.served_version() == 1

    run_virtual(main())


def test_neither_kind_of_request_waits_behind_the_other() -> None:
    async def main() -> None:
        fleet, _ = reserved_fleet()
        fleet.hold("a", "operator")
        waiting = asyncio.ensure_future(place(fleet, affinity="eval"))
        await asyncio.sleep(1)
        assert await where(fleet, "train") == "b"
        fleet.hold("b", "operator")
        fleet.release("a", "operator")
        later = asyncio.ensure_future(place(fleet, affinity="train"))
        assert (await waiting).engine.name == "a"
        assert await where(fleet, "eval") == "a"
        assert fleet.num_waiting == 1
        fleet.release("b", "operator")
        await later

    run_virtual(main())


def test_when_its_engine_falls_out_another_of_that_version_takes_its_place() -> None:
    async def main() -> None:
        fleet, reservation = reserved_fleet("abc")
        lease = await place(fleet, affinity="eval")
        fleet.served("b", 1)
        fleet.quarantine("a", DEAD)
        assert lease.lost is DEAD
        assert reservation.engine == "c" and not reservation.over.is_set()
        assert await where(fleet, "eval") == "c" and await where(fleet, "train") == "b"
        assert fleet.served_version() == 1

    run_virtual(main())


def test_it_is_over_when_nobody_serves_its_version_and_a_newer_one_is_known() -> None:
    fleet, reservation = reserved_fleet()
    fleet.quarantine("b", DEAD)
    fleet.quarantine("a", DEAD)
    assert not reservation.over.is_set(), "the first to come back serves it still"
    fleet.served("a", 0)
    assert reservation.engine == "a" and not reservation.over.is_set()
    fleet.served("b", 1)
    fleet.quarantine("a", DEAD)
    assert reservation.over.is_set() and fleet.reserved() is None
    assert not any(state.reserved for state in fleet.states())


def test_i2_i5_answers_of_others_leave_the_engine_once_it_is_behind_and_lose_nothing() -> None:
    """Six tokens in, version 1 goes live on `b`: the training answer goes on there, the evaluation's stays."""

    async def main() -> None:
        a, b = (ScriptedEngine(name, script=Script(mean_length=None, by_version=True), step_seconds=1.0) for name in "ab")
        fleet = fleet_of(a, b)
        generator = Generator(fleet, request_seconds=100)
        sampling = SamplingParams(max_tokens=10)

        async def answer(session: str) -> list[tuple[int, int]]:
            request = GenerateRequest(session, (1, 2, 3), 3, sampling)
            chunks = await generated(generator, request, affinity=session)
            assert chunks[-1].finish == Finish(FinishReason.LENGTH)
            return [(token, chunk.version) for chunk in chunks for token in chunk.token_ids]

        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(answer("train"))
            await asyncio.sleep(0.5)
            fleet.quarantine("b", DEAD)
            reservation = fleet.reserve(0)
            assert reservation.engine == "a", "where the answer runs"
            fleet.served("b", 0)
            reservation.sessions.add("eval")
            evaluated = tasks.create_task(answer("eval"))
            await asyncio.sleep(6)
            await b.stage(manifest(1))
            await b.commit(1)
            fleet.served("b", 1)
        assert [version for _, version in evaluated.result()] == [0] * 10
        versions = [version for _, version in training.result()]
        assert versions == [0] * 6 + [1] * 4
        whole = a.answer(GenerateRequest("", (1, 2, 3), 3, sampling), version=0)
        assert [token for token, _ in training.result()][:6] == list(whole)[:6]

    run_virtual(main())
