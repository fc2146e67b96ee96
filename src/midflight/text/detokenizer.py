"""Incremental detokenisation: text as tokens arrive, never half a character, and in the end the text of the whole."""

from __future__ import annotations

import codecs
from typing import Protocol

from midflight.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class _Pieces(Protocol):
    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """Feed tokens, get the text that is certain so far. The pieces joined, with `finish`, equal `Tokenizer.decode` of all with `skip_special`."""

    def __init__(self, tokenizer: Tokenizer, *, keep: frozenset[int] = frozenset()) -> None:
        """`keep`: special tokens that are text; the others are not."""
        self._skip = tokenizer.special_token_ids - keep
        table = tokenizer.token_bytes
        self._pieces: _Pieces = _GeneralPieces(tokenizer) if table is None else _BytePieces(table)

    def push(self, token_id: int) -> str:
        """The text that becomes certain with this token; empty while a character is incomplete."""
        return "" if token_id in self._skip else self._pieces.push(token_id)

    def finish(self) -> str:
        """What was held back: an incomplete character is written as U+FFFD. No `push` after this."""
        return self._pieces.flush()


class _BytePieces:
    """For byte-level vocabularies: each token is known bytes, decoded by the standard incremental decoder. O(1) a token."""

    def __init__(self, token_bytes: dict[int, bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes.get(token_id, b""))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _GeneralPieces:
    """For any other vocabulary: decodes a short window twice, with and without what is new, and emits the difference.

    The window begins one emitted piece back, because decoders treat the first token apart (a leading space, a prefix).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._emitted = 0
        """Tokens of the window whose text has been emitted."""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return "" if self._incomplete(token_id) else self._emit()

    def flush(self) -> str:
        return self._emit()

    def _incomplete(self, token_id: int) -> bool:
        """A run of byte tokens (`<0x..>`) is decoded as one: whether it is valid is known only after its end."""
        token = self._tokenizer.backend.id_to_token(token_id) or ""
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        return is_byte or self._tokenizer.decode(self._ids).endswith(_REPLACEMENT)

    def _emit(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._emitted])
        text = self._tokenizer.decode(self._ids)[len(before) :]
        self._ids = self._ids[self._emitted :]
        self._emitted = len(self._ids)
        return text
