"""The tokenizer of a Hugging Face model folder, over the `tokenizers` library alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

import tokenizers

from midflight.errors import ModelNotFound
from midflight.text.byte_tokenizer import byte_letters_to_bytes
from midflight.text.template import ChatTemplate, Message
from midflight.types import Json

_ANCHOR = "\ue000"
"""A letter of no script, which no vocabulary joins with others."""

_NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to ids and back, and conversations to text. Adds no special token that the text does not hold."""

    def __init__(self, backend: tokenizers.Tokenizer, *, template: ChatTemplate | None, eos_token_ids: frozenset[int]) -> None:
        self.backend = backend
        self.template = template
        self.eos_token_ids = eos_token_ids
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        """One more than the largest id."""
        self.special_token_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads `tokenizer.json`, `tokenizer_config.json`, and the ends of text that the model's configs name."""
        backend = _read_backend(folder)
        config = _read_json(folder / "tokenizer_config.json")
        specials = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        source = _template_source(folder, config)
        template = None if source is None else ChatTemplate(source, specials)
        return cls(backend, template=template, eos_token_ids=_eos_token_ids(folder, backend, specials))

    @cached_property
    def token_bytes(self) -> dict[int, bytes] | None:
        """The bytes of every token of a byte-level vocabulary; `None` for vocabularies of another kind."""
        if type(self.backend.decoder).__name__ != "ByteLevel":
            return None
        letters = byte_letters_to_bytes()
        table: dict[int, bytes] = {}
        for token, index in self.backend.get_vocab(with_added_tokens=True).items():
            known = [letters.get(letter) for letter in token]
            # The library's decoder writes a token with any foreign letter (some special tokens) as its own UTF-8.
            table[index] = token.encode("utf-8") if None in known else bytes(b for b in known if b is not None)
        return table

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_after(self, token_id: int, text: str) -> tuple[int, ...]:
        """Ids of a text that goes on from this token: without the blank that some tokenizers (SentencePiece) put before a text."""
        if not (text and self._adds_a_blank):
            return self.encode(text)
        special = self.backend.id_to_token(token_id) if token_id in self.special_token_ids else None
        return self._encode_behind(special or _ANCHOR, text)

    @cached_property
    def _adds_a_blank(self) -> bool:
        return self._encode_behind(_ANCHOR, "x") != self.encode("x")

    def _encode_behind(self, anchor: str, text: str) -> tuple[int, ...]:
        """Ids of the text alone, tokenised behind the anchor; as a text of its own where the two do not come apart."""
        lead, whole = self.encode(anchor), self.encode(anchor + text)
        return whole[len(lead) :] if whole[: len(lead)] == lead else self.encode(text)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False, keep: frozenset[int] = frozenset()) -> str:
        """`keep`: special tokens that are written all the same."""
        if keep and skip_special:
            hidden = self.special_token_ids - keep
            return self.backend.decode([i for i in token_ids if i not in hidden], skip_special_tokens=False)
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = False,
        options: Mapping[str, Json] | None = None,
    ) -> str:
        """The conversation as the model's chat template writes it; `RequestRejected` where the template refuses it."""
        if self.template is None:
            raise ModelNotFound(
                "rendering messages: the model folder has no chat template. Add chat_template.jinja to it, or use text completions."
            )
        return self.template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, options=options)


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFound(f"loading the tokenizer: {path} does not exist. Name a Hugging Face model folder that holds tokenizer.json.")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelNotFound(f"loading the tokenizer: {path} is not a tokenizer ({error}). Save the model folder again.") from error
    # Files saved during training may carry both; ids must depend on the text alone.
    backend.no_padding()
    backend.no_truncation()
    return backend


def _read_json(path: Path) -> dict[str, Json]:
    """The object in a file, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = cast(Json, json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ModelNotFound(f"reading {path}: not JSON ({error}). Save the model folder again.") from error
    if not isinstance(value, dict):
        raise ModelNotFound(f"reading {path}: expected a JSON object, found {type(value).__name__}. Save the model folder again.")
    return value


def _special_tokens(*sources: Mapping[str, Json]) -> dict[str, str]:
    """Text of each named special token; the first source that names one wins. Tokens are written plain or as an object."""
    found: dict[str, str] = {}
    for source in sources:
        for name in _NAMED_SPECIALS:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    return found


def _template_source(folder: Path, config: Mapping[str, Json]) -> str | None:
    """`chat_template.jinja` beside the tokenizer, else the (default) one in `tokenizer_config.json`."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {str(item["name"]): item["template"] for item in value if isinstance(item, dict) and {"name", "template"} <= item.keys()}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, specials: Mapping[str, str]) -> frozenset[int]:
    """Every id that the tokenizer, `config.json` or `generation_config.json` calls an end of text."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    if (text := specials.get("eos_token")) is not None and (token := backend.token_to_id(text)) is not None:
        ids.add(token)
    return frozenset(ids)
