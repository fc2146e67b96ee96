"""An exported folder is what `transformers` loads, complete or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.folders import mode_of, umask
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from midflight.errors import ConfigError, ModelNotFound
from midflight.models import export
from midflight.models.export import export_model
from midflight.models.lora import save_adapters

from .tiny import tiny_adapted, tiny_model

IDS = torch.tensor([[257, 104, 105, 256, 258]])


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    words = {"a": 0, "b": 1}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a"))).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "model.safetensors").write_bytes(b"other weights")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_export_with_equal_logits(tmp_path: Path, tokenizer_folder: Path, tied: bool):
    model = tiny_model(tied=tied)
    export_model(model, tokenizer_folder, tmp_path / "out" / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert torch.equal(model(IDS).logits, loaded(IDS).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "model").vocab_size == 2


def test_an_export_replaces_the_one_before_it_and_leaves_nothing_beside_it(tmp_path: Path, tokenizer_folder: Path):
    dest = tmp_path / "out" / "model"
    for seed in (1, 2):
        export_model(tiny_model(seed=seed), tokenizer_folder, dest)
    assert torch.equal(tiny_model(seed=2)(IDS).logits, AutoModelForCausalLM.from_pretrained(dest)(IDS).logits)
    assert [p.name for p in dest.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077], ids=oct)
def test_others_may_read_an_export_as_any_new_file(tmp_path: Path, tokenizer_folder: Path, mask: int):
    with umask(mask):
        export_model(tiny_adapted(), tokenizer_folder, tmp_path / "model")
        save_adapters(tiny_adapted(), tmp_path / "adapter")
    paths = [*tmp_path.glob("model*"), *tmp_path.glob("model/**/*"), *tmp_path.glob("adapter/**/*")]
    assert {path.name for path in paths} >= {"model", "model.safetensors", "adapter_model.safetensors", "tokenizer.json"}
    assert {(path.name, mode_of(path)) for path in paths} == {(p.name, (0o777 if p.is_dir() else 0o666) & ~mask) for p in paths}


def test_a_failed_export_leaves_the_one_before_it(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch):
    dest = tmp_path / "out" / "model"
    export_model(tiny_model(seed=1), tokenizer_folder, dest)

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(export, "save_model", full)
    with pytest.raises(OSError, match="no space"):
        export_model(tiny_model(seed=2), tokenizer_folder, dest)
    assert torch.equal(tiny_model(seed=1)(IDS).logits, AutoModelForCausalLM.from_pretrained(dest)(IDS).logits)
    assert [p.name for p in dest.parent.iterdir()] == ["model"]


def test_a_folder_with_other_things_is_not_replaced(tmp_path: Path, tokenizer_folder: Path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="no model folder"):
        export_model(tiny_model(), tokenizer_folder, tmp_path / "home")
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"


def test_a_missing_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(ModelNotFound, match="tokenizer_config"):
        export_model(tiny_model(), tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()
