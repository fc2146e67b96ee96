"""The fleet: who serves what, who is out, and who waits for whom."""

from __future__ import annotations

import asyncio
import sys

import pytest
from tests.gateway.generating import generated

from midflight.allowance import Allowance
from midflight.errors import ConfigError, EngineUnavailable, WeightsCorrupt
from midflight.gateway.answers.generation import Generator
from midflight.gateway.fleet.fleet import Fleet, Lease
from midflight.gateway.fleet.health import HealthWatch, StallWatch
from midflight.ports import EngineFleet
from midflight.testing.script import Script, scripted_tokenizer
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import EngineHealth, GenerateRequest, PauseMode, SamplingParams, WeightManifest

ENDLESS, TOKENIZER = Script(mean_length=None), scripted_tokenizer()


def fleet_of(*engines: ScriptedEngine) -> Fleet:
    fleet = Fleet()
    for engine in engines:
        fleet.attach(engine)
    return fleet


async def place(fleet: Fleet, *, affinity: str = "", tokens: int = 10, seconds: float = 100.0) -> Lease:
    return await fleet.place(fleet.ticket(), tokens=tokens, affinity=affinity, allowance=Allowance(seconds))


def out(fleet: Fleet) -> dict[str, bool]:
    """Engines in quarantine, and whether they are on probation."""
    return {s.name: s.on_probation for s in fleet.states() if s.error is not None}


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version, "hash", "file", "nowhere", ())


def test_it_is_the_fleet_of_the_handover() -> None:
    fleet: EngineFleet = fleet_of(ScriptedEngine("a"), ScriptedEngine("b"))
    assert [e.name for e in fleet.engines()] == ["a", "b"]
    with pytest.raises(ConfigError, match="'a': the name is taken"):
        fleet_of(ScriptedEngine("a"), ScriptedEngine("a"))


def test_every_change_of_the_served_version_is_told_however_it_comes() -> None:
    fleet = fleet_of(ScriptedEngine("a"), ScriptedEngine("b"))
    told: list[int] = []
    fleet.on_served = told.append
    fleet.served("a", 1)
    assert told == []
    fleet.quarantine("b", EngineUnavailable("dead"))
    assert told == [1]
    fleet.quarantine("a", EngineUnavailable("dead"))
    fleet.served("b", 2)
    fleet.hold("b", "handover")
    assert told == [1, 2]


def test_the_served_version_is_the_oldest_of_engines_out_of_quarantine() -> None:
    fleet = fleet_of(ScriptedEngine("a"), ScriptedEngine("b"))
    fleet.served("a", 3)
    assert (fleet.served_version(), fleet.current_version()) == (0, 3)
    fleet.hold("b", "handover")
    assert fleet.served_version() == 0, "a held engine comes back"
    fleet.quarantine("b", EngineUnavailable("dead"))
    assert fleet.served_version() == 3
    fleet.quarantine("a", EngineUnavailable("dead"))
    assert fleet.served_version() == 3, "the last known, while nobody serves"
    fleet.served("b", 4)
    assert fleet.served_version() == 4


def test_requests_balance_by_tokens_in_flight_and_free_their_load_when_they_leave() -> None:
    async def main() -> None:
        fleet = fleet_of(*(ScriptedEngine(n) for n in "abc"))
        leases = [await place(fleet, tokens=t) for t in (50, 20, 20, 20, 20)]
        assert [lease.engine.name for lease in leases] == ["a", "b", "c", "b", "c"]
        fleet.leave(leases[0])
        fleet.leave(leases[0])
        assert [s.tokens_in_flight for s in fleet.states()] == [0, 40, 40]

    run_virtual(main())


def test_a_session_stays_on_its_engine_leaves_it_while_held_and_is_pinned_again_when_it_is_gone() -> None:
    async def main() -> None:
        fleet = fleet_of(ScriptedEngine("a"), ScriptedEngine("b"))

        async def where() -> str:
            return (await place(fleet, affinity="s")).engine.name

        assert [await where(), await where()] == ["a", "a"]
        fleet.hold("a", "handover")
        assert await where() == "b"
        fleet.release("a", "handover")
        assert await where() == "a", "a hold costs no session its prefix"
        fleet.quarantine("a", EngineUnavailable("dead"))
        assert await where() == "b"
        fleet.served("a", 0)
        assert await where() == "b", "its prefix is there now"
        fleet.forget("s")
        assert await where() == "a", "the lighter one"

    run_virtual(main())


@pytest.mark.parametrize("event", ["attach", "release", "release_all", "served", "rejoin"])
def test_whatever_makes_an_engine_routable_wakes_who_waits_at_once(event: str) -> None:
    async def main() -> None:
        fleet = Fleet()
        engine = ScriptedEngine("a")
        if event != "attach":
            fleet.attach(engine)
        if event in ("served", "rejoin"):
            fleet.quarantine("a", EngineUnavailable("dead"), probation=event == "rejoin")
        if event == "release":
            fleet.hold("a", "handover")
        if event == "release_all":
            fleet.hold_all("operator")
        async with asyncio.TaskGroup() as group:
            task = group.create_task(place(fleet))
            await asyncio.sleep(5)
            assert (task.done(), fleet.num_waiting) == (False, 1)
            {
                "attach": lambda: fleet.attach(engine),
                "release": lambda: fleet.release("a", "handover"),
                "release_all": lambda: fleet.release_all("operator"),
                "served": lambda: fleet.served("a", 1),
                "rejoin": lambda: fleet.rejoin("a", 0),
            }[event]()
        assert task.result().engine is engine
        assert asyncio.get_running_loop().time() == 5

    run_virtual(main())


def test_quarantine_and_detachment_end_the_waits_of_their_requests() -> None:
    async def main() -> None:
        fleet = fleet_of(ScriptedEngine("a"), ScriptedEngine("b"))
        on_a, on_b = await place(fleet), await place(fleet)
        error = WeightsCorrupt("half")
        fleet.quarantine("a", error)
        fleet.detach("b")
        assert on_a.lost is error
        assert "detached" in str(on_b.lost)
        fleet.detach("b")
        fleet.served("b", 1)
        fleet.hold("b", "handover")
        fleet.quarantine("b", error)
        assert [s.name for s in fleet.states()] == ["a"], "who acts on a detached engine is late, not wrong"

    run_virtual(main())


def test_i7_an_engine_with_doubtful_weights_rejoins_only_when_it_has_attested_new_ones() -> None:
    fleet = fleet_of(ScriptedEngine("a"), ScriptedEngine("b"))
    fleet.quarantine("a", EngineUnavailable("silent"), probation=True)
    fleet.quarantine("a", WeightsCorrupt("half"))
    fleet.quarantine("a", EngineUnavailable("silent again"), probation=True)
    assert out(fleet) == {"a": False}
    assert isinstance(fleet.states()[0].error, WeightsCorrupt)
    assert not fleet.rejoin("a", 0)
    fleet.served("a", 0)
    assert out(fleet) == {}


def test_a_probation_does_not_end_on_old_weights() -> None:
    fleet = fleet_of(ScriptedEngine("a"), ScriptedEngine("b"))
    fleet.served("b", 1)
    fleet.quarantine("a", EngineUnavailable("silent"), probation=True)
    assert not fleet.rejoin("a", 0)
    assert fleet.rejoin("a", 1)


def test_an_engine_paused_by_two_resumes_when_both_have_let_go() -> None:
    async def main() -> None:
        engine = ScriptedEngine("a")
        fleet = fleet_of(engine)
        (handover,), (operator,) = fleet.engines(), fleet.engines_of("operator")
        await operator.pause(PauseMode.KEEP)
        await handover.pause(PauseMode.RECOMPUTE)
        assert engine.paused is PauseMode.KEEP, "the first mode stays in force"
        await handover.resume()
        assert engine.paused is PauseMode.KEEP
        await operator.resume()
        assert engine.paused is None
        await handover.pause(PauseMode.ABORT)
        fleet.quarantine("a", EngineUnavailable("lost"))
        assert fleet.states()[0].paused_by == (), "a pause ends in quarantine too"

    run_virtual(main())


# --- Health ----------------------------------------------------------------------------------------------------------


def reading(num_tokens: int, *, running: int = 1, paused: bool = False) -> EngineHealth:
    return EngineHealth(0, paused, num_tokens, running, 0)


def test_equal_token_counts_with_work_for_the_deadline_are_a_stall() -> None:
    progress = StallWatch(stall_seconds=10)
    assert progress.read("a", reading(5), now=0) is None
    assert progress.read("a", reading(5), now=9.9) is None
    assert progress.read("a", reading(6), now=10) is None, "a token was made"
    assert "no token in 10.0 s with 1 requests" in (progress.read("a", reading(6), now=20) or "")


@pytest.mark.parametrize("excuse", [reading(5, running=0), reading(5, paused=True)])
def test_no_work_and_a_pause_excuse(excuse: EngineHealth) -> None:
    progress = StallWatch(stall_seconds=10)
    for now in range(0, 100, 5):
        assert progress.read("a", excuse, now=now) is None
    assert progress.read("a", reading(5), now=100) is None
    assert progress.read("a", reading(5), now=105) is not None, "the clock runs from the last excuse, at 95"


def test_an_engine_held_by_us_is_excused_and_a_silent_one_is_not() -> None:
    progress = StallWatch(stall_seconds=10)
    for now in (0, 20, 40):
        assert progress.read("a", reading(5), now=now, excused=True) is None
    assert progress.read("a", None, now=45) is None
    assert "not answered" in (progress.read("a", None, now=50) or "")


def test_i9_a_stalled_engine_is_found_its_request_goes_on_elsewhere_and_it_rejoins_when_it_recovers() -> None:
    async def main() -> None:
        stuck, healthy = ScriptedEngine("stuck", script=ENDLESS), ScriptedEngine("healthy", script=ENDLESS)
        fleet = fleet_of(stuck, healthy)
        generator = Generator(fleet, request_seconds=100)
        request = GenerateRequest("r", (1, 2, 3), 3, SamplingParams(max_tokens=20))
        stuck.stall()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(HealthWatch(fleet, interval_seconds=1, stall_seconds=5).run())
            chunks = await generated(generator, request, affinity="s")
            assert tuple(i for chunk in chunks for i in chunk.token_ids) == healthy.answer(request)
            assert 5 <= asyncio.get_running_loop().time() < 8
            assert "no token in 5.0 s" in str(fleet.states()[0].error)
            await asyncio.sleep(10)
            assert out(fleet) == {}, "it has no work any more and answers"
            watch.cancel()

    run_virtual(main())


def test_a_dead_engine_is_found_at_once_and_rejoins_when_it_serves_what_the_fleet_serves() -> None:
    async def main() -> None:
        engine, other = ScriptedEngine("a"), ScriptedEngine("b", version=2)
        fleet = Fleet()
        fleet.attach(engine)
        fleet.attach(other, version=2)
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(HealthWatch(fleet, interval_seconds=1, stall_seconds=5).run())
            engine.die()
            await asyncio.sleep(1.5)
            assert out(fleet) == {"a": True}
            engine.revive()
            await asyncio.sleep(10)
            assert out(fleet) == {"a": True}, "it serves version 0, the fleet 2"
            await engine.stage(manifest(2))
            await engine.commit(2)
            await engine.pause(PauseMode.KEEP)
            await asyncio.sleep(1.5)
            assert out(fleet) == {}
            assert engine.paused is None, "a pause that nobody owned was ended"
            watch.cancel()

    run_virtual(main())


def test_an_engine_that_hangs_in_its_health_check_delays_no_other() -> None:
    async def main() -> None:
        hanging, dead = ScriptedEngine("hanging"), ScriptedEngine("dead")
        fleet = fleet_of(hanging, dead)
        for _ in range(10):
            hanging.hang_next("health")
        dead.die()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(HealthWatch(fleet, interval_seconds=1, stall_seconds=5).run())
            await asyncio.sleep(1.5)
            assert out(fleet) == {"dead": True}
            await asyncio.sleep(8)
            assert out(fleet) == {"dead": True, "hanging": True}
            watch.cancel()

    run_virtual(main())


def test_an_engine_that_answers_its_health_checks_late_is_sound_and_nobody_asks_it_twice_at_once() -> None:
    class Late(ScriptedEngine):
        num_asked = most_asked = 0

        async def health(self) -> EngineHealth:
            self.num_asked += 1
            self.most_asked = max(self.most_asked, self.num_asked)
            try:
                await asyncio.sleep(3)
                return await super().health()
            finally:
                self.num_asked -= 1

    async def main() -> None:
        late = Late("late")
        fleet = fleet_of(late)
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(HealthWatch(fleet, interval_seconds=1, stall_seconds=5).run())
            for _ in range(60):
                await asyncio.sleep(1)
                assert out(fleet) == {}
            assert late.most_asked == 1
            late.hang_next("health")
            found: list[dict[str, bool]] = []
            for _ in range(10):
                await asyncio.sleep(1)
                found.append(out(fleet))
            assert {"late": True} in found and found[-1] == {}, "it said nothing for five seconds, and then it answered"
            watch.cancel()

    run_virtual(main())


def test_who_falls_out_again_and_again_waits_longer_each_time() -> None:
    async def main() -> list[float]:
        engine = ScriptedEngine("a")
        fleet = fleet_of(engine)
        loop = asyncio.get_running_loop()
        seconds_out: list[float] = []
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(HealthWatch(fleet, interval_seconds=1, stall_seconds=5).run())
            for _ in range(3):
                fleet.quarantine("a", EngineUnavailable("nonsense"), probation=True)
                since = loop.time()
                fleet.leave(await place(fleet))
                seconds_out.append(loop.time() - since)
            watch.cancel()
        return seconds_out

    first, second, third = run_virtual(main())
    assert first < second < third


def test_i2_an_engine_that_serves_an_older_version_than_it_attested_is_taken_out() -> None:
    """It was restarted between two readings: its old weights must not answer, or admission would count wrong."""

    async def main() -> None:
        a, b = ScriptedEngine("a"), ScriptedEngine("b")
        fleet = fleet_of(a, b)
        for engine in (a, b):
            await engine.stage(manifest(1))
            await engine.commit(1)
            fleet.served(engine.name, 1)
        a.die()
        a.revive()
        await HealthWatch(fleet, interval_seconds=1, stall_seconds=10).check()
        assert out(fleet) == {"a": True}
        assert fleet.served_version() == 1

    run_virtual(main())


def test_i2_tokens_older_than_what_their_engine_attested_are_refused_and_made_elsewhere() -> None:
    async def main() -> None:
        a, b = ScriptedEngine("a", script=ENDLESS), ScriptedEngine("b", script=ENDLESS)
        fleet = fleet_of(a, b)
        for engine in (a, b):
            await engine.stage(manifest(1))
            await engine.commit(1)
            fleet.served(engine.name, 1)
        a.die()
        a.revive()
        generator = Generator(fleet, request_seconds=10)
        for k in range(2):
            request = GenerateRequest(str(k), (1, 2), 2, SamplingParams(max_tokens=5))
            assert {c.version for c in await generated(generator, request, affinity=str(k))} == {1}
        assert out(fleet) == {"a": True}

    run_virtual(main())


def test_a_pause_is_renewed_for_as_long_as_somebody_holds_it_and_no_longer() -> None:
    """An engine that hears no more of its pause resumes by itself after a while, lest a dead controller freeze it."""

    async def main() -> None:
        engine = ScriptedEngine("a")
        fleet = fleet_of(engine)
        (ours,) = fleet.engines_of("operator")
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(HealthWatch(fleet, interval_seconds=1, stall_seconds=5).run())
            await ours.pause(PauseMode.RECOMPUTE)
            await asyncio.sleep(10.5)
            assert engine.calls.count("pause") == 11 and engine.paused is PauseMode.RECOMPUTE
            await ours.resume()
            await asyncio.sleep(10)
            assert engine.calls.count("pause") == 11 and engine.paused is None
            watch.cancel()

    run_virtual(main)


def calls_beside(num_engines: int) -> tuple[float, float]:
    """Calls of functions to place a request and to end it, and to say that an engine serves the next version: half of them do."""

    async def main() -> tuple[float, float]:
        fleet, num_calls = fleet_of(*(ScriptedEngine(f"e{number}", tokenizer=TOKENIZER) for number in range(num_engines))), 0
        for _ in range(4 * num_engines):
            await place(fleet)

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        sys.setprofile(count)
        for number in range(50):
            fleet.leave(await place(fleet, affinity=f"s{number % 7}" if number % 2 else "", tokens=10 + number))
        requests, num_calls = num_calls / 50, 0
        for number in range(num_engines // 2):
            fleet.served(f"e{number}", 1)
        sys.setprofile(None)
        return requests, num_calls / (num_engines // 2)

    return run_virtual(main)


def test_what_a_request_and_a_version_of_an_engine_take_hardly_grows_from_two_engines_to_a_thousand() -> None:
    few, many = calls_beside(2), calls_beside(1000)
    assert all(b <= 1.5 * a for a, b in zip(few, many, strict=True)), (few, many)
