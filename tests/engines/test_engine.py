"""The shell: leases, crashes, observation."""

import asyncio
import logging

import pytest
from tests.engines.models import StepLog, ask, make_engine
from tests.engines.reading import collect, ids, until_tokens
from tests.engines.test_contract import attached, running, served

from midflight.errors import EngineUnavailable
from midflight.types import PauseMode


def test_a_pause_without_renewal_ends_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(make_engine(pause_lease_seconds=0.2)) as engine, asyncio.TaskGroup() as tasks:
            await engine.pause(PauseMode.KEEP)
            waiting = tasks.create_task(collect(engine, ask()))
            for _ in range(3):
                await asyncio.sleep(0.12)
                await engine.pause(PauseMode.KEEP)
            assert not waiting.done()
            with caplog.at_level(logging.WARNING):
                assert len(ids(await waiting)) == 8
            assert "paused for 0.2 s without renewal" in caplog.text
            assert not (await engine.health()).paused

    asyncio.run(main())


def test_a_resumed_engine_keeps_no_lease() -> None:
    async def main() -> None:
        async with running(make_engine(pause_lease_seconds=0.05)) as engine:
            await engine.pause(PauseMode.KEEP)
            await engine.resume()
            assert engine._lease is None

    asyncio.run(main())


def test_i9_a_crash_of_the_loop_reaches_every_waiter_and_ends_run() -> None:
    """I9: with its cause, also for requests that come later, in process and over the wire."""

    async def main() -> None:
        engine = make_engine()

        def explode(batch: object) -> None:
            raise FloatingPointError("the model went up in smoke")

        with pytest.raises(BaseExceptionGroup) as caught:
            async with served(engine) as url, attached(url) as remote, asyncio.TaskGroup() as tasks:
                local = engine.generate(ask(max_tokens=50))
                await until_tokens(local, 1)
                waiting = tasks.create_task(collect(remote, ask(max_tokens=50)))
                engine._scheduler._runner.forward = explode  # type: ignore[assignment, method-assign]
                with pytest.raises(EngineUnavailable, match="smoke"):
                    await until_tokens(local, 50)
                await waiting
        leaves = flattened(caught.value)
        assert leaves and all(isinstance(e, EngineUnavailable) for e in leaves)
        with pytest.raises(EngineUnavailable, match="smoke"):
            await collect(engine, ask())
        with pytest.raises(EngineUnavailable, match="smoke"):
            await engine.health()

    asyncio.run(main())


def flattened(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    return [leaf for e in group.exceptions for leaf in (flattened(e) if isinstance(e, BaseExceptionGroup) else [e])]


def test_stopping_the_engine_ends_its_requests() -> None:
    async def main() -> None:
        engine = make_engine()
        async with running(engine):
            chunks = engine.generate(ask(max_tokens=50))
            await until_tokens(chunks, 1)
        with pytest.raises(EngineUnavailable, match="stopped"):
            await until_tokens(chunks, 50)
        with pytest.raises(EngineUnavailable, match="stopped"):
            await engine.pause(PauseMode.KEEP)

    asyncio.run(main())


def test_each_step_is_observed_once_with_its_tokens_and_times() -> None:
    async def main() -> None:
        log, far = StepLog(), StepLog()
        engine = make_engine(record=log.apply)
        async with served(engine) as url, attached(url, far.apply) as remote:
            await collect(remote, ask(max_tokens=5))
            assert [tokens for _, _, tokens, _ in log.steps] == [1] * 5
            for here, there in zip(log.steps, far.steps, strict=True):  # what took how long; when it was is by the hearer's clock
                assert there[2:] == here[2:] and there[1] - there[0] == pytest.approx(here[1] - here[0])
                assert here[0] <= there[0] < here[0] + 5
            assert all(a[0] <= a[1] <= b[0] for a, b in zip(log.steps, log.steps[1:], strict=False))

    asyncio.run(main())


def test_an_idle_engine_makes_no_step() -> None:
    async def main() -> None:
        log = StepLog()
        async with running(make_engine(record=log.apply)) as engine:
            await collect(engine, ask(max_tokens=2))
            steps = []
            engine._scheduler.step = lambda: steps.append(1)  # type: ignore[assignment, method-assign, return-value]
            await asyncio.sleep(0.05)
            assert steps == [] and len(log.steps) == 2

    asyncio.run(main())
