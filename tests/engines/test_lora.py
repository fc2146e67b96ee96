"""An engine of a model with adapters: what it serves is what PEFT computes, and a version is its adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tests.engines.models import MemoryReceiver, ask, make_engine
from tests.engines.sites import output_logits
from tests.models.tiny import tiny_adapted, tiny_model
from transformers import AutoModelForCausalLM

from midflight.engines.embedded.engine import Generated
from midflight.engines.embedded.weights import EngineWeights, model_fingerprint
from midflight.errors import WeightsCorrupt
from midflight.models.adapters import FOLDER
from midflight.models.load import save_model
from midflight.models.lora import base_tensors
from midflight.models.names import named_tensors
from midflight.types import GenerateRequest

REQUESTS = [ask("some prompt", request_id="a", seed=3), ask("another, which is longer", request_id="b", seed=4, max_tokens=12)]


def by_peft(folder: Path, request: GenerateRequest, output: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of the output by `transformers` and PEFT alone, from a saved folder."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), folder / FOLDER)
    return output_logits(model, request, output).log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0]  # type: ignore[arg-type]


def assert_same(folder: Path, generations: list[Generated]) -> None:
    for request, generation in zip(REQUESTS, generations, strict=True):
        expected = by_peft(folder, request, generation.token_ids)
        torch.testing.assert_close(torch.tensor(generation.logprobs, dtype=torch.float64), expected, rtol=0, atol=1e-5)


def test_adapters_are_served_and_a_version_of_adapters_alone_changes_what_is_served(tmp_path: Path) -> None:
    receiver = MemoryReceiver()
    engine = make_engine(tiny_adapted(seed=1), receiver=receiver)
    for version in (1, 2):
        save_model(tiny_adapted(seed=version), tmp_path / str(version))
    before = engine.generate_all(REQUESTS)
    assert_same(tmp_path / "1", before)
    engine._weights.stage(receiver.publish(2, tiny_adapted(seed=2)))
    engine._commit(2)
    after = engine.generate_all(REQUESTS)
    assert_same(tmp_path / "2", after)
    assert [g.token_ids for g in after] != [g.token_ids for g in before]


def test_a_commit_attests_the_adapters_and_leaves_the_base_bit_for_bit() -> None:
    receiver, model = MemoryReceiver(), tiny_adapted(seed=1)
    weights = EngineWeights(model, receiver, version=0)
    assert weights.served.fingerprint == model_fingerprint(tiny_adapted(seed=1))
    manifest = receiver.publish(2, tiny_adapted(seed=2))
    weights.stage(manifest)
    assert weights.commit(2).fingerprint == manifest.fingerprint == model_fingerprint(model)
    assert all(torch.equal(tensor, base_tensors(tiny_model())[name]) for name, tensor in base_tensors(model).items())


def test_a_version_carries_the_bytes_of_the_adapters_only() -> None:
    manifest = MemoryReceiver().publish(1, tiny_adapted(seed=1))
    widths = {"q": 32 + 32, "k": 32 + 16, "v": 32 + 16, "o": 32 + 32, "gate": 32 + 48, "up": 32 + 48, "down": 48 + 32}
    assert sum(spec.num_bytes for spec in manifest.tensors) == 2 * 4 * sum(widths.values()) * 4  # layers, rank, float32


def test_whole_weights_are_refused_by_an_engine_of_adapters() -> None:
    receiver = MemoryReceiver()
    weights = EngineWeights(tiny_adapted(), receiver, version=0)
    assert tiny_adapted().state_dict().keys() != named_tensors(tiny_adapted()).keys()
    with pytest.raises(WeightsCorrupt, match="only one of manifest and model"):
        weights.stage(receiver.publish(1, tiny_model(seed=1)))
