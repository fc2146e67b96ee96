"""An engine under test and what it is expected to say: by `transformers` where it has weights, by its script where it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import cache
from typing import Protocol

import torch
from tests.engines.models import MemoryReceiver, make_engine
from tests.models.tiny import tiny_model
from transformers import PreTrainedModel

from midflight.errors import WeightsCorrupt
from midflight.models.names import named_tensors
from midflight.ports import Engine
from midflight.testing.scripted import ScriptedEngine
from midflight.types import GenerateRequest, LogprobKind, SamplingParams, Version, WeightManifest

GREEDY_MARGIN = 1e-4
"""A token this close below the likeliest is as good: two implementations in float32 differ by less."""


class Damage(StrEnum):
    """What may be wrong with a version. Its manifest does not say so."""

    CORRUPT = "corrupt"
    MISSING = "missing"
    WRONG_SHAPE = "wrong shape"
    UNKNOWN = "unknown"


class Site(Protocol):
    @property
    def engine(self) -> Engine: ...
    def publish(self, version: Version, *, damage: Damage | None = None) -> WeightManifest:
        """A version that the engine can stage. Each version has weights of its own."""
        ...

    def chosen(self, version: Version, request: GenerateRequest, output: Sequence[int]) -> list[bool]:
        """For each token, whether a greedy policy of these weights alone chooses it after those before it."""
        ...

    def logprobs(self, version: Version, request: GenerateRequest, output: Sequence[int]) -> list[float]:
        """Of the output under these weights, of the kind that the engine gives."""
        ...

    async def seeded(self, request: GenerateRequest) -> tuple[int, ...]:
        """The output of version 0, uninterrupted. For engines that honour seeds."""
        ...


class ModelSite:
    """An engine of a model. `models` gives the weights of a version, always the same."""

    def __init__(self, engine: Engine, receiver: MemoryReceiver, models: Callable[[Version], PreTrainedModel]) -> None:
        self.engine, self.receiver, self.models = engine, receiver, models

    def publish(self, version: Version, *, damage: Damage | None = None) -> WeightManifest:
        tensors = dict(named_tensors(self.models(version)))
        first = min(tensors)
        if damage is Damage.MISSING:
            del tensors[first]
        elif damage is Damage.WRONG_SHAPE:
            tensors[first] = tensors[first][:-1]
        elif damage is Damage.UNKNOWN:
            tensors["model.layers.99.mlp.up_proj.weight"] = tensors[first]
        manifest = self.receiver.publish_tensors(version, tensors)
        if damage is Damage.CORRUPT:
            self.receiver.published[version][first][0:4] = b"\0\0\0\1"
        return manifest

    def chosen(self, version: Version, request: GenerateRequest, output: Sequence[int]) -> list[bool]:
        logits = output_logits(self.models(version), request, output)
        lacking = logits.max(-1).values - logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
        return (lacking < GREEDY_MARGIN).tolist()

    def logprobs(self, version: Version, request: GenerateRequest, output: Sequence[int]) -> list[float]:
        logits = output_logits(self.models(version), request, output)
        shaped = _shaped(logits, request.sampling, self.engine.capabilities.logprob_kind)
        return shaped.log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0].tolist()

    async def seeded(self, request: GenerateRequest) -> tuple[int, ...]:
        return make_engine(self.models(0)).generate_all([request])[0].token_ids


def output_logits(model: PreTrainedModel, request: GenerateRequest, output: Sequence[int]) -> torch.Tensor:
    """[num_output, vocabulary], by one forward pass over everything."""
    with torch.no_grad():
        logits = model(torch.tensor([[*request.input_ids, *output]])).logits[0].double()
    return logits[len(request.input_ids) - 1 : -1]


def _shaped(logits: torch.Tensor, sampling: SamplingParams, kind: LogprobKind) -> torch.Tensor:
    """What each kind's softmax is of. Of truncations only `top_k`."""
    if sampling.temperature and kind is not LogprobKind.RAW:
        logits = logits / sampling.temperature
    top_k = sampling.top_k if sampling.temperature else None
    if top_k is not None and kind is LogprobKind.SAMPLED:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return logits


@cache
def tiny_version(version: Version) -> PreTrainedModel:
    return tiny_model(seed=version)


class ScriptedSite:
    """A scripted engine: its weights are its script, so a damaged version is one that it was told to refuse."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine

    def publish(self, version: Version, *, damage: Damage | None = None) -> WeightManifest:
        if damage is not None:
            self.engine.fail_next("stage", WeightsCorrupt(f"staging version {version}: it is {damage}. Publish it again."))
        return WeightManifest(version, f"fingerprint of {version}", "memory", "memory", ())

    def chosen(self, version: Version, request: GenerateRequest, output: Sequence[int]) -> list[bool]:
        return [token == choice for token, (choice, _) in zip(output, self._choices(version, request, output), strict=True)]

    def logprobs(self, version: Version, request: GenerateRequest, output: Sequence[int]) -> list[float]:
        return [logprob for _, logprob in self._choices(version, request, output)]

    def _choices(self, version: Version, request: GenerateRequest, output: Sequence[int]) -> list[tuple[int, float]]:
        state = self.engine.script.start(request)
        choices: list[tuple[int, float]] = []
        for token in output:
            choices.append(self.engine.script.choose(state, version, may_end=True))
            state = self.engine.script.extend(state, token)
        return choices

    async def seeded(self, request: GenerateRequest) -> tuple[int, ...]:
        return self.engine.answer(request)
