"""How many rollouts run at once where nobody says: as many as the engines hold that are there, with what agents do meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.buffer.making import group, key
from tests.loop.site import Agents, Site, config, fast_engines

from midflight.config.load import load_config
from midflight.errors import EngineUnavailable
from midflight.gateway.fleet.fleet import Fleet
from midflight.run.rollout.capacity import Capacity
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import Kind, RolloutKey, Task, TurnTimes
from midflight.types.facts import Admitted, Fact, RolloutEnded, SlotFreed, Waited

if TYPE_CHECKING:
    from openai import AsyncOpenAI

GONE = EngineUnavailable("gone")


def engine(name: str, max_running: int, max_keys: int | None = None) -> ScriptedEngine:
    return ScriptedEngine(name, capabilities=replace(CAPABLE, max_running=max_running, max_keys=max_keys))


def capacity_of(*engines: ScriptedEngine, options: tuple[str, ...] = ()) -> tuple[Capacity, Fleet]:
    """Groups of 8, of which 640 rollouts may be open."""
    fleet = Fleet()
    for one in engines:
        fleet.attach(one)
    return Capacity(load_config(None, list(options)), fleet), fleet


def ended(*, asking: float, seconds: float) -> RolloutEnded:
    times = (TurnTimes(0.0, asking, (), (), 4),)
    return RolloutEnded(RolloutKey(key(0), 0, Kind.TRAINING), "s", 1.0, 4, 1, seconds, None, times=times)


def test_rollouts_follow_the_slots_of_the_engines_that_take_requests() -> None:
    capacity, fleet = capacity_of(engine("a", 64))
    changes: list[int] = []
    capacity.on_changed = lambda: changes.append(capacity.training().number)
    assert capacity.limits() == {"training": (71, "slots"), "evaluation": (64, "slots")}, "a group begins as soon as one slot is free"
    fleet.attach(engine("b", 100))
    assert changes[-1] == 171
    fleet.quarantine("a", GONE)
    assert changes[-1] == 107
    fleet.quarantine("b", GONE)
    assert changes[-1] == 107, "while no engine takes requests, what was known last"
    fleet.served("a", 0)
    fleet.detach("b")
    assert changes[-1] == 71
    fleet.attach(engine("c", 1000))
    assert capacity.limits()["training"] == (640, "staleness"), "5 * 16 * 8"


def test_what_is_set_stands_whatever_the_engines_hold() -> None:
    capacity, _ = capacity_of(engine("a", 64), options=("rollout.max_in_flight=100",))
    assert capacity.limits() == {"training": (100, "set"), "evaluation": (64, "slots")}


def test_a_group_fits_however_few_slots_there_are() -> None:
    capacity, _ = capacity_of(engine("a", 1), options=("rollout.group_size=8",))
    assert capacity.training().number == 8


def test_agents_that_use_tools_leave_room_for_others() -> None:
    capacity, _ = capacity_of(engine("a", 64))
    capacity.ended(ended(asking=1.0, seconds=4.0))
    assert capacity.training().number == 64 * 4 + 7
    capacity.ended(ended(asking=0.0, seconds=1e9))
    assert capacity.training().number == 64 * 8 + 7, "they may all come back at once"


def test_where_keys_are_short_they_bound_it_by_what_rollouts_were_long() -> None:
    capacity, _ = capacity_of(engine("a", 64, max_keys=4096), engine("b", 8, max_keys=10**6))
    assert capacity.limits()["evaluation"] == (16 + 8, "keys"), "the context of 256 tokens, before anything is known"
    trajectory = group(key(0), (0,) * 50).trajectories[0]
    assert len(trajectory.rows[0].token_ids) == 51
    capacity.kept(trajectory)
    assert capacity.limits()["evaluation"] == (64 + 8, "slots"), "4096 / (51 - 25) are 157"
    capacity.kept(group(key(1), (0,) * 5000).trajectories[0])
    assert capacity.limits()["evaluation"] == (3 + 8, "keys"), "4096 / ((0.98 * 26 + 2501) / 1.98)"


def test_an_evaluation_has_its_engine_and_where_it_shares_the_only_one_training_makes_room() -> None:
    async def main() -> None:
        capacity, fleet = capacity_of(engine("a", 20), engine("b", 64))
        reserved = fleet.reserve(0)
        assert capacity.limits() == {"training": (71, "slots"), "evaluation": (20, "slots")}
        async with capacity.evaluations:
            assert capacity.training().number == 71
            fleet.detach("b")
            assert capacity.limits() == {"training": (20 - 1 + 7, "slots"), "evaluation": (20, "slots")}
        assert capacity.training().number == 27
        fleet.unreserve(reserved)

    run_virtual(main())


def test_rollouts_of_an_evaluation_are_as_many_as_the_engines_hold_also_when_one_joins() -> None:
    async def main() -> None:
        capacity, fleet = capacity_of(engine("a", 2))
        most = list[int]()

        async def rollout(seconds: float) -> None:
            async with capacity.evaluations:
                most.append(capacity.evaluations.num_running)
                await asyncio.sleep(seconds)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(rollout(1.0)) for _ in range(9)]
            await asyncio.sleep(0.5)
            assert most == [1, 2]
            fleet.attach(engine("b", 3))
            await asyncio.sleep(0)
            assert max(most) == 5
            running[0].cancel()
            running[8].cancel()  # in line
        assert (len(most), max(most), capacity.evaluations.num_running) == (8, 5, 0)

    run_virtual(main())


class Asking(Agents):
    """Asks once, at once."""

    async def __call__(self, task: Task, client: AsyncOpenAI) -> float | None:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task.id}])
        return 0.5


def test_a_run_keeps_the_slots_full_and_queues_less_than_a_group(tmp_path: Path) -> None:
    """Slots for three, and for one more until that engine is lost; groups of two, of which the bound on age would admit eight rollouts."""
    site = Site(config(steps=8, staleness=3), tmp_path, engines=fast_engines(2), agents=Asking(0), sdk=False)
    for one, slots in zip(site.engines, (3, 1), strict=True):
        one.capabilities = replace(CAPABLE, max_running=slots)
    running, most, waited = 0, {1: 0, 2: 0}, set[str]()

    def look(fact: Fact) -> None:
        nonlocal running
        running += 2 * isinstance(fact, Admitted) - isinstance(fact, SlotFreed)
        if isinstance(fact, Waited) and fact.who == "admission":
            waited.add(fact.for_whom)
        if isinstance(fact, Admitted) and site.ring is not None:
            engines = len(site.ring.serving.fleet.takers(evaluates=False))
            most[engines] = max(most[engines], running)

    site.on_fact = look

    async def main() -> None:
        async def lose_one() -> None:
            await asyncio.sleep(0.3)
            assert site.ring is not None
            site.ring.serving.fleet.detach("e1")
            await asyncio.Event().wait()

        await site.run(lose_one())

    run_virtual(main())
    assert "slots" in waited
    assert most == {1: 4, 2: 5}
