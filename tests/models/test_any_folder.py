"""Folders of any architecture: read, trained in their text, written again in their own names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from midflight.models.load import load_model, save_model
from midflight.models.lora import add_adapters, lora_config
from midflight.models.names import named_tensors
from midflight.models.sizes import sizes_of
from midflight.models.text_tower import other_parts

from .zoo import MULTIMODAL, tiny


@pytest.mark.parametrize("name", sorted(MULTIMODAL))
def test_the_text_of_a_multimodal_folder_trains_and_all_of_it_is_written_in_its_own_names(name: str, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path / "first")
    model = load_model(tmp_path / "first", dtype="float32")
    assert other_parts(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 1.0
    save_model(model, tmp_path / "second")
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in ("first", "second"))
    assert first.keys() == second.keys()
    sees = ("vision", "visual", "multi_modal_projector")
    for tensor in first:
        assert torch.equal(first[tensor], second[tensor]) == any(part in tensor for part in sees), tensor


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "gpt2", "gpt_bigcode", "bloom", "mamba", "llama", "opt"])
def test_sizes_are_those_of_the_text_by_whatever_name(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    model.save_pretrained(tmp_path)
    sizes = sizes_of(tmp_path)
    layers = model.config.get_text_config().num_hidden_layers
    assert (sizes.vocab_size, sizes.hidden_size, sizes.num_layers) == (262, 32, layers)
    if name in ("gpt2", "gpt_bigcode", "gemma3", "llama"):
        assert (sizes.num_heads, sizes.head_dim, sizes.max_context) == (4, 8, 128)


def test_sizes_that_a_configuration_leaves_out_are_the_defaults_of_its_architecture(tmp_path: Path) -> None:
    """Gemma 3 is published without its number of heads, which is 8."""
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}')
    sizes = sizes_of(tmp_path)
    assert (sizes.num_heads, sizes.hidden_size, sizes.vocab_size, sizes.num_layers) == (8, 2560, 262208, 26)


def test_adapters_of_a_multimodal_folder_are_in_its_text(tmp_path: Path) -> None:
    tiny("qwen2_5_vl").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    add_adapters(model, lora_config(model, rank=2, alpha=2), seed=0)
    names = list(named_tensors(model))
    assert names and not any("visual" in name for name in names) and any("q_proj" in name for name in names)
