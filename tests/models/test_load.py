"""Making, saving, loading: what is saved comes back bit for bit, and what cannot be loaded is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from midflight.errors import ConfigError, ModelNotFound
from midflight.models.creation import make_model
from midflight.models.load import load_model, save_model
from midflight.models.names import named_tensors
from midflight.models.sizes import ModelSizes, sizes_of

from .mixtures import tiny_mixture
from .tiny import tiny_model

IDS = torch.tensor([[257, 104, 105, 256, 258]])


def test_the_seed_alone_decides_the_weights_and_the_global_state_is_untouched():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = tiny_model(seed=1)
    assert torch.equal(torch.rand(3), expected)
    second, other = tiny_model(seed=1), tiny_model(seed=2)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(named_tensors(first)[name], named_tensors(second)[name])
    assert not torch.equal(named_tensors(first)[name], named_tensors(other)[name])


def test_a_made_model_has_the_sizes_asked_for():
    model = tiny_model()
    assert model.config.head_dim == 8
    assert model.config.eos_token_id == 256
    assert model.config.pad_token_id == 261
    assert model(IDS).logits.shape == (1, 5, 262)


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"num_heads": 5}, "model.num_heads 5"),
        ({"num_heads": 32, "num_kv_heads": 2}, "odd"),
        ({"num_kv_heads": 3}, "model.num_kv_heads 3"),
        ({"num_layers": 0}, "model.num_layers is 0"),
        ({"vocab_size": 256}, "256 tokens"),
        ({"dtype": "float31"}, "'float32'"),
    ],
)
def test_sizes_that_do_not_fit_are_named(change: dict, option: str):
    sizes = {
        "vocab_size": 262,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_context": 64,
        "seed": 0,
        "dtype": "float32",
    }
    with pytest.raises(ConfigError, match=option):
        make_model(**(sizes | change))


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_comes_back_bit_for_bit(tmp_path: Path, tied: bool):
    model = tiny_model(tied=tied)
    save_model(model, tmp_path / "m")
    assert {p.name for p in (tmp_path / "m").iterdir()} >= {"config.json", "generation_config.json", "model.safetensors"}
    loaded = load_model(tmp_path / "m", dtype="float32", device="cpu")
    assert torch.equal(model(IDS).logits, loaded(IDS).logits)
    assert list(named_tensors(loaded)) == list(named_tensors(model))
    assert loaded.generation_config.eos_token_id == 256


def test_a_model_loads_in_the_dtype_asked_for(tmp_path: Path):
    save_model(tiny_model(), tmp_path)
    assert {t.dtype for t in named_tensors(load_model(tmp_path, dtype="bfloat16")).values()} == {torch.bfloat16}
    assert {t.dtype for t in named_tensors(load_model(tmp_path, dtype="float64")).values()} == {torch.float64}


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_made_model_computes_as_it_does_after_saving_and_loading(tmp_path: Path, dtype: str):
    model = tiny_model(dtype=dtype)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path, dtype=dtype)
    assert all(torch.equal(made, read) for made, read in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True))
    # Products of the same numbers may differ in the last bit with the place of the weights in memory.
    torch.testing.assert_close(model(IDS).logits, loaded(IDS).logits, rtol=0, atol=8 * torch.finfo(model.dtype).eps)


def test_a_missing_folder_or_configuration_is_named(tmp_path: Path):
    with pytest.raises(ModelNotFound, match=r"no folder .*absent.*model\.path"):
        load_model(tmp_path / "absent", dtype="float32")
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        load_model(tmp_path, dtype="float32")


def test_an_unknown_architecture_or_an_encoder_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(ModelNotFound, match="no architecture"):
        load_model(tmp_path, dtype="float32")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ModelNotFound, match="encoder"):
        load_model(tmp_path, dtype="float32")


def test_a_configuration_that_transformers_does_not_take_is_told_in_a_sentence(tmp_path: Path):
    save_model(tiny_model(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": ["full_attention"] * 7}))
    with pytest.raises(ModelNotFound, match=r"transformers \d.* does not take its config\.json \(StrictDataclass"):
        load_model(tmp_path, dtype="float32")
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "none such"}))
    with pytest.raises(ModelNotFound, match=r"transformers \d.* raises KeyError: 'none such'"):
        load_model(tmp_path, dtype="float32")


def test_pickled_weights_are_never_read(tmp_path: Path):
    save_model(tiny_model(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match="pickle is never read"):
        load_model(tmp_path, dtype="float32")


def test_missing_tensors_are_refused_and_not_left_random(tmp_path: Path):
    save_model(tiny_model(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelNotFound, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path, dtype="float32")


def test_a_truncated_file_is_refused(tmp_path: Path):
    save_model(tiny_model(), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelNotFound, match="export or download"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize("tied", [True, False])
def test_sizes_count_the_parameters_of_the_real_model(tmp_path: Path, tied: bool):
    model = tiny_model(tied=tied)
    save_model(model, tmp_path)
    sizes, planned = sizes_of(tmp_path), ModelSizes(262, 32, 48, 2, 4, 2, 8, 64, tied)
    assert sizes.num_parameters == planned.num_parameters == sum(p.numel() for p in model.parameters())
    assert sizes == replace(planned, stored=planned.num_parameters)
    # Two layers, keys and values, two heads of eight, four bytes each.
    assert sizes.kv_bytes_per_token("float32") == 2 * 2 * 2 * 8 * 4
    assert sizes.weight_bytes("bfloat16") == 2 * sizes.num_parameters


def test_sizes_count_the_experts_of_a_mixture_and_nothing_of_a_file_that_is_cut_off(tmp_path: Path):
    model = tiny_mixture("qwen3_moe")
    save_model(model, tmp_path)
    assert sizes_of(tmp_path).num_parameters == sum(p.numel() for p in model.parameters())
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    assert sizes_of(tmp_path).stored == 0
