"""The answers of Anthropic's Messages API, `POST /v1/messages`, whole or as events.
`docs/messages.md` lists its fields.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from midflight.errors import MidflightError
from midflight.gateway.answers.answer import Answer, Event, News
from midflight.gateway.dialects.exchange import (
    Reply,
    arguments_so_far,
    call_id,
    weight_versions,
)
from midflight.gateway.dialects.fields import parse
from midflight.gateway.dialects.messages_input import MessagesBody, messages_call
from midflight.gateway.dialects.resent import ResentBody, SentMessages
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.sessions.request import Messages
from midflight.text import Message
from midflight.text.formats import ArgumentsPiece, CallPiece, ContentPiece, Piece, ReasoningPiece
from midflight.types import FinishReason, Json
from midflight.wire.edge import Fault, retry_headers


class MessagesExchange:
    """One request."""

    def __init__(self, body: bytes, resent: ResentBody | None = None) -> None:
        """`resent` says that the body begins as an earlier one did."""
        self.unread = UnreadFields()
        parsed = parse(MessagesBody, resent.short if resent else body, unread=self.unread)
        self._token_ids = bool(parsed.return_token_ids)
        self._stream: BlockStream | None = None
        self.sent = SentMessages.of(body, resent, lambda: MessagesExchange(body).messages)
        self.call = messages_call(parsed, self.unread, self.sent)

    @property
    def messages(self) -> Sequence[Message]:
        """Its conversation."""
        source = self.call.sources[0]
        assert isinstance(source, Messages), "a chat is made of messages"
        return source.messages

    def whole(self, reply: Reply, answers: Sequence[Answer]) -> Json:
        answer = answers[0]
        message = self._message(reply, content(answer.pieces, answer.request_id))
        usage: Json = _usage(len(answer.prompt.ids), len(answer.turn.output_ids))
        return message | _ending(answer) | {"usage": usage} | self._told_ids(answer)

    def opening(self, reply: Reply) -> Iterable[Json]:
        yield {"type": "message_start", "message": self._message(reply, [])}

    def frames(self, reply: Reply, event: Event) -> Iterable[Json]:
        if self._stream is None:
            self._stream = BlockStream(reply.job.request_id)
        stream = self._stream
        if isinstance(event, News):
            yield from stream.feed(event.pieces)
        else:
            yield from stream.feed(event.tail_pieces)
            yield from stream.end()

    def closing(self, reply: Reply, answers: Sequence[Answer]) -> Iterable[Json]:
        answer = answers[0]
        usage = _usage(len(answer.prompt.ids), len(answer.turn.output_ids))
        delta: dict[str, Json] = {"type": "message_delta", "delta": _ending(answer), "usage": usage}
        yield delta | self._told_ids(answer)
        yield {"type": "message_stop"}

    def _message(self, reply: Reply, blocks: list[Json]) -> dict[str, Json]:
        """The message as it begins, without a reason why it ended."""
        prompt_ids = reply.job.answers[0].prompt.ids
        message: dict[str, Json] = {
            "id": f"msg_{reply.job.request_id}",
            "type": "message",
            "role": "assistant",
            "model": reply.model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(prompt_ids), 0),
        }
        if self._token_ids:
            message["prompt_token_ids"] = list(prompt_ids)
        return message

    def _told_ids(self, answer: Answer) -> dict[str, Json]:
        if not self._token_ids:
            return {}
        return {
            "token_ids": list(answer.turn.output_ids),
            "weight_versions": weight_versions(answer.turn),
        }


def messages_fault(error: BaseException) -> Fault:
    """An error as Anthropic's clients read it. The text of an unexpected error only goes to the
    log.
    """
    request_id = f"req_{secrets.token_hex(12)}"
    status = 500
    message = "the gateway failed on this request; its log has the traceback."
    code = "internal_error"
    if isinstance(error, MidflightError):
        status = error.status
        message = str(error)
        code = error.code
    detail: dict[str, Json] = {
        "type": _ERROR_TYPES.get(status, _other_type(status)),
        "message": message,
        "details": {"error_code": code},
    }
    headers = ((b"request-id", request_id.encode()), *retry_headers(error))
    return Fault(status, {"type": "error", "error": detail, "request_id": request_id}, headers)


_ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def _other_type(status: int) -> str:
    return "invalid_request_error" if status < 500 else "api_error"


def _ending(answer: Answer) -> dict[str, Json]:
    """The reason why the message ended. If it calls tools, that is the reason, even if its text
    ended for another.
    """
    finish = answer.turn.finish
    if finish.reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.message.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(finish.matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(num_prompt: int, num_output: int) -> dict[str, Json]:
    """Token counts. No token of the prompt counts as cached, because nothing is priced here."""
    return {
        "input_tokens": num_prompt,
        "output_tokens": num_output,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


_TEXT = "text"
_THINKING = "thinking"


def content(pieces: Sequence[Piece], request_id: str) -> list[Json]:
    """The blocks of a whole message. Neighbouring pieces of one kind are one block. There is at
    least one block, because agents read the first.
    """
    told = [piece for piece in pieces if isinstance(piece, CallPiece) or piece.text]
    blocks = [_block(list(group), request_id) for _, group in groupby(told, key=_place)]
    return blocks or [_opened(_TEXT)]


class BlockStream:
    """Writes the blocks of a message as stream events, piece by piece. At most one block is
    open.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._index = -1
        """The index of the newest block."""
        self._open: str | None = None

    def feed(self, pieces: Iterable[Piece]) -> Iterator[Json]:
        for piece in pieces:
            match piece:
                case ContentPiece(text):
                    yield from self._grow(_TEXT, text)
                case ReasoningPiece(text):
                    yield from self._grow(_THINKING, text)
                case CallPiece(index, call, begins):
                    yield from self._start(tool_use(call.name, index, self._request_id), "tool_use")
                    if not begins:
                        yield self._delta(
                            {"type": "input_json_delta", "partial_json": call.arguments}
                        )
                case ArgumentsPiece(_, text) if text:
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case ArgumentsPiece():
                    pass

    def end(self) -> Iterator[Json]:
        """Ends the last block. Call it after the last piece."""
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
        self._index += 1
        self._open = kind
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _stop(self) -> Iterator[Json]:
        if self._open == _THINKING:
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _delta(self, delta: dict[str, Json]) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def tool_use(name: str, index: int, request_id: str) -> dict[str, Json]:
    """The block of a call, without its input."""
    return {
        "type": "tool_use",
        "id": "toolu_" + call_id(request_id, index).removeprefix("call_"),
        "name": name,
        "input": {},
    }


def _opened(kind: str) -> dict[str, Json]:
    """A block without its text. The signature of thinking is empty."""
    if kind == _TEXT:
        return {"type": _TEXT, "text": ""}
    return {"type": _THINKING, "thinking": "", "signature": ""}


def _place(piece: Piece) -> str | int:
    """A key that is equal for neighbours that share a block."""
    match piece:
        case ContentPiece():
            return _TEXT
        case ReasoningPiece():
            return _THINKING
        case CallPiece(index) | ArgumentsPiece(index):
            return index


def _block(pieces: Sequence[Piece], request_id: str) -> Json:
    first = pieces[0]
    if isinstance(first, CallPiece):
        arguments = [first.call.arguments]
        arguments += [piece.text for piece in pieces if isinstance(piece, ArgumentsPiece)]
        block = tool_use(first.call.name, first.index, request_id)
        block["input"] = arguments_so_far("".join(arguments))
        return block
    kind = _TEXT if isinstance(first, ContentPiece) else _THINKING
    block = _opened(kind)
    block[kind] = "".join(piece.text for piece in pieces if not isinstance(piece, CallPiece))
    return block
