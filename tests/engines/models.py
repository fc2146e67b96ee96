"""Engines of tiny models, the byte tokenizer and a receiver in memory, shared by the engine's tests."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from tests.models.tiny import MAX_CONTEXT, tiny_model
from transformers import PreTrainedModel

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.embedded.prefixes import PrefixRoom
from midflight.engines.embedded.weights import tensors_fingerprint
from midflight.errors import WeightsCorrupt
from midflight.models.names import dtype_name, named_tensors
from midflight.models.sizes import fingerprint_views
from midflight.text.byte_tokenizer import END, byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.types import GenerateRequest, SamplingParams, TensorSpec, Version, WeightManifest
from midflight.types.facts import EngineStepped, Fact, Record, record_nothing

TOKENIZER = Tokenizer(byte_tokenizer(), template=None, eos_token_ids=frozenset({END}))


class MemoryReceiver:
    """Versions held in memory. `fetch` gives a verified copy, as the port demands; a test may spoil what is published."""

    def __init__(self) -> None:
        self.published: dict[Version, dict[str, memoryview]] = {}
        self.specs: dict[Version, tuple[TensorSpec, ...]] = {}
        self.fetched: dict[Version, weakref.ref[NDArray[np.uint8]]] = {}
        """The memory of one tensor of each version fetched, to see when it is given back."""

    def publish(self, version: Version, model: PreTrainedModel) -> WeightManifest:
        return self.publish_tensors(version, named_tensors(model))

    def publish_tensors(self, version: Version, given: Mapping[str, torch.Tensor]) -> WeightManifest:
        tensors = {n: t.detach().clone() for n, t in given.items()}
        self.published[version] = {n: memoryview(t.reshape(-1).view(torch.uint8).numpy()) for n, t in tensors.items()}
        specs = tuple(TensorSpec(n, dtype_name(t.dtype), tuple(t.shape), 0, t.numel() * t.element_size()) for n, t in tensors.items())
        self.specs[version] = specs
        return WeightManifest(version, tensors_fingerprint(tensors), "memory", "memory", specs)

    def fetch(self, manifest: WeightManifest) -> Mapping[str, memoryview]:
        own = {name: np.array(view) for name, view in self.published[manifest.version].items()}
        self.fetched[manifest.version] = weakref.ref(next(iter(own.values())))
        views = {name: memoryview(array) for name, array in own.items()}
        if (found := fingerprint_views(self.specs[manifest.version], views)) != manifest.fingerprint:
            raise WeightsCorrupt(f"fetching version {manifest.version}: its bytes hash to {found}; publish the version again.")
        return views


class StepLog:
    """Keeps the steps of engines, and no other fact."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, int, int]] = []

    def apply(self, fact: Fact) -> None:
        if isinstance(fact, EngineStepped):
            self.steps.append((fact.started, fact.ended, fact.num_tokens, fact.num_running))


def make_engine(
    model: PreTrainedModel | None = None,
    *,
    receiver: MemoryReceiver | None = None,
    record: Record = record_nothing,
    max_running: int = 8,
    max_batch_tokens: int = 64,
    pause_lease_seconds: float = 30.0,
    records_experts: bool = False,
    prefix_age: int = 0,
    guesses: int = 0,
    packs: bool = False,
) -> EmbeddedEngine:
    return EmbeddedEngine(
        model or tiny_model(),
        tokenizer=TOKENIZER,
        name="tiny",
        receiver=receiver or MemoryReceiver(),
        record=record,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        max_context=MAX_CONTEXT,
        pause_lease_seconds=pause_lease_seconds,
        records_experts=records_experts,
        prefixes=PrefixRoom(age=prefix_age),
        guesses=guesses,
        packs=packs,
    )


def ask(text: str = "hello", *, request_id: str = "r", **sampling: object) -> GenerateRequest:
    """A request for the text's bytes; it ends by budget only, unless `ignore_eos=False` is given."""
    ids = tuple(text.encode())
    params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(request_id, ids, len(ids), params, seeded="seed" in sampling)
