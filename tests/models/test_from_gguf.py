"""A GGUF file becomes the model folder that it was made from, or one sentence says why not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from midflight.errors import ConfigError, ModelNotFound
from midflight.models import from_gguf
from midflight.models.gguf_folders import GgufContents
from midflight.models.load import load_model
from midflight.text.tokenizer import Tokenizer

from .ggufs import END, START, STOP, TOKENS, ids, tiny_llama, write_gguf, write_vast_gguf

IDS = torch.tensor([[START, 40, 41, 42, 43, STOP]])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> tuple[Path, GgufContents]:
    """The folder of a file that rounds nothing, and what was found in the file."""
    place = tmp_path_factory.mktemp("gguf")
    folder = place / "folder"
    folder.mkdir()
    return folder, from_gguf.convert(write_gguf(place / "tiny.gguf", model), folder)


def refused(file: Path) -> str:
    """What is said of a file that no model is made of."""
    folder = file.with_suffix("")
    folder.mkdir()
    with pytest.raises(ModelNotFound) as caught:
        from_gguf.convert(file, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- What comes out -----------------------------------------------------------------------------------------------------


def test_a_file_that_rounds_nothing_gives_back_every_number(made: tuple[Path, GgufContents], model: PreTrainedModel) -> None:
    folder, contents = made
    tensors, expected = load_file(folder / "model.safetensors"), dict(model.state_dict())
    del expected["lm_head.weight"]  # the embeddings again
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert contents.architecture == "llama" and contents.num_weights == sum(tensor.numel() for tensor in expected.values())
    assert contents.bits_per_weight == 32 and contents.tensors == {"F32": len(expected)}


def test_transformers_and_midflight_compute_what_the_original_computes(made: tuple[Path, GgufContents], model: PreTrainedModel) -> None:
    folder, _ = made
    with torch.inference_mode():
        expected = model(IDS).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(IDS).logits, expected)
        assert torch.equal(load_model(folder, dtype="float32")(IDS).logits, expected)


def test_nothing_in_the_folder_tells_of_quantisation_or_of_the_place_that_it_was_read_from(made: tuple[Path, GgufContents]) -> None:
    folder, _ = made
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"
    assert not [name for name in config if "quant" in name or "path" in name]
    assert "/tmp" not in "".join(path.read_text() for path in folder.glob("*.json"))


@pytest.mark.parametrize(
    ("stored", "bits"),
    [
        (GGMLQuantizationType.Q8_0, 8 * 34 / 32),  # 32 whole numbers of a byte and a scale of two
        (GGMLQuantizationType.Q4_1, 8 * 20 / 32),  # 32 of half a byte, a scale and a least value of two each
        (GGMLQuantizationType.F16, 16),
    ],
    ids=["Q8_0", "Q4_1", "F16"],
)
def test_a_file_that_rounds_gives_its_rounded_numbers_and_says_how_few_bits_they_had(
    tmp_path: Path, model: PreTrainedModel, stored: GGMLQuantizationType, bits: float
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    contents = from_gguf.convert(write_gguf(tmp_path / "tiny.gguf", model, stored=stored), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        rounded = quants.dequantize(quants.quantize(model.state_dict()[name].numpy(), stored), stored)
        assert np.array_equal(tensors[name].numpy(), rounded.astype(np.float32)), name
    vectors = sum(tensor.numel() for tensor in tensors.values() if tensor.ndim == 1)
    expected = (bits * (contents.num_weights - vectors) + 32 * vectors) / contents.num_weights
    assert contents.bits_per_weight == pytest.approx(expected)
    assert f"weights of {expected:.1f} bits" in contents.described and stored.name in contents.described


def test_an_output_layer_of_its_own_stays_one(tmp_path: Path) -> None:
    model = tiny_llama(tied=False)
    (tmp_path / "folder").mkdir()
    from_gguf.convert(write_gguf(tmp_path / "tiny.gguf", model), tmp_path / "folder")
    with torch.inference_mode():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "folder")(IDS).logits, model(IDS).logits)


# --- Tokenizer ----------------------------------------------------------------------------------------------------------


def test_the_tokenizer_has_the_files_ids_and_its_template(made: tuple[Path, GgufContents]) -> None:
    tokenizer = Tokenizer.load(made[0])
    assert tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.encode("the") == (TOKENS.index("th"), *ids("e"))
    assert tokenizer.encode("<|start|>a<|stop|>") == (START, *ids("a"), STOP)
    asked = tokenizer.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert asked == "<|start|>user\nhi<|stop|>\n<|start|>assistant\n"
    assert tokenizer.eos_token_ids == {END}


TEXTS = ("a\n\n1", "x  17", "12 and 345", " the  end\n\n", "<|start|>7")


def test_digits_are_cut_off_first_where_the_model_learnt_it_so(made: tuple[Path, GgufContents]) -> None:
    """Without that the second line break would go with the 1."""
    tokenizer = Tokenizer.load(made[0])
    assert tokenizer.encode("a\n\n1") == (*ids("a"), TOKENS.index("ĊĊ"), *ids("1"))
    assert tokenizer.encode("x  17") == (*ids("x"), TOKENS.index("ĠĠ"), *ids("17"))


def test_a_vocabulary_that_is_cut_as_gpt2s_stays_so(tmp_path: Path, model: PreTrainedModel) -> None:
    (tmp_path / "folder").mkdir()
    from_gguf.convert(write_gguf(tmp_path / "tiny.gguf", model, pre="gpt-2"), tmp_path / "folder")
    assert Tokenizer.load(tmp_path / "folder").encode("a\n\n1") == tuple(ids("a\n\n1"))


def test_transformers_reads_the_same_tokens(made: tuple[Path, GgufContents]) -> None:
    ours, theirs = Tokenizer.load(made[0]), AutoTokenizer.from_pretrained(made[0])
    for text in TEXTS:
        assert theirs(text, add_special_tokens=False).input_ids == list(ours.encode(text)), text
    chat = [{"role": "user", "content": "hi"}]
    assert theirs.apply_chat_template(chat, tokenize=False) == ours.render(chat)


def test_the_end_of_a_turn_ends_an_answer_as_the_end_of_the_text_does(tmp_path: Path, model: PreTrainedModel) -> None:
    (tmp_path / "folder").mkdir()
    from_gguf.convert(write_gguf(tmp_path / "tiny.gguf", model, ends={"eot": STOP}), tmp_path / "folder")
    assert Tokenizer.load(tmp_path / "folder").eos_token_ids == {END, STOP}


# --- What is wrong with a file --------------------------------------------------------------------------------------------


def test_an_unknown_architecture_is_named(tmp_path: Path, model: PreTrainedModel) -> None:
    said = refused(write_gguf(tmp_path / "odd.gguf", model, architecture="oddball"))
    assert "'oddball'" in said and "odd.gguf" in said and said.endswith("give the model as a folder of safetensors.")


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5, 0.999])
def test_a_truncated_file_is_no_model(tmp_path: Path, model: PreTrainedModel, share: float) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", model).read_bytes()
    (tmp_path / "part.gguf").write_bytes(whole[: int(len(whole) * share)])
    said = refused(tmp_path / "part.gguf")
    assert "no whole GGUF file" in said and said.endswith("copy or fetch it again.")


@pytest.mark.parametrize("contents", [b"", b"GG", b"PK\x03\x04 a wheel", b"{}"])
def test_another_file_with_that_name_is_no_gguf(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "other.gguf").write_bytes(contents)
    assert "does not begin as GGUF files do" in refused(tmp_path / "other.gguf")


def test_a_tensor_that_would_be_passed_over_refuses_the_file(tmp_path: Path, model: PreTrainedModel) -> None:
    """Llama 3's positions are scaled by a tensor that transformers leaves out without a word."""
    file = write_gguf(tmp_path / "long.gguf", model, extra_tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    said = refused(file)
    assert "rope_freqs.weight" in said and "compute something else" in said


def test_scaled_positions_that_would_be_passed_over_refuse_the_file(tmp_path: Path, model: PreTrainedModel) -> None:
    assert "it scales positions (yarn)" in refused(write_gguf(tmp_path / "long.gguf", model, scaled="yarn"))


def test_a_second_copy_of_the_embeddings_and_a_layer_that_guesses_ahead_are_no_part_of_the_model(model: PreTrainedModel) -> None:
    names = ("blk.2.nextn.eh_proj.weight", "output.weight", "blk.1.attn_q.weight", "output_norm.weight", "rope_freqs.weight")
    assert [from_gguf._is_spare(name, model) for name in names] == [True, True, False, False, False]
    assert not from_gguf._is_spare("output.weight", tiny_llama(tied=False))


def test_a_tokenizer_that_cuts_text_in_an_unknown_way_refuses_the_file(tmp_path: Path, model: PreTrainedModel) -> None:
    said = refused(write_gguf(tmp_path / "cut.gguf", model, pre="by-moonlight"))
    assert "'by-moonlight'" in said and "tokenizer.json" in said


def test_a_part_of_a_model_names_how_to_join_it(tmp_path: Path, model: PreTrainedModel) -> None:
    said = refused(write_gguf(tmp_path / "tiny-00001-of-00003.gguf", model, parts=3))
    assert "one of 3 parts" in said and "gguf-split --merge" in said


def test_a_folder_that_would_not_fit_is_not_begun(tmp_path: Path) -> None:
    """A file that is long only by its name for it: 5.5e12 weights of 1.56 bits, which would be 22 TB as float32."""
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"it takes 21,990,233 MB, and [\d,]+ MB are free there; free some space") as caught:
        from_gguf.convert(write_vast_gguf(tmp_path / "vast.gguf", (5 * 2**20, 2**20)), folder)
    assert "\n" not in str(caught.value) and not list(folder.iterdir())
