"""Trials whether the same work gives the same numbers again, alone and beside other work."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from midflight.engines.embedded.engine import EmbeddedEngine, Generated
from midflight.run.device_check.bench import (
    SMALL,
    Bench,
    Found,
    Wrong,
    most,
    requests,
    tried,
)
from midflight.run.device_check.kernels import same_step, stepped
from midflight.run.device_check.report import DeviceTrial
from midflight.trainer.model.determinism import compute_in_one_order
from midflight.types import GenerateRequest

_SERVERS_HAVE_IT = 'set engine.kind to "vllm" or "sglang", with engine.deterministic = true'


def sameness(bench: Bench) -> Iterator[DeviceTrial]:
    """Yields the trials of determinism without options."""
    for dtype in ("float32", "bfloat16"):
        yield tried(
            f"the same requests twice in {dtype}: tokens and log-probabilities to the bit",
            lambda dtype=dtype: _twice(bench, dtype),
            remedy=_SERVERS_HAVE_IT,
        )
        yield tried(
            f"a request alone and beside 7 others in {dtype}: its tokens",
            lambda dtype=dtype: _alone_and_beside(bench, dtype),
            remedy=_SERVERS_HAVE_IT,
        )
    yield tried(
        "the same step twice",
        lambda: same_step(bench),
        remedy='set trainer.device = "cpu"',
    )


def one_order(bench: Bench) -> Iterator[DeviceTrial]:
    """Yields the trial of `trainer.deterministic`. It wants a process of its own, because this must
    be asked for before the first product of matrices, and holds for the rest of the process.
    """
    compute_in_one_order()
    yield tried(
        "the same step twice with trainer.deterministic: weights to the bit",
        lambda: _same_bits(bench),
        remedy="remove trainer.deterministic, and compare runs by curves",
    )


def _answers(engine: EmbeddedEngine, asked: list[GenerateRequest]) -> list[Generated]:
    return engine.generate_all(asked)


def _twice(bench: Bench, dtype: str) -> str:
    asked = requests(SMALL, 8)
    model = bench.model(SMALL, dtype=dtype)
    first = _answers(bench.engine(model, SMALL), asked)
    second = _answers(bench.engine(model, SMALL), asked)
    for one, other in zip(first, second, strict=True):
        if one.token_ids != other.token_ids or one.logprobs != other.logprobs:
            raise Wrong("an answer differs from the one before")
    return f"{len(asked)} answers are equal"


def _alone_and_beside(bench: Bench, dtype: str) -> Found:
    asked = requests(SMALL, 8)
    model = bench.model(SMALL, dtype=dtype)
    beside = _answers(bench.engine(model, SMALL), asked)[0]
    alone = _answers(bench.engine(model, SMALL), asked[:1])[0]
    if beside.token_ids != alone.token_ids:
        raise Wrong("it has other tokens beside others than alone")
    apart = most(beside.logprobs, alone.logprobs)
    return Found(f"the same tokens, {apart:.2g} nats apart at most")


def _same_bits(bench: Bench) -> str:
    first, second = (stepped(bench) for _ in range(2))
    if not torch.equal(first, second):
        raise Wrong(f"{int((first != second).sum()):,} of {len(first):,} weights differ")
    return f"{len(first):,} weights are equal"
