"""Mixtures in the embedded engine: exact, and with a record of the experts that each token was sent to."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tests.engines.models import MemoryReceiver, ask, make_engine
from tests.engines.test_runner import REQUESTS, reference_logprobs
from tests.models.mixtures import tiny_mixture
from transformers import PreTrainedModel

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.streams import StepOutput
from midflight.engines.wire import decode_engine_frame, encode, pack_step
from midflight.models.routing import routers_of
from midflight.types import Chunk, GenerateRequest, PauseMode


def chosen_by(model: PreTrainedModel, ids: tuple[int, ...]) -> np.ndarray:
    """[T, 4], by one plain forward of `transformers`."""
    routers = routers_of(model)
    assert routers is not None
    with torch.no_grad(), routers.recording() as chosen:
        model(torch.tensor([ids]), use_cache=False)
    return routers.packed(chosen)


async def answer(engine: EmbeddedEngine, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


def recording(model: PreTrainedModel, **options: object) -> EmbeddedEngine:
    return make_engine(model, records_experts=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_logprobs_of_a_mixture_agree_with_a_plain_forward(kind: str) -> None:
    generations = make_engine(tiny_mixture(kind), max_batch_tokens=8, max_running=5).generate_all(REQUESTS)
    for request, generation in zip(REQUESTS, generations, strict=True):
        difference = reference_logprobs(tiny_mixture(kind), request, generation) - torch.tensor(generation.logprobs, dtype=torch.float64)
        assert difference.abs().max() < 1e-5


@pytest.mark.parametrize("max_batch_tokens", [8, 64])
def test_each_request_ends_with_the_experts_of_every_token_but_the_last(max_batch_tokens: int) -> None:
    """Prompts in pieces, prompts copied from another slot, and tokens one by one: the record is that of one forward over all of it."""

    async def main() -> None:
        engine = recording(tiny_mixture("qwen3_moe"), max_batch_tokens=max_batch_tokens)
        running = asyncio.create_task(engine.run())
        answers = await asyncio.gather(*(answer(engine, request) for request in REQUESTS))
        running.cancel()
        for request, chunks in zip(REQUESTS, answers, strict=True):
            ids = (*request.input_ids, *(token for chunk in chunks for token in chunk.token_ids))
            record = np.frombuffer(chunks[-1].experts, np.uint8).reshape(len(ids), 4)
            np.testing.assert_array_equal(record[:-1], chosen_by(tiny_mixture("qwen3_moe"), ids)[:-1])
            assert (record[-1] == 255).all() and not any(chunk.experts for chunk in chunks[:-1])

    asyncio.run(main())


def test_tokens_sampled_before_a_change_of_weights_keep_the_experts_that_they_were_sampled_with() -> None:
    async def main() -> None:
        receiver = MemoryReceiver()
        engine = recording(tiny_mixture("qwen3_moe"), receiver=receiver)
        running = asyncio.create_task(engine.run())
        chunks: list[Chunk] = []
        request = ask("abc", max_tokens=20)
        async for chunk in engine.generate(request):
            chunks.append(chunk)
            if sum(len(c.token_ids) for c in chunks) >= 5 and engine.reading().version == 0:
                await engine.pause(PauseMode.RECOMPUTE)
                await engine.stage(receiver.publish(1, tiny_mixture("qwen3_moe", seed=1)))
                await engine.commit(1)
                await engine.resume()
        running.cancel()
        ids = (*request.input_ids, *(token for chunk in chunks for token in chunk.token_ids))
        num_old = len(request.input_ids) + sum(len(c.token_ids) for c in chunks if c.version == 0)
        record = np.frombuffer(chunks[-1].experts, np.uint8).reshape(len(ids), 4)
        old, new = (chosen_by(tiny_mixture("qwen3_moe", seed=seed), ids) for seed in (0, 1))
        assert 5 + 3 <= num_old < len(ids) - 2 and (old[: num_old - 1] != new[: num_old - 1]).any()
        np.testing.assert_array_equal(record[: num_old - 1], old[: num_old - 1])
        np.testing.assert_array_equal(record[num_old - 1 : -1], new[num_old - 1 : -1])

    asyncio.run(main())


def test_an_engine_that_is_not_asked_for_it_and_a_model_without_experts_record_nothing() -> None:
    async def main() -> None:
        for engine in (make_engine(tiny_mixture("qwen3_moe")), make_engine(records_experts=True)):
            running = asyncio.create_task(engine.run())
            assert all(not chunk.experts for chunk in await answer(engine, ask("abc")))
            running.cancel()

    asyncio.run(main())


def test_a_record_goes_over_the_wire_with_the_end_of_its_request() -> None:
    step = StepOutput(version=3, experts=((7, b"\1\2"),))
    frame = decode_engine_frame(encode(pack_step(step, {7: 70})))
    assert frame.experts == ((70, b"\1\2"),)
