"""Adapters of a frozen base: what is handed over, what is exported, and that both compute what PEFT computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from midflight.errors import ConfigError, ModelNotFound, WeightsCorrupt
from midflight.models.adapters import CONFIG, FOLDER, WEIGHTS, adapter_of
from midflight.models.load import load_model, save_model
from midflight.models.lora import add_adapters, base_tensors, lora_config, merged
from midflight.models.names import assign, named_tensors
from midflight.models.sizes import sizes_of

from .tiny import tiny_adapted, tiny_model

IDS = torch.tensor([[257, 104, 105, 256, 258]])


def untrained(*, seed: int) -> PreTrainedModel:
    model = tiny_model()
    add_adapters(model, lora_config(model, rank=4, alpha=6), seed=seed)
    return model


def test_what_is_handed_over_are_the_adapters_by_pefts_names():
    names = list(named_tensors(tiny_adapted(targets=("q_proj", "down_proj"))))
    assert len(names) == 2 * 2 * 2
    assert names[:2] == [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{factor}.weight" for factor in "AB"]


def test_without_targets_every_linear_layer_but_the_output_is_adapted():
    for tied in (True, False):
        names = named_tensors(tiny_adapted(tied=tied))
        assert len(names) == 2 * 7 * 2
        assert not any("lm_head" in name or "embed" in name for name in names)


def test_new_adapters_change_nothing_and_follow_from_the_seed():
    assert torch.equal(untrained(seed=0)(IDS).logits, tiny_model()(IDS).logits)
    one, same, other = (named_tensors(untrained(seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_adding_adapters_leaves_the_global_random_state():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    untrained(seed=0)
    assert torch.equal(torch.rand(1), expected)


def test_only_adapters_have_gradients():
    model = tiny_adapted()
    model(IDS).logits.sum().backward()
    with_gradients = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradients == {name for name, _ in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_with_adapters_is_loaded_as_it_was(tmp_path: Path, dtype: str):
    model = tiny_adapted(dtype=dtype)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path, dtype=dtype)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert named_tensors(loaded).keys() == named_tensors(model).keys()
    assert {n for n, p in loaded.named_parameters() if p.requires_grad} == {n for n, p in model.named_parameters() if p.requires_grad}


def test_peft_loads_a_saved_folder_and_computes_the_same(tmp_path: Path):
    model = tiny_adapted()
    save_model(model, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(base(IDS).logits, tiny_model()(IDS).logits)
    theirs = PeftModel.from_pretrained(base, tmp_path / FOLDER)
    torch.testing.assert_close(theirs(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_merged_model_computes_the_same_without_adapters(tmp_path: Path, tied: bool):
    model = tiny_adapted(tied=tied)
    save_model(model, tmp_path, merged=True)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    assert (found(IDS).logits - tiny_model(tied=tied)(IDS).logits).abs().max() > 0.1
    assert not (tmp_path / FOLDER).exists()


def test_adapters_of_what_is_no_linear_layer_are_not_dropped_from_the_merged_model() -> None:
    model = tiny_adapted()
    adapters = {**named_tensors(model), "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 262)}
    with pytest.raises(WeightsCorrupt, match=r"embed_tokens.lora_embedding_A' is of no linear layer"):
        merged(base_tensors(model), adapters, scale=1.0)


def test_the_base_is_saved_bit_for_bit(tmp_path: Path):
    save_model(tiny_adapted(), tmp_path)
    assert all(torch.equal(tensor, named_tensors(tiny_model())[name]) for name, tensor in load_file(tmp_path / "model.safetensors").items())
    assert base_tensors(tiny_adapted()).keys() == base_tensors(tiny_model()).keys()


def test_an_unknown_layer_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"lora.targets names 'q_poj'.*Did you mean 'q_proj'"):
        lora_config(tiny_model(), rank=4, alpha=8, targets=("q_poj",))
    with pytest.raises(ConfigError, match="lm_head"):
        lora_config(tiny_model(), rank=4, alpha=8, targets=("lm_head",))


def test_a_model_gets_adapters_once():
    with pytest.raises(ConfigError, match=r"has adapters already.*remove \[lora\]"):
        lora_config(tiny_adapted(), rank=4, alpha=8)


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"use_dora": True}, "not plain"), ({"target_modules": "all-linear"}, "target_modules"), ({"target_modules": ["other"]}, "other")],
)
def test_adapters_of_another_kind_are_refused_with_the_folder(tmp_path: Path, changed: dict[str, object], says: str):
    save_model(tiny_adapted(), tmp_path)
    path = tmp_path / FOLDER / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ModelNotFound, match=says):
        load_model(tmp_path, dtype="float32")


def test_adapters_without_their_tensors_are_not_loaded(tmp_path: Path):
    save_model(tiny_adapted(), tmp_path)
    (tmp_path / FOLDER / WEIGHTS).write_bytes(b"")
    with pytest.raises(ModelNotFound, match="loading the adapters in"):
        load_model(tmp_path, dtype="float32")


def test_weights_of_the_whole_model_are_not_taken_for_its_adapters():
    with pytest.raises(WeightsCorrupt, match=r"lora_A.weight' is missing"):
        assign(tiny_adapted(), named_tensors(tiny_model()))


def test_the_numbers_of_a_folders_adapters_are_read_without_torch(tmp_path: Path):
    assert adapter_of(tmp_path) is None
    save_model(tiny_adapted(targets=("q_proj",)), tmp_path)
    found = adapter_of(tmp_path)
    assert found is not None
    assert (found.rank, found.alpha, found.scale, found.targets) == (4, 6, 1.5, ("q_proj",))


def test_the_number_of_their_parameters_follows_from_the_sizes(tmp_path: Path):
    model = tiny_adapted()
    save_model(model, tmp_path)
    assert sizes_of(tmp_path).num_adapter_parameters(4) == sum(tensor.numel() for tensor in named_tensors(model).values())
