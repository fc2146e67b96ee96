"""What models are tried on and held against."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from midflight.errors import ConfigError
from midflight.models import proof
from midflight.models.creation import make_model
from midflight.models.proof import Proof, Way, attention_of, boundaries, eagerly, kept_proof, looks_ahead, own_logits, rows_to_try, stand_in

from .zoo import tiny, tiny_config, tiny_encoder


@pytest.mark.parametrize(
    ("name", "found"),
    [("llama", []), ("gemma2", [8]), ("llama4-text", [8]), ("llama-dynamic-rope", [16]), ("phi3-longrope", [16]), ("gemma3", [8])],
)
def test_boundaries_are_windows_chunks_and_rotary_lengths(name: str, found: list[int]) -> None:
    assert boundaries(tiny_config(name)) == found


def test_rows_to_try_pass_what_fits_and_two_begin_alike() -> None:
    model = tiny("mistral")
    model.config.sliding_window = 30
    long, short, branch, between = rows_to_try(model)
    assert (len(long), len(short), len(branch), len(between)) == (39, 5, 36, 19)
    assert (long[:26] == branch[:26]).all() and (long[:5] == between[:5]).all()
    assert len(rows_to_try(model, max_context=20)[0]) == 20


def test_a_model_tried_eagerly_attends_afterwards_as_before() -> None:
    model = tiny("gemma3")
    before = attention_of(model)
    with eagerly(model):
        assert attention_of(model) == "eager" != before
    assert attention_of(model) == before


def test_a_rows_own_numbers_do_not_depend_on_longer_rows_before_it() -> None:
    model = tiny("llama-dynamic-rope")
    row = np.arange(3, 23)
    first = own_logits(model, row)
    own_logits(model, np.arange(3, 63))
    assert torch.equal(own_logits(model, row), first)


@pytest.mark.parametrize("name", ["cwm", "modernbert-decoder"])
def test_a_stand_in_of_a_configuration_that_insists_on_its_special_ids_has_ids_of_its_own_vocabulary(name: str) -> None:
    model = tiny(name, vocab_size=1000)
    model.config.pad_token_id = model.config.bos_token_id = 999
    assert stand_in(model).config.pad_token_id in (None, 0)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "gpt2"])
def test_a_stand_in_has_every_kind_of_layer_and_few_token_ids(name: str) -> None:
    model = tiny(name, vocab_size=1000)
    text = stand_in(model).config.get_text_config()
    assert text.vocab_size == 512 and text.num_hidden_layers == 2
    kinds = getattr(text, "layer_types", None) or []
    assert set(kinds) == set(getattr(model.config.get_text_config(), "layer_types", None) or [])


def test_a_stand_in_of_a_model_of_one_layer_has_one() -> None:
    model = make_model(
        vocab_size=262,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        max_context=32,
        seed=0,
        dtype="float64",
    )
    assert stand_in(model).config.num_hidden_layers == 1


def test_a_forward_that_raises_is_an_error_with_its_type_its_text_and_the_remedy() -> None:
    model = tiny("gptj")
    model.lm_head = torch.nn.Linear(7, 262)
    with pytest.raises(
        ConfigError,
        match=r"GPTJForCausalLM's own forward in transformers \d.* raises RuntimeError: mat1 and mat2.*Correct its config\.json",
    ):
        own_logits(model, np.arange(3, 9))


@pytest.mark.parametrize(("name", "decodes"), [("llama", True), ("llama-dynamic-rope", True), ("xlstm", True), ("bert", False)])
def test_a_model_that_looks_at_later_tokens_is_told_from_one_whose_numbers_depend_on_length_alone(name: str, decodes: bool) -> None:
    model = tiny(name) if decodes else tiny_encoder()
    assert (looks_ahead(model, rows_to_try(model)[0]) is None) == decodes


def test_a_kept_proof_does_not_need_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources may be on PYTHONPATH alone."""

    def only_others(name: str) -> str:
        if name == "midflight":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(proof, "version", only_others)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = Proof("engine", Way.PACKED)
    assert kept_proof("engine", tiny_config("llama"), lambda: found) == found
