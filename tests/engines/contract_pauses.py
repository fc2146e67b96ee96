"""The contract of aborts and pauses: what ends, what waits, and what goes on."""

from __future__ import annotations

import asyncio

import pytest
from tests.engines.asking import Contract, long
from tests.engines.models import ask
from tests.engines.reading import ABORTED, LENGTH, collect, ids, rest, until_tokens
from tests.engines.sites import Site

from midflight.ports import Engine
from midflight.types import PauseMode

FREEZING = [PauseMode.KEEP, PauseMode.RECOMPUTE]
GREEDY = {"temperature": 0.0}


async def num_held(engine: Engine) -> int:
    """Tokens made, once those have come that were on their way: from servers they come through several processes."""
    for _ in range(20):
        before = (await engine.health()).num_tokens
        await asyncio.sleep(0.05)
        if (await engine.health()).num_tokens == before:
            return before
    raise AssertionError("it goes on making tokens")


class PauseContract(Contract):
    def test_abort_ends_one_request_and_leaves_the_other(self) -> None:
        async def test(site: Site) -> None:
            engine, most = site.engine, long(site.engine)["max_tokens"]
            async with asyncio.TaskGroup() as tasks:
                other = tasks.create_task(collect(engine, ask(request_id="p10", seed=2, max_tokens=most)))
                chunks = engine.generate(ask(request_id="p1", max_tokens=most))
                got = await until_tokens(chunks, 3)
                await engine.abort("p1")
                await engine.abort("unknown")
                got += [c async for c in chunks]
                assert got[-1].finish == ABORTED and 3 <= len(ids(got)) < most
                assert len(ids(await other)) == most

        self.on(test)

    def test_abort_of_all_ends_running_and_waiting_with_what_they_have(self) -> None:
        async def test(site: Site) -> None:
            engine, much = site.engine, long(site.engine)
            before = (await engine.health()).num_tokens
            async with asyncio.TaskGroup() as tasks:
                num = min(engine.capabilities.max_running, 16) + 3
                running = [tasks.create_task(collect(engine, ask(request_id=f"{i}", seed=i, **much))) for i in range(num)]
                while (now := await engine.health()).num_running + now.num_waiting < num or now.num_tokens == before:
                    await asyncio.sleep(0.002)
                await engine.abort(None)
                assert [(await r)[-1].finish for r in running] == [ABORTED] * num
            assert len(ids(await collect(engine, ask()))) == 8

        self.on(test)

    def test_a_waiting_request_can_be_aborted(self) -> None:
        async def test(site: Site) -> None:
            engine, much = site.engine, long(site.engine)
            num = engine.capabilities.max_running
            if num > 16:
                pytest.skip("the engine runs more than this test asks for")
            async with asyncio.TaskGroup() as tasks:
                streams = [engine.generate(ask(request_id=f"{i}", seed=i, **much)) for i in range(num)]
                await asyncio.gather(*(until_tokens(stream, 1) for stream in streams))
                running = [tasks.create_task(rest(stream)) for stream in streams]
                waiting = tasks.create_task(collect(engine, ask(request_id="waiting", **much)))
                while not (await engine.health()).num_waiting:
                    await asyncio.sleep(0.002)
                await engine.abort("waiting")
                got = await waiting
                assert (ids(got), got[-1].finish) == ((), ABORTED)
                assert [(await r)[-1].finish for r in running] == [LENGTH] * num

        self.on(test)

    def test_closing_the_iterator_aborts(self) -> None:
        async def test(site: Site) -> None:
            before = (await site.engine.health()).num_tokens
            much = long(site.engine)
            chunks = site.engine.generate(ask(**much))
            await until_tokens(chunks, 2)
            await chunks.aclose()
            await site.engine.pause(PauseMode.DRAIN)
            assert (await site.engine.health()).num_tokens - before < much["max_tokens"]

        self.on(test)

    @pytest.mark.parametrize("mode", FREEZING)
    def test_a_freezing_pause_gives_no_token_and_resume_continues_as_if_nothing_was(self, mode: PauseMode) -> None:
        async def test(site: Site) -> None:
            engine, request = site.engine, ask(**GREEDY, **long(site.engine))
            chunks = engine.generate(request)
            got = await until_tokens(chunks, 3)
            await engine.pause(mode)
            await engine.pause(mode)
            held = await num_held(engine)
            late = asyncio.ensure_future(collect(engine, ask("late", request_id="late")))
            await asyncio.sleep(0.1)
            health = await engine.health()
            assert health.paused and health.num_tokens == held and not late.done()
            await engine.resume()
            await engine.resume()
            got += [c async for c in chunks]
            assert len(ids(got)) == request.sampling.max_tokens and all(site.chosen(0, request, ids(got)))
            assert len(ids(await late)) == 8

        self.on(test)

    def test_resume_without_a_pause_does_nothing(self) -> None:
        async def test(site: Site) -> None:
            chunks = site.engine.generate(ask(**long(site.engine)))
            got = await until_tokens(chunks, 1)
            await site.engine.resume()
            assert not (await site.engine.health()).paused
            got += [c async for c in chunks]
            assert got[-1].finish == LENGTH

        self.on(test)

    @pytest.mark.parametrize("second", FREEZING)
    @pytest.mark.parametrize("first", FREEZING)
    def test_a_pause_during_another_holds_too_and_one_resume_ends_both(self, first: PauseMode, second: PauseMode) -> None:
        async def test(site: Site) -> None:
            engine, request = site.engine, ask(**GREEDY, **long(site.engine))
            chunks = engine.generate(request)
            got = await until_tokens(chunks, 2)
            await asyncio.gather(engine.pause(first), engine.pause(second))
            held = await num_held(engine)
            await asyncio.sleep(0.05)
            assert (await engine.health()).num_tokens == held
            await engine.resume()
            got += [c async for c in chunks]
            assert len(ids(got)) == request.sampling.max_tokens and all(site.chosen(0, request, ids(got)))

        self.on(test)

    def test_an_aborting_pause_ends_running_and_waiting_and_holds_new_ones(self) -> None:
        async def test(site: Site) -> None:
            engine, much = site.engine, long(site.engine)
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(collect(engine, ask(request_id=f"{i}", seed=i, **much))) for i in range(12)]
                chunks = engine.generate(ask(request_id="watched", **much))
                await until_tokens(chunks, 1)
                await engine.pause(PauseMode.ABORT)
                finished = [await r for r in running]
                assert any(f[-1].finish == ABORTED for f in finished)
                assert all(f[-1].finish is not None for f in finished)
                late = tasks.create_task(collect(engine, ask("late", request_id="late")))
                await engine.pause(PauseMode.ABORT)
                await asyncio.sleep(0.02)
                assert not late.done()
                await engine.resume()
                assert (await late)[-1].finish == LENGTH

        self.on(test)

    def test_drain_lets_all_finish_and_holds_new_ones(self) -> None:
        async def test(site: Site) -> None:
            engine, most = site.engine, long(site.engine)["max_tokens"]
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(collect(engine, ask(request_id=f"{i}", seed=i, max_tokens=20))) for i in range(12)]
                chunks = engine.generate(ask(request_id="watched", max_tokens=most))
                got = await until_tokens(chunks, 1)
                watched = tasks.create_task(rest(chunks))
                await engine.pause(PauseMode.DRAIN)
                late = tasks.create_task(collect(engine, ask("late", request_id="late")))
                got += await watched
                assert len(ids(got)) == most and [len(ids(await r)) for r in running] == [20] * 12
                await asyncio.sleep(0.02)
                assert not late.done() and (await engine.health()).num_running == 0
                await engine.resume()
                await late

        self.on(test)

    @pytest.mark.parametrize("mode", FREEZING)
    def test_an_aborting_pause_ends_the_frozen(self, mode: PauseMode) -> None:
        async def test(site: Site) -> None:
            chunks = site.engine.generate(ask(**long(site.engine)))
            got = await until_tokens(chunks, 2)
            await site.engine.pause(mode)
            await site.engine.pause(PauseMode.ABORT)
            got += [c async for c in chunks]
            assert got[-1].finish == ABORTED
            assert (await site.engine.health()).num_running == 0
            await site.engine.resume()
            assert len(ids(await collect(site.engine, ask()))) == 8

        self.on(test)

    @pytest.mark.parametrize("mode", FREEZING)
    def test_one_of_the_frozen_can_be_aborted_and_the_other_goes_on(self, mode: PauseMode) -> None:
        async def test(site: Site) -> None:
            engine, much = site.engine, long(site.engine)
            async with asyncio.TaskGroup() as tasks:
                other = tasks.create_task(collect(engine, ask(request_id="p10", **GREEDY, **much)))
                chunks = engine.generate(ask(request_id="p1", **much))
                got = await until_tokens(chunks, 2)
                await engine.pause(mode)
                await engine.abort("p1")
                if engine.capabilities.aborts_single_requests:
                    got += [c async for c in chunks]
                    assert got[-1].finish == ABORTED
                await engine.resume()
                finished = await other
                assert finished[-1].finish == LENGTH and all(site.chosen(0, ask(**GREEDY), ids(finished)))

        self.on(test)
