"""Trials of versions that change in the middle of an answer, and of going back to the version before
where a new one does not arrive whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.embedded.weights import model_fingerprint
from midflight.errors import WeightsCorrupt
from midflight.models.caches import cache_name
from midflight.models.names import named_tensors
from midflight.ports import Engine
from midflight.run.device_check.bench import (
    PROMPT,
    SMALL,
    TOLERANCE,
    Bench,
    BenchSize,
    Wrong,
    most,
    not_tried,
    plain_logprobs,
    requests,
    tried,
    within,
)
from midflight.run.device_check.report import DeviceTrial
from midflight.types import GenerateRequest, PauseMode, Version, WeightManifest
from midflight.weights.transports.kinds import DIRECT, PULL, SHARED_MEMORY
from midflight.weights.transports.publisher import Publisher
from midflight.weights.transports.select import publisher

BEFORE = 8
"""Tokens that an answer has when the version changes."""
LONG = 256
"""Tokens of an answer in real size, which takes some seconds."""
MODES = (PauseMode.KEEP, PauseMode.RECOMPUTE)
"""The pauses after which an answer goes on where it was."""
TRANSPORTS = (SHARED_MEMORY, PULL, DIRECT)


def swaps(bench: Bench) -> Iterator[DeviceTrial]:
    """Yields a trial of a version that comes in mid-answer for each way to pause."""
    for size in bench.sizes:
        for mode in MODES:
            yield tried(
                f"a version in mid-answer, {mode.value}: each token computed again ({size.name})",
                lambda size=size, mode=mode: asyncio.run(_swapped(bench, size, mode)),
                remedy=f'set rollout.pause_mode = "{_other(mode)}"',
            )
    if bench.why_not_real:
        yield not_tried("a version in mid-answer in real size", bench.why_not_real)


def take_back(bench: Bench) -> Iterator[DeviceTrial]:
    """Yields a trial of a version that does not arrive whole, and for each transport one of going
    back to the version before.
    """
    yield tried(
        "a damaged version is refused, and the one before is served",
        lambda: asyncio.run(_refused(bench)),
        remedy=f'set weights.transport = "{PULL}"',
    )
    for transport in TRANSPORTS:
        other = next(other for other in TRANSPORTS if other != transport)
        yield tried(
            f"a version is taken back: answers and weights are those before it ({transport})",
            lambda transport=transport: asyncio.run(_taken_back(bench, transport)),
            remedy=f'set weights.transport = "{other}"',
        )


def _other(mode: PauseMode) -> str:
    return next(other for other in MODES if other is not mode).value


# --- An answer of two versions --------------------------------------------------------------------


@dataclass(slots=True)
class SwappedAnswer:
    """The tokens of an answer, with what the engine said of each."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[Version]


@asynccontextmanager
async def running(engine: EmbeddedEngine) -> AsyncGenerator[EmbeddedEngine]:
    """The engine, whose loop runs within the block."""
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(engine.run())
        try:
            yield engine
        finally:
            loop.cancel()


async def answered_across(
    engine: Engine, request: GenerateRequest, manifest: WeightManifest, mode: PauseMode
) -> SwappedAnswer:
    """The answer to a request during which a version goes live. Waits for the engine.

    The version is staged before the answer begins, because a fast server ends a short answer in less
    time than that takes. It is committed in mid-answer, in a pause of that mode.
    """
    await engine.stage(manifest)
    answer = SwappedAnswer([], [], [])
    handed_over = False
    async for chunk in engine.generate(request):
        answer.token_ids += chunk.token_ids
        answer.logprobs += chunk.logprobs
        labels = [chunk.version] * len(chunk.token_ids)
        answer.versions += labels
        if chunk.attested:  # the server's own account of all tokens
            answer.versions = [
                span.version for span in chunk.attested for _ in range(span.start, span.end)
            ]
        if len(answer.token_ids) >= BEFORE and not handed_over:
            handed_over = True
            await engine.pause(mode)
            attested = await engine.commit(manifest.version)
            await engine.resume()
            if attested.fingerprint != manifest.fingerprint:
                raise Wrong(
                    f"the engine attests {attested.fingerprint[:12]}, and {manifest.fingerprint[:12]}"
                    " was handed over"
                )
    return answer


async def _swapped(bench: Bench, size: BenchSize, mode: PauseMode) -> str:
    served = bench.model(size)
    first = bench.model(size)
    second = bench.model(size, seed=1)
    with _sender(bench, SHARED_MEMORY) as outbox:
        manifest = outbox.publish(1, named_tensors(second))
        async with running(bench.engine(served, size)) as engine:
            longest = min(LONG, size.context - PROMPT - 1)
            request = requests(size, 1, answer=longest)[0]
            answer = await answered_across(engine, request, manifest, mode)
    return checked_answer((first, second), request, answer, mode)


def checked_answer(
    models: Sequence[PreTrainedModel],
    request: GenerateRequest,
    answer: SwappedAnswer,
    mode: PauseMode,
    *,
    tolerance: float = TOLERANCE,
) -> str:
    """Computes each token's log-probability again, under the version that the engine names. Raises
    `Wrong` if one differs by more than `tolerance` nats. `models` are those of versions 0 and 1.
    """
    number = answer.versions.count(0)
    if answer.versions != [0] * number + [1] * (len(answer.versions) - number):
        raise Wrong("the versions of the tokens go back and forth")
    if number in (0, len(answer.versions)):
        raise Wrong(f"all {len(answer.versions)} tokens are of one version")
    expected = across(models, request.input_ids, answer.token_ids, number=number, mode=mode)
    worst = most(answer.logprobs, expected)
    within(worst, tolerance, "nats apart at most")
    return (
        f"{number} tokens of the version before and {len(answer.versions) - number} of the new "
        f"one, {worst:.2g} nats apart at most"
    )


@torch.no_grad()
def across(
    models: Sequence[PreTrainedModel],
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    number: int,
    mode: PauseMode,
) -> np.ndarray:
    """The log-probabilities of an answer whose first `number` tokens are of the first model, and the
    others of the second. In the mode keep the second model reads on over the keys of the first; a
    token's keys are made by the step that makes the token after it.
    """
    first, second = models
    before = plain_logprobs(first, prompt, output[:number])
    if mode is PauseMode.RECOMPUTE:
        return np.concatenate([before, plain_logprobs(second, prompt, output)[number:]])
    row = torch.tensor([[*prompt, *output]], device=next(first.parameters()).device)
    read = len(prompt) + number - 1
    name = cache_name(first)
    assert name is not None, "the model of these trials has a cache"
    keys: Any = first(input_ids=row[:, :read], use_cache=True)[name]
    logits = second(input_ids=row[:, read:-1], use_cache=True, **{name: keys}).logits[0]
    chosen = row[0, read + 1 :, None]
    after = logits.double().log_softmax(-1).gather(-1, chosen)[:, 0]
    return np.concatenate([before, after.cpu().numpy()])


# --- Going back -----------------------------------------------------------------------------------


def _sender(bench: Bench, transport: str) -> Publisher:
    return publisher(transport, name=bench.segment(), folder=bench.scratch / "weights")


async def _refused(bench: Bench) -> str:
    """Hands over bytes of which one bit is not as it was published."""
    model = bench.model(SMALL)
    with _sender(bench, SHARED_MEMORY) as outbox:
        damaged = outbox.publish(1, named_tensors(bench.model(SMALL, seed=1)))
        _flip(Path(damaged.location))
        async with running(bench.engine(model, SMALL)) as engine:
            before = await _said(engine)
            try:
                await engine.stage(damaged)
            except WeightsCorrupt:
                pass
            except Exception as error:
                said = f"the damage was met as {type(error).__name__}: {error}"
                raise Wrong(said) from error
            else:
                raise Wrong("the damage was not found")
            if await _said(engine) != before:
                raise Wrong("the answer after it is another")
    return "the same answer before and after"


def _flip(file: Path) -> None:
    """Changes a bit of a published file, in the middle."""
    with file.open("r+b") as bytes_:
        bytes_.seek(file.stat().st_size // 2)
        found = bytes_.read(1)
        bytes_.seek(-1, 1)
        bytes_.write(bytes((found[0] ^ 1,)))


async def _taken_back(bench: Bench, transport: str) -> str:
    """Hands version 1 over, then the weights of version 0 again, as a rollback does."""
    model = bench.model(SMALL)
    first = bench.model(SMALL)
    print_before = model_fingerprint(model)
    with _sender(bench, transport) as outbox:
        async with running(bench.engine(model, SMALL)) as engine:
            before = await _said(engine)
            given = ((1, bench.model(SMALL, seed=1)), (2, first))
            for version, weights in given:
                manifest = outbox.publish(version, named_tensors(weights))
                await engine.stage(manifest)
                await engine.pause(PauseMode.RECOMPUTE)
                await engine.commit(version)
                await engine.resume()
                if version == 1 and await _said(engine) == before:
                    raise Wrong("the new version answers as the one before")
            if await _said(engine) != before:
                raise Wrong("the answer of the version that was taken back is another")
    if model_fingerprint(model) != print_before:
        raise Wrong("the weights are not those before")
    return "the same answer and the same weights, to the bit"


async def _said(engine: Engine) -> list[int]:
    found: list[int] = []
    async for chunk in engine.generate(requests(SMALL, 1)[0]):
        found += chunk.token_ids
    return found
