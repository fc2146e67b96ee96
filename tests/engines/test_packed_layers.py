"""Layers that multiply with copies of their weights in oneDNN's own order."""

import pytest
import torch
from tests.engines.models import MemoryReceiver, make_engine
from tests.models.tiny import tiny_adapted, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from midflight.engines.embedded import packed_layers
from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.embedded.packed_layers import PackedLayers
from midflight.models import sizes
from midflight.models.sizes import ModelSizes


@pytest.fixture(autouse=True)
def packs_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_layers, "PACKED_AT_LEAST", 1)


def packed_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


@torch.inference_mode()
def logits(model: PreTrainedModel, *, rows: int = 5) -> Tensor:
    return model(input_ids=torch.arange(rows)[None]).logits


def assert_computes(engine: EmbeddedEngine, like: PreTrainedModel) -> None:
    for rows in (1, 2, 5, 40):
        assert (logits(engine._model, rows=rows) - logits(like, rows=rows)).abs().max() < 1e-4


def test_every_linear_layer_is_packed_also_the_output_that_is_tied_to_the_embeddings() -> None:
    engine = make_engine(tiny_model(), packs=True)
    linear = {name for name, module in engine._model.named_modules() if type(module) is nn.Linear}
    assert "lm_head" in linear and packed_names(engine._model) == linear
    assert_computes(engine, tiny_model())


def test_nothing_is_packed_unless_it_is_asked_for() -> None:
    engine = make_engine(tiny_model())
    assert not packed_names(engine._model)


def test_each_version_is_multiplied_with_its_own_packs_and_that_of_the_one_before_stays_until_then() -> None:
    receiver = MemoryReceiver()
    engine = make_engine(tiny_model(), receiver=receiver, packs=True)
    for version in (1, 2, 3):
        engine._weights.stage(receiver.publish(version, tiny_model(seed=version)))
        assert_computes(engine, tiny_model(seed=version - 1))
        engine._commit(version)
        assert_computes(engine, tiny_model(seed=version))


def test_replaced_packs_are_given_back_by_the_next_stage() -> None:
    receiver = MemoryReceiver()
    engine = make_engine(tiny_model(), receiver=receiver, packs=True)
    engine._weights.stage(receiver.publish(1, tiny_model(seed=1)))
    engine._commit(1)
    assert engine._weights._replaced[1].keys() == engine._weights._replaced[0].keys() & PackedLayers(tiny_model())._layers.keys()
    engine._weights.stage(receiver.publish(2, tiny_model(seed=1)))
    assert engine._weights._replaced == ({}, {})


def test_a_base_with_adapters_is_packed_and_its_adapters_are_not() -> None:
    receiver = MemoryReceiver()
    engine = make_engine(tiny_adapted(seed=1), receiver=receiver, packs=True)
    assert all("lora_" not in name for name in packed_names(engine._model))
    assert "model.layers.0.mlp.up_proj.base_layer" in packed_names(engine._model)
    assert_computes(engine, tiny_adapted(seed=1))
    engine._weights.stage(receiver.publish(1, tiny_adapted(seed=2)))
    engine._commit(1)
    assert_computes(engine, tiny_adapted(seed=2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_precisions_are_multiplied_as_they_lie(dtype: str) -> None:
    model = tiny_model(dtype=dtype)
    PackedLayers(model)
    assert not packed_names(model)


def test_small_layers_and_large_models_are_multiplied_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_layers, "PACKED_AT_LEAST", 1500)
    model = tiny_model()
    PackedLayers(model)
    sizes = {name: module.weight.numel() for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert packed_names(model) == {name for name, size in sizes.items() if size >= 1500}
    assert "model.layers.1.mlp.down_proj" in packed_names(model) and "model.layers.1.self_attn.q_proj" not in packed_names(model)
    monkeypatch.setattr(packed_layers, "PACKED_AT_MOST", 1000)
    large = tiny_model()
    PackedLayers(large)
    assert not packed_names(large)


def test_a_processor_that_multiplies_wrongly_with_packs_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed_layers._multiplying
    monkeypatch.setattr(packed_layers, "_multiplying", lambda *given: 1.01 * right(*given))
    engine = make_engine(tiny_model(), packs=True)
    assert not packed_names(engine._model)
    assert_computes(engine, tiny_model())


def test_a_torch_without_these_operators_multiplies_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_layers, "_packing", None)
    model = tiny_model()
    PackedLayers(model)
    assert not packed_names(model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("least", [1, 600, 1500, 10**9])
def test_a_dry_run_counts_the_bytes_that_packs_take(least: int, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_layers, "PACKED_AT_LEAST", least)
    monkeypatch.setattr(sizes, "PACKED_AT_LEAST", least)
    layers = PackedLayers(tiny_model(tied=tied))
    taken = sum(computed[0].layer.weight.nbytes for computed in layers._layers.values())
    estimate = ModelSizes(262, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_context=64, tied=tied)
    assert estimate.packed_bytes("float32") == taken
    assert estimate.packed_bytes("bfloat16") == 0
