"""What is known of a model without torch: its sizes from its configuration alone, for planning, dry
runs and buffer layouts; the fingerprint of a set of weights, which is what a version must hash to,
wherever its bytes lie (I7); and low-rank adapters as files, in PEFT's own format, with the names of
their tensors.

A model folder with `adapter/adapter_config.json` and `adapter/adapter_model.safetensors` in it is
that model with these adapters.

XXH3 reads bytes as fast as memory gives them: 14 GB/s on one core beside 7.7 for a copy, 1.4 for
SHA-256 with the processor's own instructions and 0.7 for BLAKE2b. It finds what is torn, lost or
mixed up in 128 bits; it is no seal against forgers, who would need the token of whoever publishes.
It releases the interpreter lock while it hashes, so decoding goes on.
"""

import hashlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import msgspec
import xxhash
from safetensors import SafetensorError, safe_open

from midflight.errors import ConfigError, ModelNotFound, nearest
from midflight.types import TensorSpec

FAMILIES = frozenset({"llama", "ministral", "mistral", "qwen2", "qwen3"})
"""Architectures that are plain (`models.plain`) and nothing else. Others have the same parts, and
multiply something in between.
"""

TURNED_BYTES = 2**26
"""Up to this size a plain model's weights lie [in, out] in an engine's memory on a CPU: products of
few rows then take up to half the time (MKL, AVX2). Of a larger model they are packed."""
PACKED_BYTES = 2**32
"""Up to this size an engine multiplies with packed copies of a plain model's weights on a CPU. Of a
larger model a second copy, and a third while a version comes in, would take more memory than the
time is worth."""

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one element, by safetensors name."""

DTYPE_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The names of configuration files (torch's) to those of safetensors."""


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype, by torch's or safetensors' name; `ConfigError` when
    unknown.
    """
    name = DTYPE_NAMES.get(dtype, dtype)
    if name not in DTYPE_BYTES:
        raise ConfigError(f"model dtype {dtype!r} is unknown.{nearest(dtype, DTYPE_NAMES)}")
    return DTYPE_BYTES[name]


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return element_bytes(dtype) * math.prod(shape)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The numbers that memory follows from. Without `stored` counts are those of Qwen3: gated
    feed-forward, normalised queries and keys.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    tied: bool = True
    stored: int = 0
    """Numbers in the files of its weights; 0 where there are none yet."""
    family: str = ""
    """`model_type` of its configuration."""

    @property
    def is_plain(self) -> bool:
        return self.family in FAMILIES

    @property
    def num_heads_of_product(self) -> int:
        """The number of heads of queries, keys and values together."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def num_joined_parameters(self) -> int:
        """The parameters of the two products of a layer that have a norm before them."""
        return self.hidden_size * (
            self.num_heads_of_product * self.head_dim + 2 * self.intermediate_size
        )

    def activations_per_layer(self, *, by_hand: bool) -> int:
        """Numbers of a token that a layer keeps for the backward pass.

        By hand (`trainer.model.plain`): two normed states; queries, keys and values, and keys and
        values once more for rows that go on from shared ones; what attention found, as it made it
        and as the next product reads it; gate and up. By modules: as `transformers`' Llama does.
        """
        if by_hand:
            heads = self.num_heads_of_product + 2 * self.num_heads + 2 * self.num_kv_heads
            return 2 * self.hidden_size + heads * self.head_dim + 2 * self.intermediate_size
        return 14 * self.hidden_size + 3 * self.intermediate_size

    @property
    def outputs_per_layer(self) -> int:
        """Numbers of a token that the products of a layer make."""
        return (
            self.num_heads_of_product * self.head_dim
            + 2 * self.hidden_size
            + 2 * self.intermediate_size
        )

    @property
    def num_layer_parameters(self) -> int:
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        norms = 2 * self.hidden_size + 2 * self.head_dim
        return attention + 3 * self.hidden_size * self.intermediate_size + norms

    @property
    def num_parameters(self) -> int:
        if self.stored:
            return self.stored
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return embeddings + self.num_layers * self.num_layer_parameters + self.hidden_size

    def packed_bytes(self, dtype: str) -> int:
        """The size of the packed copies that an engine on a CPU multiplies with. An output layer
        that is tied to the embeddings has a copy too.
        """
        packs = (
            self.is_plain
            and dtype == "float32"
            and TURNED_BYTES < self.weight_bytes(dtype) <= PACKED_BYTES
        )
        return self.weight_bytes(dtype) if packs else 0

    def joined_bytes(self, dtype: str) -> int:
        """The size of an engine's second copy of those weights that are multiplied as one: it lays
        them side by side while the version that they come from is still there. Weights that are
        packed are not laid out, and the copy of a small model is not counted."""
        joins = (
            self.is_plain
            and self.weight_bytes(dtype) > TURNED_BYTES
            and not self.packed_bytes(dtype)
        )
        return element_bytes(dtype) * self.num_layers * self.num_joined_parameters if joins else 0

    def num_adapter_parameters(self, rank: int) -> int:
        """Of low-rank adapters of all linear layers but the output layer."""
        attention = 4 * self.hidden_size + 2 * self.head_dim * (self.num_heads + self.num_kv_heads)
        return (
            self.num_layers * rank * (attention + 3 * (self.hidden_size + self.intermediate_size))
        )

    def weight_bytes(self, dtype: str) -> int:
        return self.num_parameters * element_bytes(dtype)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes(dtype)


_NAMES = {
    "vocab_size": (),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "n_ctx"),
}
"""What older configurations call them."""
_TOWERS = ("text_config", "llm_config", "language_config", "thinker_config")
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def sizes_of(folder: Path) -> ModelSizes:
    """Sizes of a Hugging Face model folder, read from its `config.json`; of one that also reads
    images, those of its text tower. Parameters are counted in the headers of its weights, all of
    them; the KV bytes are exact for all with plain key/value heads.
    """
    whole = read_config(folder)
    text = _text(whole)
    if any(_int(text, name, 0) == 0 for name in _NEEDED):
        text = _told(folder, (folder / "config.json").stat().st_mtime_ns)
    missing = [name for name in _NEEDED[:3] if _int(text, name, 0) == 0]
    if missing:
        raise ModelNotFound(
            f"reading the sizes of {folder}: config.json lacks {', '.join(missing)}; give the "
            "folder of a decoder-only model."
        )
    hidden = _int(text, "hidden_size", 0)
    heads = _int(text, "num_attention_heads", 1)
    return ModelSizes(
        vocab_size=_int(text, "vocab_size", 0),
        hidden_size=hidden,
        intermediate_size=_int(text, "intermediate_size", 4 * hidden),
        num_layers=_int(text, "num_hidden_layers", 0),
        num_heads=heads,
        num_kv_heads=_int(
            text, "num_key_value_heads", 1 if text.get("multi_query") is True else heads
        ),
        head_dim=_int(text, "head_dim", hidden // heads),
        max_context=max_positions(whole),
        tied=text.get("tie_word_embeddings", whole.get("tie_word_embeddings")) is True,
        stored=_num_stored(folder),
        family=str(text.get("model_type", whole.get("model_type", ""))),
    )


def _num_stored(folder: Path) -> int:
    """Numbers in the safetensors files of a folder; reads headers only. What cannot be read is said
    where the model is loaded.
    """
    total = 0
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "np") as file:
                total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError):
            return 0
    return total


def reads_more_than_text(folder: Path) -> bool:
    """Whether a folder's model has a text tower beside others, such as one for images."""
    config = read_config(folder)
    return _text(config) is not config


def max_positions(config: Mapping[str, object]) -> int:
    """The longest context that `config.json` states, of the text tower where there are several; 0
    where it states none.
    """
    return _int(
        _text(config), "max_position_embeddings", _int(config, "max_position_embeddings", 0)
    )


def _text(config: Mapping[str, object]) -> Mapping[str, object]:
    """The configuration of the text tower."""
    inner = next((part for name in _TOWERS if isinstance(part := config.get(name), dict)), None)
    return config if inner is None else _text(cast("Mapping[str, object]", inner))


_TELL = (
    "import json, sys; from transformers import AutoConfig; c = AutoConfig.from_pretrained(sys.argv[1]).get_text_config(); \
print(json.dumps({**c.to_dict(), **{n: getattr(c, n, None) for n in sys.argv[2:]}}, default=str))"
)


@cache
def _told(folder: Path, changed: int) -> dict[str, object]:
    """What `transformers` makes of a configuration that leaves out what it has by default, in a
    process of its own, because this one may do without torch.
    """
    command = [sys.executable, "-c", _TELL, str(folder), *_NAMES]
    done = subprocess.run(command, capture_output=True, check=False)
    return cast("dict[str, object]", json.loads(done.stdout)) if done.returncode == 0 else {}


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The names that configurations have for how many a layer has."""


def num_choices_of(folder: Path) -> int:
    """Experts that a token of a mixture is sent to, of all layers, as its servers count them; 0
    where its configuration does not say.
    """
    config = _text(read_config(folder))
    return _int(config, "num_hidden_layers", 0) * _int(config, "num_experts_per_tok", 0)


def num_experts_of(folder: Path) -> int:
    """Of a layer of a mixture; 0 for other models."""
    config = _text(read_config(folder))
    return next(
        (found for name in _EXPERTS if isinstance(found := config.get(name), int) and found > 1), 0
    )


def read_config(folder: Path) -> dict[str, object]:
    """`config.json` of a model folder; `ModelNotFound` naming what is missing."""
    if not folder.is_dir():
        raise ModelNotFound(
            f"loading a model: no folder {str(folder)!r}; set model.path to a Hugging Face model "
            "folder."
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(
            f"loading a model: {str(folder)!r} has no config.json; model.path must be a Hugging "
            "Face model folder."
        )
    try:
        config: object = json.loads(path.read_text())
    except ValueError as error:
        raise ModelNotFound(
            f"loading a model: {str(path)!r} is not JSON ({error}); export or download the model "
            "again."
        ) from error
    if not isinstance(config, dict):
        raise ModelNotFound(
            f"loading a model: {str(path)!r} holds no JSON object; export or download the model "
            "again."
        )
    return cast(dict[str, object], config)


def _int(config: Mapping[str, object], key: str, default: int) -> int:
    """A size by its name, or by one of those that older configurations have for it."""
    found = [
        value for name in (key, *_NAMES.get(key, ())) if isinstance(value := config.get(name), int)
    ]
    return found[0] if found else default


# --- Fingerprints ---------------------------------------------------------------------------------


Buffer = bytes | bytearray | memoryview


def fingerprint(specs: Iterable[TensorSpec], buffer: Buffer, *, threads: int = 1) -> str:
    """Of names, dtypes, shapes and bytes; offsets and order do not count. `buffer` holds every
    tensor at its spec's offset.

        SHA-256(for each tensor by name: for each PIECE of its bytes: XXH3-128(piece); name, dtype,
        shape), as hex

    Pieces are hashed apart, so that `threads` can share the work, and no tensor's end can pass for
    another's beginning.
    """
    view = memoryview(buffer).cast("B")
    specs = tuple(specs)
    return fingerprint_views(
        specs, {s.name: view[s.offset : s.offset + s.num_bytes] for s in specs}, threads=threads
    )


def fingerprint_views(
    specs: Iterable[TensorSpec], views: Mapping[str, memoryview], *, threads: int = 1
) -> str:
    """The same over one view per tensor: equal to `fingerprint` of any buffer that holds these
    bytes.

    With one thread each view is asked for when it is hashed, and not kept.
    """
    ordered = sorted(specs, key=lambda s: s.name)
    return _total(zip(ordered, _digests((views[s.name] for s in ordered), threads), strict=True))


def fingerprint_digests(specs: Iterable[TensorSpec], digests: Mapping[str, Sequence[bytes]]) -> str:
    """The same from the digests (`piece_digest`) of each tensor's pieces in order, which others
    hashed: equal if they were cut every `PIECE` bytes. A tensor cut elsewhere too, where one
    trainer rank's rows end, has a fingerprint of its own."""
    return _total(
        (spec, digests.get(spec.name, ())) for spec in sorted(specs, key=lambda s: s.name)
    )


def _total(hashed: Iterable[tuple[TensorSpec, Sequence[bytes]]]) -> str:
    total = hashlib.sha256()
    for spec, digests in hashed:
        total.update(b"".join(digests))
        total.update(f"{spec.name}\0{spec.dtype}\0{','.join(map(str, spec.shape))}\0".encode())
    return total.hexdigest()


PIECE = 16 * 2**20
"""Bytes that are hashed at once: a thread's share of a large tensor."""


def _digests(views: Iterable[memoryview], threads: int) -> Iterator[list[bytes]]:
    if threads <= 1:
        yield from ([*map(piece_digest, _pieces(view))] for view in views)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="fingerprint") as pool:
        under_way = [
            [pool.submit(piece_digest, piece) for piece in _pieces(view)] for view in views
        ]
        yield from ([digest.result() for digest in pieces] for pieces in under_way)


def _pieces(view: memoryview) -> Iterator[memoryview]:
    return (view[start : start + PIECE] for start in range(0, len(view), PIECE))


def piece_digest(piece: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(piece)


# --- Low-rank adapters as files -------------------------------------------------------------------


FOLDER = "adapter"
"""The folder of the adapters in a model folder. They are not beside the base's weights, where
`transformers` would load them unasked.
"""
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_IN_MEMORY = re.compile(r"(.*)\.(lora_[AB])\.default\.weight")
_IN_FILES = re.compile(re.escape(_PREFIX) + r"(.*)\.lora_A\.weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """Beside each target's W are A [rank, in] and B [out, rank]: it computes W x + scale B A x."""

    folder: Path
    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The last words of the adapted layers' names."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS


class _AdapterConfig(msgspec.Struct, frozen=True):
    """The fields that we compute by, and those that would make it another kind of model, which is
    refused.
    """

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    bias: str = "none"
    use_dora: bool = False
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: tuple[str, ...] | None = None

    def is_plain(self) -> bool:
        odd = (
            self.use_dora
            or self.use_rslora
            or self.fan_in_fan_out
            or self.rank_pattern
            or self.alpha_pattern
            or self.modules_to_save
        )
        return self.peft_type == "LORA" and self.bias == "none" and self.r > 0 and not odd


def adapter_of(model: Path) -> Adapter | None:
    """The adapters of a model folder, `None` where it has none. `ModelNotFound` where they are of a
    kind that is not served.
    """
    folder = model / FOLDER
    if not (folder / CONFIG).is_file():
        return None
    remedy = (
        "give adapters as PEFT's LoraConfig writes them, with one rank, one alpha and a list "
        "of targets"
    )
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=_AdapterConfig)
    except (msgspec.DecodeError, OSError) as error:
        raise ModelNotFound(f"reading {folder / CONFIG}: {error}; {remedy}.") from error
    if not config.is_plain():
        raise ModelNotFound(
            f"reading {folder / CONFIG}: these are not plain low-rank adapters; {remedy}."
        )
    return Adapter(folder, config.r, config.lora_alpha, config.target_modules)


def served_weights(model: Path) -> tuple[Path, ...]:
    """The files whose tensors are given to engines with each version: the adapters' where there are
    any, else the model's.
    """
    adapter = adapter_of(model)
    return tuple(sorted(model.glob("*.safetensors"))) if adapter is None else (adapter.weights,)


def adapter_name(name: str) -> str | None:
    """PEFT's name, in files and on the wire, of a tensor in memory; `None` for tensors of the
    base.
    """
    found = _IN_MEMORY.fullmatch(name)
    return None if found is None else f"{_PREFIX}{found[1]}.{found[2]}.weight"


def base_name(name: str) -> str:
    """The name in files of a tensor of the base, which in memory lies one level deeper where it is
    adapted.
    """
    return name.replace(".base_layer.", ".")


def adapted_layers(names: list[str]) -> list[str]:
    """The layers that tensors of these names adapt, in their order."""
    return [found[1] for name in names if (found := _IN_FILES.fullmatch(name))]


def factor_names(layer: str) -> tuple[str, str]:
    """The names of A and B of a layer, in files."""
    return f"{_PREFIX}{layer}.lora_A.weight", f"{_PREFIX}{layer}.lora_B.weight"
