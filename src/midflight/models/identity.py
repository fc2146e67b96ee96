"""Which model a folder holds, so that two machines can find out whether theirs is the same:
configuration, vocabulary and, where asked, weights. Torch-free."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from midflight.models.sizes import read_config, served_weights

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
"""What an export may write otherwise without changing what the model computes."""


class ModelIdentity(msgspec.Struct, frozen=True):
    config: Mapping[str, Leaf]
    """The values of `config.json`, by their path in it."""
    vocabulary: str
    """SHA-256 of the tokenizer's ids; empty where it has no `tokenizer.json`."""
    weights: str | None = None
    """SHA-256 of its files, where somebody asked: a second for each gigabyte."""

    @classmethod
    def of(cls, folder: Path, *, weights: bool = False) -> "ModelIdentity":
        """Blocking. `ModelNotFound` where there is no model."""
        config = {
            path: value
            for path, value in _leaves(read_config(folder))
            if path.rpartition(".")[2] not in _INCIDENTAL
        }
        return cls(
            config, _vocabulary(folder / "tokenizer.json"), _hashed(folder) if weights else None
        )

    def difference(self, other: "ModelIdentity") -> str:
        """What says that the other is another model, as a clause about it; empty where nothing
        does. A value that only one of them has says nothing: exports fill in defaults."""
        for name in sorted(self.config.keys() & other.config.keys()):
            if self.config[name] != other.config[name]:
                return f"its {name} is {other.config[name]!r} and not {self.config[name]!r}"
        if self.vocabulary and other.vocabulary and self.vocabulary != other.vocabulary:
            return "its tokenizer has other ids"
        if self.weights and other.weights and self.weights != other.weights:
            return "its weights are others"
        return ""


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Lists are values, as JSON."""
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
    return hashlib.sha256(
        json.dumps([tokenizer.model.get("vocab"), added], sort_keys=True).encode()
    ).hexdigest()


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
