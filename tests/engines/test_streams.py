"""Tokens of a step as chunks of single requests, for callers in a hurry and others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace

import numpy as np
import pytest

from midflight.engines.streams import PATIENCE_SECONDS, ChunkStream, ChunkStreams, StepOutput
from midflight.errors import EngineUnavailable
from midflight.testing.virtual_time import run_virtual
from midflight.types import Chunk, Finish, FinishReason

LENGTH = Finish(FinishReason.LENGTH)


def step(token: int, *, version: int = 0, kv: int = 0, finish: Finish | None = None) -> StepOutput:
    return StepOutput(
        version=version,
        handles=np.array([1]),
        token_ids=np.array([token]),
        logprobs=np.array([-0.5]),
        kv_versions=np.array([kv]),
        finishes=((1, 0, finish),) if finish else (),
    )


def opened(*, eager: bool) -> tuple[ChunkStreams, ChunkStream]:
    streams = ChunkStreams()
    stream = ChunkStream(eager=eager)
    streams.open(1, stream)
    return streams, stream


async def arrivals(stream: ChunkStream) -> list[tuple[float, tuple[int, ...], int]]:
    """(time, tokens, version) of every chunk up to the last."""
    loop, found = asyncio.get_running_loop(), []
    while True:
        chunk = await anext(stream)
        found.append((round(loop.time(), 3), chunk.token_ids, chunk.version))
        if chunk.finish is not None:
            return found


async def fed(streams: ChunkStreams, tokens: int, *, seconds: float, new_version_at: int = 1000) -> None:
    for token in range(tokens):
        await asyncio.sleep(seconds)
        streams.put(step(token, version=int(token >= new_version_at), finish=LENGTH if token == tokens - 1 else None))


def told(*, eager: bool, tokens: int, seconds: float, new_version_at: int = 1000) -> list[tuple[float, tuple[int, ...], int]]:
    async def main() -> list[tuple[float, tuple[int, ...], int]]:
        streams, stream = opened(eager=eager)
        feeding = asyncio.create_task(fed(streams, tokens, seconds=seconds, new_version_at=new_version_at))
        found = await arrivals(stream)
        await feeding
        return found

    return run_virtual(main())


def test_an_eager_caller_gets_every_token_as_it_comes() -> None:
    assert told(eager=True, tokens=3, seconds=0.01) == [(0.01, (0,), 0), (0.02, (1,), 0), (0.03, (2,), 0)]


def test_another_gets_the_first_token_at_once_and_the_rest_when_they_have_gathered() -> None:
    assert PATIENCE_SECONDS == 0.05
    found = told(eager=False, tokens=12, seconds=0.02)
    assert found == [(0.02, (0,), 0), (0.09, (1, 2, 3), 0), (0.15, (4, 5, 6), 0), (0.21, (7, 8, 9), 0), (0.24, (10, 11), 0)]


def test_a_chunk_never_holds_tokens_of_two_versions() -> None:
    assert told(eager=False, tokens=5, seconds=0.001, new_version_at=3) == [
        (0.001, (0,), 0),
        (0.005, (1, 2), 0),
        (0.005, (3, 4), 1),
    ]


def test_older_keys_are_those_before_the_first_token_of_a_chunk() -> None:
    async def main() -> None:
        streams, stream = opened(eager=False)
        first, last = step(7, version=2, kv=1), step(8, version=2, kv=1, finish=LENGTH)
        streams.put(replace(first, key_runs=((1, ((1, 4), (2, 3))), (9, ((1, 1),)))))
        streams.put(last)
        assert await anext(stream) == Chunk((7, 8), (-0.5,) * 2, 2, 1, LENGTH, key_runs=((1, 4), (2, 3)))

    run_virtual(main())


def test_tokens_received_before_a_death_are_given_before_its_error() -> None:
    async def main() -> None:
        streams, stream = opened(eager=False)
        for token in range(3):
            streams.put(step(token))
        streams.fail(EngineUnavailable("gone"))
        assert await anext(stream) == Chunk((0, 1, 2), (-0.5,) * 3, 0, 0)
        for _ in range(2):
            with pytest.raises(EngineUnavailable):
                await anext(stream)

    run_virtual(main())


def test_an_answer_that_ends_without_a_token_has_a_last_chunk() -> None:
    async def main() -> None:
        streams, stream = opened(eager=False)
        streams.put(StepOutput(version=4, finishes=((1, 0, LENGTH),)))
        assert await anext(stream) == Chunk((), (), 4, 4, LENGTH)

    run_virtual(main())


def test_chunks_are_brought_as_they_come_and_those_of_one_message_as_one() -> None:
    async def main() -> None:
        streams, stream = opened(eager=True)
        found: list[tuple[int, ...]] = []

        def take(chunk: Chunk) -> bool:
            found.append(chunk.token_ids)
            return False

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(stream.each(take))
            await asyncio.sleep(0.01)
            streams.put(step(1))
            await asyncio.sleep(0.01)
            assert found == [(1,)] and not reading.done()
            streams.put(step(2))
            streams.put(step(3, finish=LENGTH))
        assert found == [(1,), (2, 3)]

    run_virtual(main())


@pytest.mark.parametrize("who", ["reader", "engine", "reader's error"])
def test_what_ends_the_bringing_tells_the_engine_once_and_leaves_nothing_behind(who: str) -> None:
    async def main() -> None:
        closed: list[int] = []
        stream = ChunkStream(eager=False, on_close=lambda: closed.append(1))

        def take(chunk: Chunk) -> bool:
            if who == "reader's error":
                raise ValueError(chunk.token_ids)
            return who == "reader"

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(outcome(stream.each(take)))
            await asyncio.sleep(0.01)
            stream.add(5, -0.5, version=0, kv_version=0)
            await asyncio.sleep(0 if who == "reader" else 0.01)
            if who == "reader":
                stream.fail(EngineUnavailable("too late to matter"))
            if who == "engine":
                stream.add(6, -0.5, version=0, kv_version=0)
                stream.fail(EngineUnavailable("gone"))
            await reading
            stream.add(7, -0.5, version=0, kv_version=0)  # for nobody
            await asyncio.sleep(1)
        expected = {"reader": "None", "engine": "EngineUnavailable('gone')", "reader's error": "ValueError((5,))"}
        assert (repr(reading.result()), closed) == (expected[who], [1])

    run_virtual(main())


async def outcome(work: Coroutine[object, object, None]) -> Exception | None:
    try:
        return await work
    except Exception as error:
        return error
