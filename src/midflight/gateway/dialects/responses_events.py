"""Output items of one response as they grow, and the stream events that tell of it. Synchronous.

Every run of pieces of one kind is an item, in the order of the pieces; the same code makes the items of a response that does
not stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from midflight.gateway.dialects.wording import call_id
from midflight.text.formats import CallPiece, ContentPiece, Piece, ReasoningPiece
from midflight.types import Json

OPENING_EVENTS = 2
"""`response.created` and `response.in_progress` come before all events of items."""


class OutputItems:
    """The items of one answer. Each event has the next sequence number."""

    def __init__(self, request_id: str) -> None:
        self.items: list[dict[str, Json]] = []
        """Growing; whole after `end`."""
        self.num_events = OPENING_EVENTS
        self._request_id = request_id
        self._text: str | None = None
        """Of the item that is open, if one is: all others are done."""
        self._logprobs: list[Json] = []
        """Of its tokens."""

    def event(self, kind: str, **fields: Json) -> dict[str, Json]:
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **fields}

    def add(self, pieces: Iterable[Piece], logprobs: Sequence[Json] = ()) -> Iterator[dict[str, Json]]:
        """`logprobs`: of the tokens not told yet; they go to the first new text of a message."""
        for piece in pieces:
            match piece:
                case ContentPiece(text):
                    yield from self._grow("message", text, logprobs)
                    logprobs = ()
                case ReasoningPiece(text):
                    yield from self._grow("reasoning", text)
                case CallPiece():
                    yield from self._add_call(piece)

    def end(self, *, complete: bool, logprobs: Sequence[Json] = ()) -> Iterator[dict[str, Json]]:
        """No more pieces. An answer that said nothing is an empty message. `logprobs`: of all tokens, for the first message."""
        if not self.items:
            yield from self._open("message")
        first = next((place for place, item in enumerate(self.items) if item["type"] == "message"), None)
        if first == len(self.items) - 1 and self._text is not None:
            self._logprobs = list(logprobs)
        yield from self._close("completed" if complete else "incomplete")
        if first is not None:
            part = self.items[first]["content"]
            assert isinstance(part, list) and isinstance(part[0], dict)
            self.items[first] = {**self.items[first], "content": [{**part[0], "logprobs": list(logprobs)}]}

    def _grow(self, kind: str, text: str, logprobs: Sequence[Json] = ()) -> Iterator[dict[str, Json]]:
        if self._text is None or self.items[-1]["type"] != kind:
            yield from self._close()
            yield from self._open(kind)
        self._text = (self._text or "") + text
        if kind == "message":
            self._logprobs += logprobs
            yield self._of_part("response.output_text.delta", delta=text, logprobs=list(logprobs))
        else:
            yield self._of_part("response.reasoning_text.delta", delta=text)

    def _open(self, kind: str) -> Iterator[dict[str, Json]]:
        self._text, self._logprobs = "", []
        place = len(self.items)
        if kind == "message":
            item: dict[str, Json] = {"id": f"msg_{self._request_id}_{place}", "type": kind, "role": "assistant", "content": []}
        else:
            item = {"id": f"rs_{self._request_id}_{place}", "type": kind, "summary": [], "content": []}
        self.items.append({**item, "status": "in_progress"})
        yield self._of_item("response.output_item.added")
        yield self._of_part("response.content_part.added", part=self._part())

    def _close(self, status: str = "completed") -> Iterator[dict[str, Json]]:
        """The open item is done, if one is open."""
        if self._text is None:
            return
        text, part = self._text, self._part()
        if self.items[-1]["type"] == "message":
            yield self._of_part("response.output_text.done", text=text, logprobs=list(self._logprobs))
        else:
            yield self._of_part("response.reasoning_text.done", text=text)
        yield self._of_part("response.content_part.done", part=part)
        self._text = None
        self.items[-1] = {**self.items[-1], "content": [part], "status": status}
        yield self._of_item("response.output_item.done")

    def _add_call(self, piece: CallPiece) -> Iterator[dict[str, Json]]:
        yield from self._close()
        name, arguments = piece.call.name, piece.call.arguments
        item: dict[str, Json] = {
            "id": f"fc_{self._request_id}_{len(self.items)}",
            "type": "function_call",
            "call_id": call_id(self._request_id, piece.index),
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }
        self.items.append(item)
        yield self._of_item("response.output_item.added")
        yield self._of_last("response.function_call_arguments.delta", delta=arguments)
        yield self._of_last("response.function_call_arguments.done", name=name, arguments=arguments)
        self.items[-1] = {**item, "arguments": arguments, "status": "completed"}
        yield self._of_item("response.output_item.done")

    def _part(self) -> Json:
        """The one part of the open item."""
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}

    def _of_item(self, kind: str) -> dict[str, Json]:
        return self.event(kind, output_index=len(self.items) - 1, item=dict(self.items[-1]))

    def _of_last(self, kind: str, **fields: Json) -> dict[str, Json]:
        return self.event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)

    def _of_part(self, kind: str, **fields: Json) -> dict[str, Json]:
        return self._of_last(kind, content_index=0, **fields)
