"""An engine that gives its device's memory away for a time: in process and over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.engines.models import MemoryReceiver, ask, make_engine
from tests.engines.reading import ABORTED, collect, ids, rest, until_tokens
from tests.engines.test_contract import attached, listening, running
from tests.models.tiny import tiny_adapted, tiny_model

from midflight.engines.app import build_app
from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.embedded.weights import model_fingerprint
from midflight.engines.relay import relay_steps
from midflight.engines.remote import RemoteEngine
from midflight.errors import EngineError
from midflight.types import MemoryPart, PauseMode

KEYS, WEIGHTS = MemoryPart.KEYS, MemoryPart.WEIGHTS


@asynccontextmanager
async def asleep(engine: EmbeddedEngine) -> AsyncIterator[EmbeddedEngine]:
    async with running(engine):
        await engine.pause(PauseMode.ABORT)
        await engine.sleep()
        yield engine


@asynccontextmanager
async def over_the_wire(engine: EmbeddedEngine, *, sleeps: bool = True) -> AsyncIterator[RemoteEngine]:
    app = build_app(engine, relay_steps, token="secret", sleeper=engine if sleeps else None)
    async with running(engine), listening(app) as url, attached(url) as remote:
        yield remote


def test_i5_what_was_in_flight_is_given_back_and_the_answers_after_it_are_the_same() -> None:
    async def main() -> None:
        async with over_the_wire(make_engine()) as engine:
            whole = ids(await collect(engine, ask("before", max_tokens=30)))
            stream = engine.generate(ask("before", request_id="b", max_tokens=30))
            first = await until_tokens(stream, 3)
            await engine.pause(PauseMode.ABORT)
            cut = first + await rest(stream)
            assert cut[-1].finish == ABORTED
            await engine.sleep()
            await engine.sleep()
            assert (await engine.health()).paused
            for part in (WEIGHTS, WEIGHTS, KEYS, KEYS):
                await engine.wake(part)
            await engine.resume()
            assert ids(await collect(engine, ask("before", request_id="c", max_tokens=30))) == whole
            assert whole[: len(ids(cut))] == ids(cut)

    asyncio.run(main())


def test_nothing_is_kept_of_earlier_requests() -> None:
    async def main() -> None:
        async with running(make_engine()) as engine:
            await collect(engine, ask("a prompt that is kept", max_tokens=4))
            assert engine._scheduler._prefixes.num_bytes > 0
            await engine.pause(PauseMode.ABORT)
            await engine.sleep()
            assert engine._scheduler._prefixes.num_bytes == 0
            assert not engine._scheduler._runner._cache._blocks
            for part in (WEIGHTS, KEYS):
                await engine.wake(part)
            await engine.resume()
            reused = (await engine.health()).num_reused
            await collect(engine, ask("a prompt that is kept", request_id="again", max_tokens=4))
            assert (await engine.health()).num_reused == reused

    asyncio.run(main())


def test_a_request_that_comes_while_it_falls_asleep_is_given_back_too() -> None:
    async def main() -> None:
        async with running(make_engine()) as engine, asyncio.TaskGroup() as tasks:
            await engine.pause(PauseMode.ABORT)
            late = tasks.create_task(collect(engine, ask("late")))
            await asyncio.sleep(0.05)
            await engine.sleep()
            assert (await late)[-1].finish == ABORTED

    asyncio.run(main())


@pytest.mark.parametrize("make", [tiny_model, tiny_adapted])
def test_i7_a_version_goes_live_between_the_weights_and_the_keys_and_none_while_there_are_no_weights(make) -> None:  # type: ignore[no-untyped-def]
    async def main() -> None:
        source = MemoryReceiver()
        async with asleep(make_engine(make(seed=1), receiver=source)) as engine:
            manifest = source.publish(2, make(seed=2))
            for refused in (engine.stage(manifest), engine.commit(2)):
                with pytest.raises(EngineError, match="it sleeps without its weights; wake it first"):
                    await refused
            with pytest.raises(EngineError, match="it sleeps without its keys and weights; wake it first"):
                await engine.resume()
            await engine.wake(WEIGHTS)
            await engine.stage(manifest)
            assert (await engine.commit(2)).fingerprint == model_fingerprint(make(seed=2))
            with pytest.raises(EngineError, match="it sleeps without its keys; wake it first"):
                await engine.resume()
            await engine.wake(KEYS)
            await engine.resume()
            assert len(ids(await collect(engine, ask()))) == 8

    asyncio.run(main())


def test_an_engine_that_sleeps_is_not_woken_by_the_end_of_its_lease() -> None:
    """The trainer may still have the device, though whoever paused it is gone."""

    async def main() -> None:
        async with asleep(make_engine(pause_lease_seconds=0.05)) as engine:
            await asyncio.sleep(0.2)
            assert (await engine.health()).paused

    asyncio.run(main())


def test_an_engine_that_generates_does_not_fall_asleep() -> None:
    async def main() -> None:
        async with running(make_engine()) as engine:
            with pytest.raises(EngineError, match="it generates; pause it first"):
                await engine.sleep()

    asyncio.run(main())


def test_an_engine_that_takes_no_turns_says_by_which_option_it_would() -> None:
    async def main() -> None:
        async with over_the_wire(make_engine(), sleeps=False) as engine:
            await engine.pause(PauseMode.ABORT)
            with pytest.raises(EngineError, match=r'Start it with engine\.share = "time"'):
                await engine.sleep()

    asyncio.run(main())
