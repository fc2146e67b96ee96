"""The identity of the model in a folder: configuration, vocabulary and, if asked for, weights. Two
machines find out by it whether they have the same model. Torch-free.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from midflight.models.adapters import served_weights
from midflight.models.sizes import read_config

Leaf = str | int | float | bool | None

_INCIDENTAL = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
    }
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)
"""Values that may differ between exports of a model that computes the same."""


class ModelIdentity(msgspec.Struct, frozen=True):
    config: Mapping[str, Leaf]
    """The values of `config.json`, by their path in it."""
    vocabulary: str
    """SHA-256 of the tokenizer's ids. Empty if it has no `tokenizer.json`."""
    weights: str | None = None
    """SHA-256 of its files, if it was asked for, which takes a second for each gigabyte."""

    @classmethod
    def of(cls, folder: Path, *, weights: bool = False) -> "ModelIdentity":
        """Reads a folder, and blocks meanwhile. Raises `ModelNotFound` if there is no model."""
        config: dict[str, Leaf] = {}
        for path, value in _leaves(read_config(folder)):
            if path.rpartition(".")[2] not in _INCIDENTAL:
                config[path] = value
        vocabulary = _vocabulary(folder / "tokenizer.json")
        return cls(config, vocabulary, _hashed(folder) if weights else None)

    def difference(self, other: "ModelIdentity") -> str:
        """A clause about the other model that says how it differs. Empty if it is the same. A value
        that only one of them has does not count: exports fill in defaults.
        """
        for name in sorted(self.config.keys() & other.config.keys()):
            if self.config[name] != other.config[name]:
                return f"its {name} is {other.config[name]!r} and not {self.config[name]!r}"
        if self.vocabulary and other.vocabulary and self.vocabulary != other.vocabulary:
            return "its tokenizer has other ids"
        if self.weights and other.weights and self.weights != other.weights:
            return "its weights are others"
        return ""


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """The values below a value, with their paths. Lists are values, as JSON."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, str | int | float | bool) or value is None:
        yield path, value
    else:
        yield path, json.dumps(value, sort_keys=True)


def _vocabulary(path: Path) -> str:
    if not path.is_file():
        return ""
    tokenizer = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    added = sorted((token.id, token.content) for token in tokenizer.added_tokens)
    ids = json.dumps([tokenizer.model.get("vocab"), added], sort_keys=True)
    return hashlib.sha256(ids.encode()).hexdigest()


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    model: dict[str, object]
    added_tokens: list[_AddedToken] = []


def _hashed(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in served_weights(folder):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
