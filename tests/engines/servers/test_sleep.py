"""Servers that sleep: in which order their memory is given away and taken again, and what they refuse meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.responses import Response
from tests.engines.models import ask
from tests.engines.reading import ABORTED, collect, ids, rest, until_tokens
from tests.engines.servers.fakes import Fake, FakeSglang, FakeVllm, attached
from tests.models.tiny import tiny_model

from midflight.errors import EngineError
from midflight.types import MemoryPart, PauseMode

ORDER = {
    FakeVllm: [
        "/sleep {'level': '1', 'mode': 'abort'}",
        "/wake {'tags': 'weights'}",
        "/wake {'tags': 'kv_cache'}",
    ],
    FakeSglang: [
        "/release {'tags': ['kv_cache', 'weights']}",
        "/resume {'tags': ['weights']}",
        "/resume {'tags': ['kv_cache']}",
    ],
}
KINDS = pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])


@KINDS
def test_i5_i7_a_server_sleeps_takes_a_version_when_its_weights_are_awake_and_answers_when_all_is(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, receiver):
            stream = engine.generate(ask("before", max_tokens=50))
            first = await until_tokens(stream, 2)
            await engine.pause(PauseMode.ABORT)
            assert (first + await rest(stream))[-1].finish == ABORTED
            await engine.sleep()
            await engine.sleep()
            manifest = receiver.publish(3, tiny_model(seed=3))
            await engine.stage(manifest)  # in files
            with pytest.raises(EngineError, match="it sleeps without its weights; wake it first"):
                await engine.commit(3)
            with pytest.raises(EngineError, match="it sleeps without its keys and weights; wake it first"):
                await engine.resume()
            await engine.wake(MemoryPart.WEIGHTS)
            assert (await engine.commit(3)).version == 3
            with pytest.raises(EngineError, match="it sleeps without its keys; wake it first"):
                await engine.resume()
            await engine.wake(MemoryPart.KEYS)
            await engine.wake(MemoryPart.KEYS)
            assert fake.slept == ORDER[kind]
            assert not fake._going.is_set(), "the pause goes on, though vLLM ends it when all is awake"
            await engine.resume()
            answer = await collect(engine, ask("after", request_id="after"))
            assert len(ids(answer)) == 8
            assert {chunk.version for chunk in answer} == {3}

    asyncio.run(main())


@KINDS
def test_a_server_that_wakes_without_a_version_serves_the_one_before(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        async with attached(kind(), tmp_path) as (engine, _):
            await engine.pause(PauseMode.ABORT)
            await engine.sleep()
            await engine.wake(MemoryPart.WEIGHTS)
            await engine.wake(MemoryPart.KEYS)
            await engine.resume()
            assert len(ids(await collect(engine, ask()))) == 8

    asyncio.run(main())


@KINDS
def test_a_server_that_is_half_awake_is_woken_before_it_sleeps_again(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, _):
            await engine.pause(PauseMode.ABORT)
            await engine.sleep()
            await engine.wake(MemoryPart.WEIGHTS)
            await engine.sleep()
            sleep, weights, keys = ORDER[kind]
            assert fake.slept == [sleep, weights, keys, sleep]

    asyncio.run(main())


@KINDS
def test_a_server_that_failed_to_sleep_is_told_again_and_counts_as_awake_until_it_has_said_yes(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, _):
            await engine.pause(PauseMode.ABORT)
            route = "/sleep" if kind is FakeVllm else "/release_memory_occupation"
            fake.instead[route] = Response("out of host memory", status_code=500)
            for _ in range(2):
                with pytest.raises(EngineError, match="out of host memory"):
                    await engine.sleep()
            with pytest.raises(EngineError, match="wake it first"):
                await engine.resume()
            del fake.instead[route]
            await engine.sleep()
            assert fake.slept == ORDER[kind][:1]

    asyncio.run(main())


@KINDS
def test_a_server_that_generates_is_not_put_to_sleep(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, _):
            with pytest.raises(EngineError, match="it generates; pause it first"):
                await engine.sleep()
            assert not fake.slept

    asyncio.run(main())
