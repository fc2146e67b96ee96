"""A model without torch: its sizes, and the fingerprint of its weights.

Sizes come from the configuration alone, for planning, dry runs and buffer layouts. A version must
hash to its fingerprint, wherever its bytes lie (I7).

XXH3 reads bytes as fast as memory gives them: 14 GB/s on one core beside 7.7 for a copy, 1.4 for
SHA-256 with the processor's own instructions and 0.7 for BLAKE2b. In 128 bits it finds bytes that
are torn, lost or mixed up. It does not protect against forgery, for which the publisher's token is
needed. It releases the interpreter lock while it hashes, so decoding goes on.
"""

import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import xxhash
from safetensors import SafetensorError, safe_open

from midflight.errors import ConfigError, ModelNotFound, nearest
from midflight.types import TensorSpec

PACKED_AT_LEAST = 2**18
"""The numbers in the weights of a linear layer from which on an engine on a CPU multiplies with a
copy in oneDNN's own order (`engines.embedded.packed_layers`). A call of oneDNN costs 20
microseconds, in which MKL multiplies smaller weights with a few rows.
"""
PACKED_AT_MOST = 2**32
"""The bytes of a model up to which it has such copies. For a larger model, a second copy, and a
third while a version comes in, would take more memory than the time is worth.
"""

BUCKET_BYTES = 64 * 2**20
"""The piece of a version that travels at once. It is large enough that a broadcast costs nothing
beside its bytes, and small enough to take a second on a slow network.
"""

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
"""Names of safetensors by those of configuration files, which are torch's."""


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype, by torch's or safetensors' name. Raises `ConfigError` if it
    is unknown.
    """
    name = DTYPE_NAMES.get(dtype, dtype)
    if name not in DTYPE_BYTES:
        raise ConfigError(f"model dtype {dtype!r} is unknown.{nearest(dtype, DTYPE_NAMES)}")
    return DTYPE_BYTES[name]


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return element_bytes(dtype) * math.prod(shape)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The numbers that determine the memory of a model. Without `stored`, parameters are counted as
    in Qwen3, with gated feed-forward and normalised queries and keys.
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
    """Numbers in the files of its weights. It is 0 if there are none yet."""

    @property
    def num_heads_of_product(self) -> int:
        """The number of heads of queries, keys and values together."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def activations_per_layer(self) -> int:
        """Numbers of a token that a layer keeps for the backward pass, as those of `transformers`'
        Qwen3 do: of each of two norms its input, the normed numbers and these times its scale;
        queries, keys and values; of the norms of their heads inputs and normed numbers; keys and
        values once more for rows that go on from shared ones; the result of attention, as it was
        made and as the next product reads it; gate, its activation, up and their product.
        """
        heads = 5 * self.num_heads + 6 * self.num_kv_heads
        return 6 * self.hidden_size + heads * self.head_dim + 4 * self.intermediate_size

    @property
    def outputs_per_layer(self) -> int:
        """Numbers of a token that the products of a layer make."""
        heads = self.num_heads_of_product * self.head_dim
        return heads + 2 * self.hidden_size + 2 * self.intermediate_size

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
        """The size of the copies that an engine on a CPU multiplies with. An output layer that is
        tied to the embeddings has a copy too.
        """
        is_too_large = self.weight_bytes(dtype) > PACKED_AT_MOST
        if dtype != "float32" or is_too_large:
            return 0
        queries = self.hidden_size * self.head_dim * self.num_heads
        keys = self.hidden_size * self.head_dim * self.num_kv_heads
        gate = self.hidden_size * self.intermediate_size
        in_layer = (queries, queries, keys, keys, gate, gate, gate)
        packed = self.num_layers * sum(size for size in in_layer if size >= PACKED_AT_LEAST)
        output = self.vocab_size * self.hidden_size
        if output >= PACKED_AT_LEAST:
            packed += output
        return element_bytes(dtype) * packed

    def num_adapter_parameters(self, rank: int) -> int:
        """The parameters of low-rank adapters of all linear layers but the output layer."""
        attention = 4 * self.hidden_size + 2 * self.head_dim * (self.num_heads + self.num_kv_heads)
        feed_forward = 3 * (self.hidden_size + self.intermediate_size)
        return self.num_layers * rank * (attention + feed_forward)

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
"""Names of sizes, each with those that older configurations have for it."""
_TOWERS = ("text_config", "llm_config", "language_config", "thinker_config")
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def sizes_of(folder: Path) -> ModelSizes:
    """Sizes of a Hugging Face model folder, read from its `config.json`; of its text tower, if the
    model also reads images. All parameters are counted, in the headers of its weights. The KV bytes
    are exact for all models with plain key/value heads.
    """
    whole = read_config(folder)
    text = _text(whole)
    if any(_int(text, name, 0) == 0 for name in _NEEDED):
        text = _filled_in(folder, (folder / "config.json").stat().st_mtime_ns)
    missing = [name for name in _NEEDED[:3] if _int(text, name, 0) == 0]
    if missing:
        raise ModelNotFound(
            f"reading the sizes of {folder}: config.json lacks {', '.join(missing)}; give the "
            "folder of a decoder-only model."
        )
    hidden = _int(text, "hidden_size", 0)
    heads = _int(text, "num_attention_heads", 1)
    default_kv_heads = 1 if text.get("multi_query") is True else heads
    tied = text.get("tie_word_embeddings", whole.get("tie_word_embeddings")) is True
    return ModelSizes(
        vocab_size=_int(text, "vocab_size", 0),
        hidden_size=hidden,
        intermediate_size=_int(text, "intermediate_size", 4 * hidden),
        num_layers=_int(text, "num_hidden_layers", 0),
        num_heads=heads,
        num_kv_heads=_int(text, "num_key_value_heads", default_kv_heads),
        head_dim=_int(text, "head_dim", hidden // heads),
        max_context=max_positions(whole),
        tied=tied,
        stored=_num_stored(folder),
    )


def _num_stored(folder: Path) -> int:
    """Numbers in the safetensors files of a folder, from their headers. It is 0 if one cannot be
    read; loading the model reports the fault.
    """
    total = 0
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "np") as file:
                names = file.keys()  # it is no mapping
                total += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        except (OSError, SafetensorError):
            return 0
    return total


def reads_more_than_text(folder: Path) -> bool:
    """True if a folder's model has a text tower beside others, such as one for images."""
    config = read_config(folder)
    return _text(config) is not config


def max_positions(config: Mapping[str, object]) -> int:
    """The longest context that `config.json` states, for the text tower if there are several
    towers. It is 0 if `config.json` states none.
    """
    of_whole = _int(config, "max_position_embeddings", 0)
    return _int(_text(config), "max_position_embeddings", of_whole)


def _text(config: Mapping[str, object]) -> Mapping[str, object]:
    """The configuration of the text tower."""
    for name in _TOWERS:
        inner = config.get(name)
        if isinstance(inner, dict):
            return _text(cast("Mapping[str, object]", inner))
    return config


_TELL = """
import json, sys
from transformers import AutoConfig

config = AutoConfig.from_pretrained(sys.argv[1]).get_text_config()
named = {name: getattr(config, name, None) for name in sys.argv[2:]}
print(json.dumps({**config.to_dict(), **named}, default=str))
"""


@cache
def _filled_in(folder: Path, changed: int) -> dict[str, object]:
    """A configuration with the defaults that it leaves out, which `transformers` fills in. This
    takes a process of its own, because this one may do without torch. `changed` is the time when
    the file was last written.
    """
    command = [sys.executable, "-c", _TELL, str(folder), *_NAMES]
    done = subprocess.run(command, capture_output=True, check=False)
    return cast("dict[str, object]", json.loads(done.stdout)) if done.returncode == 0 else {}


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The names that configurations have for the number of experts of a layer."""


def num_choices_of(folder: Path) -> int:
    """The number of experts that a token of a mixture is sent to, in all layers together, as its
    servers count them. It is 0 if its configuration does not say.
    """
    config = _text(read_config(folder))
    return _int(config, "num_hidden_layers", 0) * _int(config, "num_experts_per_tok", 0)


def num_experts_of(folder: Path) -> int:
    """Experts of a layer of a mixture; 0 for other models."""
    config = _text(read_config(folder))
    for name in _EXPERTS:
        found = config.get(name)
        if isinstance(found, int) and found > 1:
            return found
    return 0


def read_config(folder: Path) -> dict[str, object]:
    """`config.json` of a model folder. Raises `ModelNotFound` with the reason if there is none, or
    none that can be read.
    """
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
    for name in (key, *_NAMES.get(key, ())):
        value = config.get(name)
        if isinstance(value, int):
            return value
    return default


# --- Fingerprints ---------------------------------------------------------------------------------


Buffer = bytes | bytearray | memoryview


def fingerprint(specs: Iterable[TensorSpec], buffer: Buffer, *, threads: int = 1) -> str:
    """The fingerprint of names, dtypes, shapes and bytes; offsets and order do not count. `buffer`
    holds every tensor at its spec's offset.

        SHA-256(for each tensor by name: for each PIECE of its bytes: XXH3-128(piece); name, dtype,
        shape), as hex

    Pieces are hashed apart, so that `threads` can share the work, and no tensor's end can pass for
    another's beginning.
    """
    whole = memoryview(buffer).cast("B")
    specs = tuple(specs)
    views = {spec.name: whole[spec.offset : spec.offset + spec.num_bytes] for spec in specs}
    return fingerprint_views(specs, views, threads=threads)


def fingerprint_views(
    specs: Iterable[TensorSpec], views: Mapping[str, memoryview], *, threads: int = 1
) -> str:
    """The same over one view per tensor. It equals `fingerprint` of any buffer that holds these
    bytes.

    With one thread each view is requested when it is hashed, and not kept.
    """
    ordered = sorted(specs, key=lambda spec: spec.name)
    digests = _digests((views[spec.name] for spec in ordered), threads)
    return _total(zip(ordered, digests, strict=True))


def fingerprint_digests(specs: Iterable[TensorSpec], digests: Mapping[str, Sequence[bytes]]) -> str:
    """The same from the digests (`piece_digest`) of each tensor's pieces in order, which other
    processes made. It is equal if pieces were cut every `PIECE` bytes. A tensor that is also cut at
    other places, at the end of a trainer rank's rows, has a fingerprint of its own.
    """
    ordered = sorted(specs, key=lambda spec: spec.name)
    return _total((spec, digests.get(spec.name, ())) for spec in ordered)


def _total(hashed: Iterable[tuple[TensorSpec, Sequence[bytes]]]) -> str:
    total = hashlib.sha256()
    for spec, digests in hashed:
        shape = ",".join(map(str, spec.shape))
        total.update(b"".join(digests))
        total.update(f"{spec.name}\0{spec.dtype}\0{shape}\0".encode())
    return total.hexdigest()


PIECE = 16 * 2**20
"""Bytes that are hashed at once: a thread's share of a large tensor."""


def _digests(views: Iterable[memoryview], threads: int) -> Iterator[list[bytes]]:
    """The digests of each view's pieces."""
    if threads <= 1:
        for view in views:
            yield [piece_digest(piece) for piece in _pieces(view)]
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="fingerprint") as pool:
        under_way: list[list[Future[bytes]]] = []
        for view in views:
            under_way.append([pool.submit(piece_digest, piece) for piece in _pieces(view)])
        for pieces in under_way:
            yield [digest.result() for digest in pieces]


def _pieces(view: memoryview) -> Iterator[memoryview]:
    return (view[start : start + PIECE] for start in range(0, len(view), PIECE))


def piece_digest(piece: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(piece)
