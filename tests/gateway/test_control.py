"""The operator's pause, resume and abort."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.generating import generated

from midflight.errors import EngineError, EngineUnavailable, NotSupported, PauseIgnored
from midflight.gateway.answers.generation import Generator
from midflight.gateway.fleet.fleet import Fleet
from midflight.gateway.http.control import Control
from midflight.testing.script import Script, scripted_tokenizer
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import Chunk, GenerateRequest, PauseMode, SamplingParams, WeightManifest

PROMPT = tuple(b"go")
TOKENIZER = scripted_tokenizer()


class Site:
    """Engines, and the gateway before them."""

    def __init__(self, num_engines: int = 2, **engine_options: object) -> None:
        self.engines = [
            ScriptedEngine(f"e{i}", script=Script(mean_length=None), tokenizer=TOKENIZER, **engine_options)  # type: ignore[arg-type]
            for i in range(num_engines)
        ]
        self.fleet = Fleet()
        for engine in self.engines:
            self.fleet.attach(engine)
        self.generator = Generator(self.fleet, request_seconds=100)
        self.control = Control(self.fleet, self.generator, pause_seconds=5, verify_seconds=0.1)

    def post(self, seed: int = 0, *, max_tokens: int = 20) -> Coroutine[object, object, list[Chunk]]:
        """A request of an agent; its place in the order of arrival is taken now."""
        return generated(self.generator, self.request(seed, max_tokens=max_tokens), affinity=f"s{seed}")

    def request(self, seed: int = 0, *, max_tokens: int = 20) -> GenerateRequest:
        return GenerateRequest(str(seed), PROMPT, len(PROMPT), SamplingParams(max_tokens=max_tokens, seed=seed))

    def assert_running(self) -> None:
        assert not self.control.paused
        assert [(s.held_by, s.paused_by) for s in self.fleet.states()] == [((), ())] * len(self.engines)
        assert [e.paused for e in self.engines] == [None] * len(self.engines)

    async def num_tokens(self) -> list[int]:
        return [(await e.health()).num_tokens for e in self.engines]


def ids(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(i for chunk in chunks for i in chunk.token_ids)


@pytest.mark.parametrize("mode", [None, *PauseMode])
def test_requests_posted_during_a_pause_are_dispatched_after_it_in_order_of_arrival(mode: PauseMode | None) -> None:
    async def main() -> None:
        site = Site(1)
        async with asyncio.TaskGroup() as group:
            before = group.create_task(site.post(1000))
            await asyncio.sleep(0.035)
            await site.control.pause(mode)
            num_before = len(site.engines[0].requests)
            during = [group.create_task(site.post(seed)) for seed in range(64)]
            await asyncio.sleep(60)
            assert len(site.engines[0].requests) == num_before, "none earlier"
            await site.control.resume()
            resumed_at = asyncio.get_running_loop().time()
        site.assert_running()
        dispatched = [r.sampling.seed for r in site.engines[0].requests]
        assert dispatched[-64:] == list(range(64))
        assert dispatched[:-64] == ([1000, 1000] if mode is PauseMode.ABORT else [1000]), "the aborted one is the oldest"
        assert ids(before.result()) == site.engines[0].answer(site.request(1000))
        assert [ids(t.result()) for t in during] == [site.engines[0].answer(site.request(seed)) for seed in range(64)]
        assert asyncio.get_running_loop().time() == pytest.approx(resumed_at + 0.2 * (2 if mode is PauseMode.ABORT else 1), abs=0.2)

    run_virtual(main())


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RECOMPUTE, PauseMode.ABORT])
def test_a_paused_fleet_makes_no_token(mode: PauseMode) -> None:
    async def main() -> None:
        site = Site()
        async with asyncio.TaskGroup() as group:
            for seed in range(4):
                group.create_task(site.post(seed))
            await asyncio.sleep(0.055)
            await site.control.pause(mode)
            first = await site.num_tokens()
            await asyncio.sleep(1000)
            assert await site.num_tokens() == first
            assert sum(first) == 4 * 5
            await site.control.resume()

    run_virtual(main())


def test_without_a_wish_each_engine_pauses_in_the_mode_that_costs_it_least() -> None:
    async def main() -> None:
        site = Site(3)
        site.engines[1].capabilities = replace(CAPABLE, pause_modes=frozenset({PauseMode.ABORT, PauseMode.RECOMPUTE}))
        site.engines[2].capabilities = replace(CAPABLE, pause_modes=frozenset({PauseMode.DRAIN}))
        await site.control.pause()
        assert [e.paused for e in site.engines] == [PauseMode.KEEP, PauseMode.RECOMPUTE, PauseMode.DRAIN]
        await site.control.resume()
        site.assert_running()

    run_virtual(main())


def test_a_mode_that_an_engine_lacks_is_refused_before_any_engine_is_touched() -> None:
    async def main() -> None:
        site = Site()
        site.engines[1].capabilities = replace(CAPABLE, pause_modes=frozenset({PauseMode.ABORT, PauseMode.DRAIN}))
        with pytest.raises(NotSupported, match="pausing engine 'e1' by keep: it can abort, drain"):
            await site.control.pause(PauseMode.KEEP)
        assert [list(e.calls) for e in site.engines] == [[], []]
        site.assert_running()

    run_virtual(main())


def test_an_engine_that_goes_on_is_named_and_all_are_resumed() -> None:
    async def main() -> None:
        site = Site(3)
        site.engines[1].ignores_pause = True
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(site.post(seed)) for seed in range(3)]
            await asyncio.sleep(0.02)
            with pytest.raises(PauseIgnored, match=r"pausing engine 'e1': it made 10 tokens while paused, in 0\.1 s"):
                await site.control.pause(PauseMode.KEEP)
            site.assert_running()
        assert [ids(t.result()) for t in tasks] == [site.engines[0].answer(site.request(seed)) for seed in range(3)]

    run_virtual(main())


@pytest.mark.parametrize("phase", ["pause", "health"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_engine_that_refuses_leaves_no_other_paused(phase: str, which: int) -> None:
    async def main() -> None:
        site = Site(3)
        site.engines[which].fail_next(phase, EngineError("not now"))  # type: ignore[arg-type]
        with pytest.raises(EngineError, match="not now"):
            await site.control.pause(PauseMode.KEEP)
        site.assert_running()
        await site.control.pause(PauseMode.KEEP)
        assert site.control.paused, "the refusal left nothing behind"

    run_virtual(main())


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.15, 3.0])
def test_a_pause_given_up_half_way_leaves_no_engine_paused(seconds: float) -> None:
    async def main() -> None:
        site = Site()
        site.engines[1].hang_next("pause")
        async with asyncio.TaskGroup() as group:
            request = group.create_task(site.post())
            await asyncio.sleep(0.02)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(seconds):
                    await site.control.pause(PauseMode.KEEP)
            site.assert_running()
        assert len(ids(request.result())) == 20

    run_virtual(main())


@pytest.mark.parametrize("fault", ["dead", "hangs"])
def test_a_dead_or_silent_engine_goes_into_quarantine_and_the_pause_stands(fault: str) -> None:
    async def main() -> None:
        site = Site()
        if fault == "dead":
            site.engines[1].die()
        else:
            site.engines[1].hang_next("pause")
        await site.control.pause(PauseMode.KEEP)
        assert site.control.paused
        assert [type(s.error) for s in site.fleet.states()] == [type(None), EngineUnavailable]
        await site.control.resume()
        assert site.engines[0].paused is None
        assert all(s.held_by == s.paused_by == () for s in site.fleet.states())

    run_virtual(main())


@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_i7_an_engine_that_does_not_resume_goes_into_quarantine_and_the_others_go_on(fault: str) -> None:
    async def main() -> None:
        site = Site()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(site.post(seed)) for seed in range(4)]
            await asyncio.sleep(0.055)
            await site.control.pause(PauseMode.KEEP)
            if fault == "fails":
                site.engines[0].fail_next("resume", EngineError("stuck"))
            else:
                site.engines[0].hang_next("resume")
            await site.control.resume()
        assert [ids(t.result()) for t in tasks] == [site.engines[0].answer(site.request(seed)) for seed in range(4)]
        assert [s.error is not None for s in site.fleet.states()] == [True, False]

    run_virtual(main())


def test_pausing_twice_keeps_the_first_mode_and_one_resume_ends_it() -> None:
    async def main() -> None:
        site = Site()
        await site.control.pause(PauseMode.KEEP)
        await site.control.pause(PauseMode.KEEP)
        await site.control.pause(PauseMode.DRAIN)
        assert [e.paused for e in site.engines] == [PauseMode.KEEP] * 2
        assert [e.calls.count("pause") for e in site.engines] == [1, 1]
        await site.control.resume()
        site.assert_running()

    run_virtual(main())


def test_resuming_when_not_paused_changes_nothing() -> None:
    async def main() -> None:
        site = Site()
        await site.control.resume()
        site.assert_running()

    run_virtual(main())


def test_resuming_sets_going_an_engine_that_somebody_unknown_had_paused() -> None:
    async def main() -> None:
        site = Site()
        await site.engines[0].pause(PauseMode.KEEP)
        await site.control.resume()
        site.assert_running()

    run_virtual(main())


def test_a_resume_during_a_pause_comes_after_it_and_a_pause_during_a_resume_too() -> None:
    async def main() -> None:
        site = Site()
        async with asyncio.TaskGroup() as group:
            request = group.create_task(site.post())
            await asyncio.sleep(0.05)
            group.create_task(site.control.pause(PauseMode.DRAIN))
            await asyncio.sleep(0.05)
            group.create_task(site.control.resume())
            again = group.create_task(site.control.pause(PauseMode.KEEP))
            await again
            assert [e.paused for e in site.engines] == [PauseMode.KEEP] * 2
            assert request.done(), "the drain was not broken off"
            await site.control.resume()
        site.assert_running()

    run_virtual(main())


def test_the_operators_resume_lifts_only_his_hold_and_his_pause() -> None:
    async def main() -> None:
        site = Site(1)
        (engine,) = site.fleet.engines()
        await site.control.pause(PauseMode.KEEP)
        site.fleet.hold("e0", "handover")
        await engine.pause(PauseMode.KEEP)
        await site.control.resume()
        assert site.engines[0].paused is PauseMode.KEEP, "in the middle of a commit"
        assert site.fleet.states()[0].held_by == ("handover",)
        await engine.resume()
        site.fleet.release("e0", "handover")
        site.assert_running()

    run_virtual(main())


def test_an_engine_attached_during_a_pause_takes_requests_only_after_it() -> None:
    async def main() -> None:
        site = Site(1)
        await site.control.pause()
        new = ScriptedEngine("new", script=Script(mean_length=None))
        site.fleet.attach(new)
        async with asyncio.TaskGroup() as group:
            for seed in range(2):
                group.create_task(site.post(seed))
            await asyncio.sleep(1)
            assert len(new.requests) == 0
            await site.control.resume()
        assert len(new.requests) == 1

    run_virtual(main())


def test_an_abort_of_an_agents_request_is_resumed() -> None:
    async def main() -> None:
        site = Site(1)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(site.post(5))
            await asyncio.sleep(0.055)
            assert await site.control.abort("5") == 1
            assert await site.control.abort("unknown") == 0
        assert ids(task.result()) == site.engines[0].answer(site.request(5))
        assert len(site.engines[0].requests) == 2

    run_virtual(main())


STEPS = ["pause", "pause abort", "resume", "commit", "fail pause", "fail resume", "post", "sleep"]


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 1), st.booleans()), max_size=14),
    loop_seed=st.none() | st.integers(0, 99),
)
def test_any_order_of_pauses_resumes_and_commits_ends_with_every_request_answered(
    steps: list[tuple[str, int, bool]], loop_seed: int | None
) -> None:
    """Operations overlap where the third element says so. After a last resume nothing is held, paused or lost."""

    async def commit(site: Site, which: int) -> None:
        fleet, engine = site.fleet, site.fleet.engines()[which]
        version = site.engines[which].served.version + 1
        await engine.stage(WeightManifest(version, "hash", "file", "nowhere", ()))
        fleet.hold(engine.name, "handover")
        try:
            await engine.pause(PauseMode.KEEP)
            await engine.commit(version)
            await engine.resume()
            fleet.served(engine.name, version)
        except EngineError as error:
            fleet.quarantine(engine.name, error)
            with suppress(EngineError):  # one that refuses this too stays in quarantine
                await engine.resume()
                fleet.served(engine.name, site.engines[which].served.version)
        finally:
            fleet.release(engine.name, "handover")

    async def act(site: Site, step: str, which: int) -> None:
        if step.startswith("pause"):
            try:
                await site.control.pause(PauseMode.ABORT if step == "pause abort" else None)
            except EngineError as error:
                assert "as ordered" in str(error)
        elif step == "resume":
            await site.control.resume()
        elif step == "commit":
            await commit(site, which)
        elif step.startswith("fail"):
            site.engines[which].fail_next(step.removeprefix("fail "), EngineError("as ordered"))  # type: ignore[arg-type]
        else:
            await asyncio.sleep(0.03)

    async def main() -> None:
        site = Site()
        tasks: list[asyncio.Task[list[Chunk]]] = []
        async with asyncio.TaskGroup() as group:
            for step, which, overlaps in [*steps, ("post", 0, True)]:
                if step == "post":
                    tasks.append(group.create_task(site.post(len(tasks))))
                elif overlaps and step != "commit":
                    group.create_task(act(site, step, which))
                else:
                    await act(site, step, which)
            await asyncio.sleep(20)
            for engine in site.engines:
                engine._failures.clear()
                site.fleet.served(engine.name, engine.served.version)
            await site.control.resume()
        site.assert_running()
        assert [ids(t.result()) for t in tasks] == [site.engines[0].answer(site.request(seed)) for seed in range(len(tasks))]

    run_virtual(main(), seed=loop_seed)
