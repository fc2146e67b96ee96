"""The handover, on virtual time: what it does when all goes well, and that nothing ends but in whole weights or quarantine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Literal, TypeAlias

import pytest

from midflight.errors import EngineUnavailable, NotSupported, PauseIgnored, RequestRejected, WeightsCorrupt
from midflight.testing.scripted import CAPABLE, Call, ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import Attestation, GenerateRequest, PauseMode, SamplingParams, WeightManifest
from midflight.weights.handover import Handover, commit_mode

from .fleets import LONG, Commits, LateTokensEngine, PausedLoadingEngine, RecordingFleet, WrongVersionEngine, drained, manifest, only

PAUSING = PauseMode.RECOMPUTE
Way: TypeAlias = Literal["rolling", "barrier"]
WAYS: list[Way] = ["rolling", "barrier"]


def handover(
    fleet: RecordingFleet, *, mode: PauseMode | Literal["auto"] = "auto", way: Way = "rolling", commits: Commits | None = None
) -> Handover:
    return Handover(fleet, pause_mode=mode, way=way, stage_seconds=5.0, commit_seconds=2.0, record=(commits or Commits()).apply)


def two(**options: float) -> tuple[RecordingFleet, ScriptedEngine, ScriptedEngine]:
    a, b = ScriptedEngine("a", **options), ScriptedEngine("b", **options)
    return RecordingFleet(a, b), a, b


# --- When all goes well ----------------------------------------------------------------------------------------------


def test_a_version_goes_live_on_every_engine_without_a_pause_where_engines_swap():
    fleet, a, b = two(stage_seconds=3.0, commit_seconds=0.5)
    commits = Commits()
    report = run_virtual(handover(fleet, commits=commits).publish(manifest(1)))
    assert report.served_by == ("a", "b")
    assert not report.quarantined
    assert report.stage_seconds == 3.0, "staged side by side"
    assert a.served == b.served == Attestation(1, "print-1")
    assert commits.seen == [("a", 1), ("b", 1)]
    assert commits.seconds == [(3.0, 0.5), (3.0, 0.5)]
    assert "pause" not in a.calls
    fleet.check_whole()


class SwappingEngine(ScriptedEngine):
    """Its commit waits for a step, and then it stands still for a hundredth of a second."""

    async def commit(self, version: int) -> Attestation:
        return replace(await super().commit(version), still_seconds=0.01)


def test_an_engine_that_swaps_between_steps_stands_still_as_long_as_it_says():
    commits = Commits()
    fleet = RecordingFleet(SwappingEngine("a", commit_seconds=0.5))
    run_virtual(handover(fleet, commits=commits).publish(manifest(1)))
    assert commits.seconds == [(0.0, 0.01)]
    paused = Commits()
    fleet = RecordingFleet(SwappingEngine("a", commit_seconds=0.5))
    run_virtual(handover(fleet, mode=PAUSING, commits=paused).publish(manifest(1)))
    assert paused.seconds == [(0.0, 0.5)], "a pause of ours lasts as long as the commit"


def test_a_mode_other_than_keep_holds_pauses_commits_and_resumes():
    fleet, a, _ = two()
    run_virtual(handover(fleet, mode=PAUSING).publish(manifest(1)))
    assert list(a.calls) == ["stage", "pause", "health", "commit", "health", "resume"]
    assert fleet.log == ["hold a", "served a 1", "release a", "hold b", "served b 1", "release b"]
    fleet.check_whole()


@pytest.mark.parametrize("mode", [PauseMode.RECOMPUTE, PauseMode.ABORT])
def test_an_engine_that_keeps_versions_side_by_side_is_never_paused(mode: PauseMode):
    engine = ScriptedEngine("a", capabilities=replace(CAPABLE, side_by_side=True))
    report = run_virtual(handover(fleet := RecordingFleet(engine), mode=mode).publish(manifest(1)))
    assert report.served_by == ("a",) and list(engine.calls) == ["stage", "commit", "resume"]
    fleet.check_whole()


def test_generation_goes_on_while_staging_and_its_tokens_carry_both_versions():
    async def main() -> set[int]:
        engine = ScriptedEngine("a", stage_seconds=1.0)
        fleet = RecordingFleet(engine)
        request = GenerateRequest("r", (1, 2), 2, SamplingParams(max_tokens=200, ignore_eos=True))
        async with asyncio.TaskGroup() as group:
            group.create_task(handover(fleet).publish(manifest(1)))
            return {chunk.version async for chunk in engine.generate(request)}

    assert run_virtual(main) == {0, 1}


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_cannot_stage_gets_its_weights_inside_the_pause(way: Way):
    engine = PausedLoadingEngine("a")
    fleet = RecordingFleet(engine, ScriptedEngine("b"))
    report = run_virtual(handover(fleet, mode=PauseMode.KEEP, way=way).publish(manifest(1)))
    assert report.served_by == ("a", "b")
    assert "pause" in engine.calls
    fleet.check_whole()


def test_what_may_be_released_is_what_no_engine_fetches_any_more():
    async def main() -> list[tuple[int, ...]]:
        fleet, _, _ = two()
        h = handover(fleet)
        return [(await h.publish(manifest(v))).releasable for v in (1, 2, 2, 3)]

    assert run_virtual(main) == [(), (1,), (), (2,)]


def test_a_version_published_to_no_engine_is_what_later_engines_rejoin_at():
    async def main() -> None:
        h = handover(RecordingFleet())
        assert (await h.publish(manifest(4))).served_by == ()
        assert h.current == manifest(4)

    run_virtual(main)


# --- Modes -----------------------------------------------------------------------------------------------------------


def test_auto_takes_keep_then_recompute_then_abort_then_drain():
    every = frozenset(PauseMode)
    cases = [
        (every, True, "keep"),
        (every, False, "recompute"),
        ({PauseMode.ABORT, PauseMode.DRAIN}, True, "abort"),
        ({PauseMode.DRAIN}, True, "drain"),
    ]
    for modes, per_token, expected in cases:
        assert commit_mode("a", only(*modes, versions_per_token=per_token).capabilities, "auto") == expected


def test_a_mode_the_engine_lacks_is_refused_before_anything_begins_and_names_what_it_has():
    engine = only(PauseMode.ABORT, PauseMode.DRAIN)
    with pytest.raises(NotSupported, match="keep: it can abort, drain"):
        run_virtual(handover(RecordingFleet(engine), mode=PauseMode.KEEP).publish(manifest(1)))
    assert not engine.calls
    with pytest.raises(NotSupported, match="no pause at all"):
        run_virtual(handover(RecordingFleet(only())).publish(manifest(1)))


# --- I7: faults ------------------------------------------------------------------------------------------------------

PHASES: list[tuple[Call, PauseMode | Literal["auto"]]] = [
    ("stage", "auto"), ("commit", "auto"), ("resume", "auto"),
    ("stage", PAUSING), ("pause", PAUSING), ("health", PAUSING), ("commit", PAUSING), ("resume", PAUSING),
    ("pause", PauseMode.ABORT), ("commit", PauseMode.DRAIN),
]  # fmt: skip


IN_BOTH_WAYS: list[tuple[Way, Call, PauseMode | Literal["auto"]]] = [
    *((way, phase, mode) for way in WAYS for phase, mode in PHASES),
    ("barrier", "pause", "auto"), ("barrier", "health", "auto"),
]  # fmt: skip
"""At a barrier, engines that swap between two steps are paused too."""


@pytest.mark.parametrize(("way", "phase", "mode"), IN_BOTH_WAYS)
@pytest.mark.parametrize("how", ["fail", "hang"])
def test_i7_p10_a_fault_in_any_phase_puts_that_engine_in_quarantine_and_the_other_goes_on(way: Way, phase: Call, mode: PauseMode, how: str):
    async def main() -> None:
        fleet, a, b = two()
        a.fail_next(phase, EngineUnavailable("gone")) if how == "fail" else a.hang_next(phase)
        h = handover(fleet, mode=mode, way=way)
        report = await h.publish(manifest(1))
        assert report.served_by == ("b",)
        assert list(report.quarantined) == ["a"]
        assert isinstance(fleet.in_quarantine["a"], EngineUnavailable)
        assert asyncio.get_running_loop().time() == (0 if how == "fail" else 5.0 if phase == "stage" else 2.0)
        fleet.check_whole()
        # The engine has recovered: it comes back at the current version, whatever state it was left in.
        assert await h.rejoin("a")
        assert a.served == b.served == Attestation(1, "print-1")
        assert not fleet.in_quarantine
        fleet.check_whole()

    run_virtual(main)


@pytest.mark.parametrize(("way", "phase", "mode"), IN_BOTH_WAYS)
def test_i7_a_cancellation_in_any_phase_leaves_no_engine_paused_outside_quarantine(way: Way, phase: Call, mode: PauseMode):
    async def main() -> None:
        fleet, a, b = two()
        a.hang_next(phase)
        h = handover(fleet, mode=mode, way=way)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await h.publish(manifest(1))
        fleet.check_whole()
        assert ("a" in fleet.in_quarantine) == (phase != "stage")  # While staging, engines serve their whole old weights.
        # A cancelled publication may be repeated, and nobody is locked out.
        assert (await h.publish(manifest(1))).served_by == ("a", "b")
        assert a.served == b.served == Attestation(1, "print-1")
        assert not fleet.in_quarantine
        fleet.check_whole()

    run_virtual(main)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["auto", PAUSING])
def test_i7_a_wrong_fingerprint_or_version_is_never_served(mode: PauseMode, way: Way):
    async def main() -> None:
        a, b, c = ScriptedEngine("a"), WrongVersionEngine("b"), ScriptedEngine("c")
        fleet = RecordingFleet(a, b, c)
        a.corrupt_next_commit()
        report = await handover(fleet, mode=mode, way=way).publish(manifest(1))
        assert report.served_by == ("c",)
        assert {type(e) for e in fleet.in_quarantine.values()} == {WeightsCorrupt}
        if mode == PAUSING:
            assert a.paused is b.paused is PAUSING, "unknown weights must not run"
        fleet.check_whole()

    run_virtual(main)


@pytest.mark.parametrize("way", WAYS)
def test_i7_p9_an_engine_that_goes_on_during_its_pause_is_named_and_put_in_quarantine(way: Way):
    async def main() -> None:
        engine, other = ScriptedEngine("a", commit_seconds=0.5), ScriptedEngine("b", commit_seconds=0.5)
        engine.ignores_pause = True
        fleet = RecordingFleet(engine, other)
        async with asyncio.TaskGroup() as group:
            for each in (engine, other):
                group.create_task(drained(each.generate(LONG)))
            await asyncio.sleep(0.1)
            report = await handover(fleet, mode=PAUSING, way=way).publish(manifest(1))
            assert report.served_by == ("b",)
            assert other.paused is None
        assert isinstance(fleet.in_quarantine["a"], PauseIgnored)
        assert "pausing engine 'a': it made 50 tokens while paused" in report.quarantined["a"]

    run_virtual(main())


@pytest.mark.parametrize("way", WAYS)
def test_tokens_that_come_before_the_pause_has_returned_are_no_progress(way: Way):
    """A real server's tokens are counted as they arrive: its adapter's pause returns when the last has."""

    async def main() -> None:
        engine = LateTokensEngine("a")
        fleet = RecordingFleet(engine, ScriptedEngine("b"))
        async with asyncio.TaskGroup() as group:
            group.create_task(drained(engine.generate(LONG)))
            await asyncio.sleep(0.1)
            report = await handover(fleet, mode=PAUSING, way=way).publish(manifest(1))
        assert engine.num_late > 0
        assert set(report.served_by) == {"a", "b"}
        fleet.check_whole()

    run_virtual(main())


def test_i7_an_engine_that_dies_and_comes_back_with_old_weights_is_brought_up_before_it_is_routable():
    async def main() -> None:
        fleet, a, _ = two()
        h = handover(fleet)
        await h.publish(manifest(1))
        a.die()
        report = await h.publish(manifest(2))
        assert report.served_by == ("b",)
        assert not await h.rejoin("a"), "it is still dead"
        assert "a" in fleet.in_quarantine
        a.revive()
        assert a.served.version == 0
        assert await h.rejoin("a")
        assert a.served == Attestation(2, "print-2")
        fleet.check_whole()

    run_virtual(main)


def test_the_next_version_fetches_engines_out_of_quarantine():
    async def main() -> None:
        fleet, a, _ = two()
        a.fail_next("commit", EngineUnavailable("gone"))
        h = handover(fleet, mode=PAUSING)
        await h.publish(manifest(1))
        assert "a" in fleet.in_quarantine
        assert (await h.publish(manifest(2))).served_by == ("a", "b")
        fleet.check_whole()
        assert not fleet.in_quarantine

    run_virtual(main)


def test_before_the_first_publication_an_engine_rejoins_only_with_the_weights_the_fleet_serves():
    async def main() -> None:
        fleet, _, b = two()
        fleet.quarantine("a", EngineUnavailable("gone"))
        h = handover(fleet)
        assert await h.rejoin("a")
        b._served = Attestation(3, "print-3")
        fleet.quarantine("b", EngineUnavailable("gone"))
        assert not await h.rejoin("b")
        assert "b" in fleet.in_quarantine
        assert not await h.rejoin("nobody")

    run_virtual(main)


# --- Superseding -----------------------------------------------------------------------------------------------------


def test_of_the_versions_that_wait_only_the_newest_goes_on_and_the_others_hear_at_once():
    async def main() -> None:
        fleet, a, _ = two(stage_seconds=1.0)
        h, clock = handover(fleet), asyncio.get_running_loop().time
        told: dict[int, tuple[float, int | None]] = {}

        async def publish(version: int, at: float) -> None:
            await asyncio.sleep(at)
            report = await h.publish(manifest(version))
            told[version] = (clock(), report.superseded_by)

        async with asyncio.TaskGroup() as group:
            for version, at in ((1, 0.0), (2, 0.2), (3, 0.5)):
                group.create_task(publish(version, at))
        assert told == {1: (1.0, None), 2: (0.5, 3), 3: (2.0, None)}
        assert a.served == Attestation(3, "print-3")
        fleet.check_whole()

    run_virtual(main)


def test_a_cancelled_waiter_passes_its_turn_on():
    async def main() -> None:
        fleet, a, _ = two(stage_seconds=1.0)
        h = handover(fleet)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(h.publish(manifest(1)))
            await asyncio.sleep(0.1)
            second = group.create_task(h.publish(manifest(2)))
            await asyncio.sleep(0.1)
            second.cancel()
            rejoined = group.create_task(h.rejoin("a"))
            again = group.create_task(h.rejoin("a"))
        assert first.result().served_by == ("a", "b")
        assert rejoined.result()
        assert not again.result(), "one place for each engine"
        assert a.served.version == 1
        # The slot of the cancelled version is not lost.
        assert (await h.publish(manifest(3))).releasable == (1, 2)

    run_virtual(main)


def test_version_numbers_only_grow_and_are_never_reused():
    async def main() -> None:
        h = handover(two()[0])
        await h.publish(manifest(2))
        with pytest.raises(RequestRejected, match="version 2 was published before"):
            await h.publish(manifest(1))
        other = manifest(2).__class__(2, "other", "file", "nowhere", ())
        with pytest.raises(RequestRejected, match="never reused"):
            await h.publish(other)

    run_virtual(main)


@pytest.mark.parametrize("seed", range(25))
def test_i7_holds_under_random_faults_cancellations_and_interleavings(seed: int):
    """Ten versions, three engines, a fault every other call; at every quiet moment each engine is whole or in quarantine."""
    import random

    rng = random.Random(seed)
    calls: list[Call] = ["stage", "pause", "health", "commit", "resume"]

    async def main() -> None:
        engines = [ScriptedEngine(n, stage_seconds=rng.random(), commit_seconds=rng.random() / 10, capabilities=CAPABLE) for n in "abc"]
        fleet = RecordingFleet(*engines)
        h = handover(fleet, mode=rng.choice(["auto", *PauseMode]), way=rng.choice(WAYS))

        async def publish(version: int) -> None:
            try:
                async with asyncio.timeout(rng.choice([0.3, 1.0, 20.0])):
                    await h.publish(manifest(version))
            except (TimeoutError, RequestRejected):
                pass

        for version in range(1, 11):
            engine = rng.choice(engines)
            rng.choice([engine.hang_next, lambda c, e=engine: e.fail_next(c, EngineUnavailable("gone"))])(rng.choice(calls))
            if rng.random() < 0.2:
                engine.corrupt_next_commit()
            async with asyncio.TaskGroup() as group:
                group.create_task(publish(version))
                group.create_task(h.rejoin(rng.choice("abc")))
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random())
                    group.create_task(publish(version))
            fleet.check_whole()

    run_virtual(main, seed=seed)


@pytest.mark.parametrize("way", ["rolling", "barrier"])
def test_a_reserved_engine_is_passed_over_and_catches_up_with_the_newest_version(way: Way) -> None:
    async def main() -> None:
        fleet, a, b = two()
        h = handover(fleet, way=way)
        await h.publish(manifest(1))
        await h.catch_up("a")
        fleet.reserved_engine = "a"
        for version in (2, 3):
            assert (await h.publish(manifest(version))).served_by == ("b",)
        fleet.reserved_engine = None
        assert (a.served.version, b.served.version) == (1, 3)
        stagings = a.calls.count("stage")
        await h.catch_up("a")
        await h.catch_up("a")
        assert a.served.version == 3 and a.calls.count("stage") == stagings + 1, "it catches up once, and only where it has to"
        fleet.check_whole()

    run_virtual(main())


def test_an_engine_that_falls_out_while_catching_up_is_in_quarantine() -> None:
    async def main() -> None:
        fleet, a, _ = two()
        h = handover(fleet)
        fleet.reserved_engine = "a"
        await h.publish(manifest(1))
        fleet.reserved_engine = None
        a.fail_next("stage", EngineUnavailable("gone"))
        await h.catch_up("a")
        assert list(fleet.in_quarantine) == ["a"]
        assert await h.rejoin("a") and not fleet.in_quarantine

    run_virtual(main())


def test_engines_are_told_how_many_they_are_and_one_that_rejoins_is_alone() -> None:
    async def main() -> None:
        told: list[int | None] = []

        class Told(ScriptedEngine):
            async def stage(self, manifest: WeightManifest) -> None:
                told.append(manifest.receivers)
                await super().stage(manifest)

        engines = [Told(name) for name in "ab"]
        fleet = RecordingFleet(*engines)
        handing = handover(fleet)
        await handing.publish(manifest(1))
        assert told == [2, 2]
        engines[1].revive()
        fleet.quarantine("b", EngineUnavailable("restarted"))
        assert await handing.rejoin("b")
        assert told == [2, 2, 1] and handing.current == manifest(1)

    run_virtual(main())
