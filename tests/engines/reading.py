"""Asking an engine and reading what it streams, shared by the engines' tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from midflight.errors import RequestRejected
from midflight.ports import Engine
from midflight.types import Chunk, Feature, Finish, FinishReason, GenerateRequest, Version

ABORTED = Finish(FinishReason.ABORT)
LENGTH = Finish(FinishReason.LENGTH)


def needs(engine: Engine, feature: Feature) -> None:
    if feature not in engine.capabilities.features:
        pytest.skip(f"the engine has no {feature}")


async def collect(engine: Engine, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


async def until_tokens(chunks: AsyncGenerator[Chunk], num: int) -> list[Chunk]:
    taken: list[Chunk] = []
    while sum(len(c.token_ids) for c in taken) < num:
        taken.append(await anext(chunks))
    return taken


async def rest(chunks: AsyncGenerator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


def ids(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(t for c in chunks for t in c.token_ids)


def logprobs(chunks: list[Chunk]) -> list[float]:
    return [p for c in chunks for p in c.logprobs]


def live_labels(chunks: list[Chunk]) -> list[tuple[Version, Version]]:
    """(version, kv_version) of each token, as it was told when the token came."""
    return [(c.version, c.kv_version) for c in chunks for _ in c.token_ids]


def labels(chunks: list[Chunk]) -> list[tuple[Version, Version]]:
    """(version, kv_version) of each token, as the last chunk has it where it says so."""
    attested = [(s.version, s.kv_version) for s in chunks[-1].attested for _ in range(s.start, s.end)]
    return attested or live_labels(chunks)


def resumed(request: GenerateRequest, tokens: tuple[int, ...]) -> GenerateRequest:
    return replace(request, input_ids=(*request.input_ids[: request.num_prompt_tokens], *tokens))


async def rejection(engine: Engine, request: GenerateRequest) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        await collect(engine, request)
    return caught.value
