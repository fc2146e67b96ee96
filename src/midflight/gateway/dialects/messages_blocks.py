"""An answer as Anthropic's content blocks: whole, or as the events that build the same blocks one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import cast

from midflight.gateway.dialects.wording import call_id
from midflight.text.formats import CallPiece, ContentPiece, Piece, ReasoningPiece
from midflight.types import Json

_TEXT, _THINKING = "text", "thinking"


def content(pieces: Sequence[Piece], request_id: str) -> list[Json]:
    """The blocks of a whole message: neighbouring pieces of a kind are one block. Never empty: agents read the first block."""
    told = [piece for piece in pieces if isinstance(piece, CallPiece) or piece.text]
    return [_block(list(group), request_id) for _, group in groupby(told, key=_place)] or [_opened(_TEXT)]


class BlockStream:
    """The same blocks as stream events, piece by piece. At most one block is open."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._index = -1
        """Of the newest block."""
        self._open: str | None = None

    def feed(self, pieces: Iterable[Piece]) -> Iterator[Json]:
        for piece in pieces:
            match piece:
                case ContentPiece(text):
                    yield from self._grow(_TEXT, text)
                case ReasoningPiece(text):
                    yield from self._grow(_THINKING, text)
                case CallPiece():
                    yield from self._start(tool_use(piece, self._request_id) | {"input": {}}, "tool_use")
                    yield self._delta({"type": "input_json_delta", "partial_json": piece.call.arguments})

    def end(self) -> Iterator[Json]:
        """After the last piece."""
        if self._index < 0:
            yield from self._start(_opened(_TEXT), _TEXT)
        yield from self._stop()

    def _grow(self, kind: str, text: str) -> Iterator[Json]:
        if not text:
            return
        if self._open != kind:
            yield from self._start(_opened(kind), kind)
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _start(self, block: dict[str, Json], kind: str) -> Iterator[Json]:
        yield from self._stop()
        self._index, self._open = self._index + 1, kind
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _stop(self) -> Iterator[Json]:
        if self._open == _THINKING:
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _delta(self, delta: dict[str, Json]) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def tool_use(piece: CallPiece, request_id: str) -> dict[str, Json]:
    given = cast(Json, json.loads(piece.call.arguments))
    return {
        "type": "tool_use",
        "id": "toolu_" + call_id(request_id, piece.index).removeprefix("call_"),
        "name": piece.call.name,
        "input": given,
    }


def _opened(kind: str) -> dict[str, Json]:
    """A block without its text. Nobody signs the thinking of an open model."""
    return {"type": _TEXT, "text": ""} if kind == _TEXT else {"type": _THINKING, "thinking": "", "signature": ""}


def _place(piece: Piece) -> str | int:
    """Equal for neighbours that share a block."""
    match piece:
        case ContentPiece():
            return _TEXT
        case ReasoningPiece():
            return _THINKING
        case CallPiece(index):
            return index


def _block(pieces: Sequence[Piece], request_id: str) -> Json:
    first = pieces[0]
    if isinstance(first, CallPiece):
        return tool_use(first, request_id)
    kind = _TEXT if isinstance(first, ContentPiece) else _THINKING
    return _opened(kind) | {kind: "".join(piece.text for piece in pieces if not isinstance(piece, CallPiece))}
