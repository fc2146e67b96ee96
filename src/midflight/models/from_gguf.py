"""Conversion of a GGUF file into a Hugging Face model folder with the same numbers in float32,
which plain `transformers` loads.

    python -m midflight.models.from_gguf FILE DIR

writes into the folder DIR, and prints what the file holds, or what is wrong with it, as JSON.

`transformers` reads the file. It would read some files wrongly without a warning: those with
tensors and scaled positions that it passes over, and with pre-tokenizers that it does not know.
This module refuses them.
"""

import copy
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import transformers
from gguf import GGUFReader, ReaderTensor
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from midflight.errors import MidflightError, ModelNotFound, disk_full
from midflight.models.atomic import check_room
from midflight.models.gguf_folders import GgufContents
from midflight.models.load import check_folder, save_model
from midflight.models.tokenizers import check_tokenizer

Metadata = Mapping[str, Any]

BYTE_LEVEL = "gpt2"
"""The name that files have for a byte-level vocabulary. Its pre-tokenizer has a name in them
too.
"""
DIGITS_APART = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
"""Pre-tokenizers that cut every digit off before they cut as GPT-2's does."""
AS_GPT2 = frozenset(
    {"gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "phi-2"}
)
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Tokens that end an answer. They end a text, a turn and a message."""
_OF_READING = ("backend", "is_local", "local_files_only", "tokenizer_class")
"""Keys of a tokenizer's configuration that record how it was read, or by which class. That class
would replace parts of the file by its own.
"""


def convert(file: Path, folder: Path) -> GgufContents:
    """Writes the model of `file` into an existing folder. Raises `ModelNotFound` with the reason if
    the file cannot be converted, and `ConfigError` if there is no room.
    """
    reader = opened(file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    contents = _contents(reader, metadata)
    _check_whole(file, metadata)
    check_room(folder, 4 * contents.num_weights)
    with _alone(file) as place:
        model = _loaded(file, place, contents.architecture)
        _check_all_is_read(file, reader.tensors, model)
        _check_positions(file, metadata, model)
        model.generation_config = _generation(metadata)
        save_model(model, folder)
        _save_tokenizer(file, place, metadata, folder)
    check_folder(folder)
    check_tokenizer(folder)
    return contents


# --- The file -------------------------------------------------------------------------------------


def opened(file: Path) -> GGUFReader:
    """A reader of the file. Raises `ModelNotFound` if it is no GGUF file, or not all of one."""
    with file.open("rb") as beginning:
        if beginning.read(4) != b"GGUF":
            raise ModelNotFound(
                f"reading {str(file)!r}: it does not begin as GGUF files do; give a GGUF file or a "
                "Hugging Face model folder."
            )
    try:
        return GGUFReader(file)
    except Exception as error:  # a file that ends too early may fail in any way
        raise ModelNotFound(
            f"reading {str(file)!r}: it is no whole GGUF file ({_first_line(error)}); its end may "
            "be missing: copy or fetch it again."
        ) from error


def _contents(reader: GGUFReader, metadata: Metadata) -> GgufContents:
    return GgufContents(
        str(metadata.get("general.architecture")),
        sum(int(tensor.n_elements) for tensor in reader.tensors),
        sum(int(tensor.n_bytes) for tensor in reader.tensors),
        Counter(tensor.tensor_type.name for tensor in reader.tensors),
    )


def _check_whole(file: Path, metadata: Metadata) -> None:
    parts = metadata.get("split.count", 1)
    if parts > 1:
        raise ModelNotFound(
            f"reading {str(file)!r}: it is one of {parts} parts of a model; join them with "
            "llama.cpp's gguf-split --merge."
        )


# --- Weights --------------------------------------------------------------------------------------


@contextmanager
def _alone(file: Path) -> Generator[Path]:
    """A folder in which the file is alone, as `model.gguf`: other files beside it would be read
    too.
    """
    with tempfile.TemporaryDirectory(prefix="midflight-") as place:
        (Path(place) / "model.gguf").symlink_to(file.resolve())
        yield Path(place)


def _loaded(file: Path, place: Path, architecture: str) -> PreTrainedModel:
    """The model with all its weights in float32."""
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            str(place),
            gguf_file="model.gguf",
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # a stranger's file may fail in any way
        raise ModelNotFound(
            f"reading {str(file)!r}: transformers {transformers.__version__} makes no model of its "
            f"architecture, {architecture!r} ({_first_line(error)}); give the model as a folder of "
            "safetensors."
        ) from error
    # The stubs know only the plain return type; with output_loading_info it is a pair.
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelNotFound(
            f"reading {str(file)!r}: {len(missing)} tensors are missing, the first {missing[0]!r}; "
            "give the model as a folder of safetensors."
        )
    return _plain(model)


def _plain(loaded: PreTrainedModel) -> PreTrainedModel:
    """The same tensors in a model that knows of no file: a model that was read from GGUF refuses to
    be saved.
    """
    config = copy.deepcopy(loaded.config)
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    with torch.device("meta"):
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    return plain


def _check_all_is_read(file: Path, tensors: Sequence[ReaderTensor], model: PreTrainedModel) -> None:
    """Raises `ModelNotFound` unless the model has as many numbers as the file. Numbers that are
    left out may be the scales of its positions.
    """
    in_model = sum(tensor.numel() for tensor in _tensors(model))
    in_file = sum(int(tensor.n_elements) for tensor in tensors if not _is_spare(tensor.name, model))
    if in_file == in_model:
        return
    usual = ("blk.", "token_embd.", "output")
    odd = [tensor.name for tensor in tensors if not tensor.name.startswith(usual)]
    named = f" (it has {', '.join(odd)})" if odd else ""
    raise ModelNotFound(
        f"reading {str(file)!r}: {in_file:,} numbers are in it, and {in_model:,} in the model "
        f"that transformers {transformers.__version__} makes of it{named}, so it would compute "
        "something else; give the model as a folder of safetensors."
    )


def _tensors(model: PreTrainedModel) -> list[Tensor]:
    """Each tensor once, even if it has two names."""
    by_identity = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return list(by_identity.values())


def _is_spare(name: str, model: PreTrainedModel) -> bool:
    """True if a model computes the same without a tensor. That holds for a second copy of its
    embeddings, and for layers that only guess ahead.
    """
    config = model.config.get_text_config()
    if name == "output.weight":
        return bool(config.tie_word_embeddings)
    return name.startswith(f"blk.{config.num_hidden_layers}.")


def _check_positions(file: Path, metadata: Metadata, model: PreTrainedModel) -> None:
    """Raises `ModelNotFound` if the file asks for scaled positions and the model does not scale
    them.
    """
    kind = metadata.get(f"{metadata.get('general.architecture')}.rope.scaling.type", "none")
    if kind != "none" and not _scales_positions(model):
        raise ModelNotFound(
            f"reading {str(file)!r}: it scales positions ({kind}), which transformers "
            f"{transformers.__version__} does not read from GGUF, so it would compute something "
            "else; give the model as a folder of safetensors."
        )


def _scales_positions(model: PreTrainedModel) -> bool:
    found = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    rope = cast("Mapping[str, Any]", found)
    for part in (rope, *rope.values()):
        if isinstance(part, Mapping) and part.get("rope_type", "default") != "default":
            return True
    return False


def _generation(metadata: Metadata) -> GenerationConfig:
    """A configuration with the tokens that end an answer: the first of them to come ends it."""
    numbers = {metadata.get(f"tokenizer.ggml.{name}") for name in _ENDS}
    ends = sorted(number for number in numbers if number is not None)
    return GenerationConfig(
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
    )


# --- Tokenizer ------------------------------------------------------------------------------------


def _save_tokenizer(file: Path, place: Path, metadata: Metadata, folder: Path) -> None:
    try:
        loaded = AutoTokenizer.from_pretrained(
            str(place), gguf_file="model.gguf", local_files_only=True
        )
    except Exception as error:  # a stranger's file may fail in any way
        raise ModelNotFound(
            f"reading {str(file)!r}: transformers {transformers.__version__} makes no tokenizer of "
            f"it ({_first_line(error)}); give the model as a folder of safetensors."
        ) from error
    tokenizer = cast(PreTrainedTokenizerFast, loaded)
    _cut_as_trained(file, metadata, tokenizer)
    tokenizer.save_pretrained(folder)
    _remove_tokens_of_the_class(folder / "tokenizer.json", len(metadata["tokenizer.ggml.tokens"]))
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, value in json.loads(path.read_text()).items():
        if name not in _OF_READING:
            config[name] = value
    path.write_text(json.dumps(config, indent=2) + "\n")


def _remove_tokens_of_the_class(path: Path, num_tokens: int) -> None:
    """Removes the special tokens that the class which read the tokenizer added after the file's
    tokens: the model has no embeddings for them.
    """
    written = json.loads(path.read_text())
    written["added_tokens"] = [
        token for token in written["added_tokens"] if token["id"] < num_tokens
    ]
    path.write_text(json.dumps(written, ensure_ascii=False))


def _cut_as_trained(file: Path, metadata: Metadata, tokenizer: PreTrainedTokenizerFast) -> None:
    """Cuts text, before it is merged into tokens, as the model's own tokenizer does. Other cuts
    give other tokens for the same text.
    """
    kind = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("tokenizer.ggml.model") != BYTE_LEVEL:
        return
    if kind in AS_GPT2 or kind in GGUF_PRE_TOKENIZER_SPLITS:
        return
    if kind not in DIGITS_APART:
        raise ModelNotFound(
            f"reading {str(file)!r}: how its tokenizer cuts text ({kind!r}) is not known, so it "
            "would give other tokens than the model has learnt; give the model as a folder with "
            "its own tokenizer.json."
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".;:")


def main() -> None:
    """Prints what the file holds, or what is wrong with it."""
    with redirect_stdout(sys.stderr):
        try:
            found = convert(Path(sys.argv[1]), Path(sys.argv[2]))
        except MidflightError as error:
            found = str(error)
        except Exception as error:
            if disk_full(error) is None:
                raise
            found = (
                f"converting {sys.argv[1]!r}: there is no more room for its model folder; free "
                "some space, or choose another place."
            )
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
