"""Anthropic's Messages API: `POST /v1/messages`. `docs/messages.md` lists its fields."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence

from midflight.errors import MidflightError
from midflight.gateway.dialects.exchange import Reply
from midflight.gateway.dialects.faults import Fault, retry_headers
from midflight.gateway.dialects.fields import parse
from midflight.gateway.dialects.messages_blocks import BlockStream, content
from midflight.gateway.dialects.messages_body import MessagesBody, messages_call
from midflight.gateway.dialects.wording import weight_versions
from midflight.gateway.sessions.call import Answer, Delta, Event
from midflight.types import FinishReason, Json


class MessagesExchange:
    """One request."""

    def __init__(self, body: bytes) -> None:
        parsed = parse(MessagesBody, body)
        self._token_ids = bool(parsed.return_token_ids)
        self._stream: BlockStream | None = None
        self.call = messages_call(parsed)

    def whole(self, reply: Reply, answers: Sequence[Answer]) -> Json:
        answer = answers[0]
        message = self._message(reply, content(answer.tail_pieces, answer.request_id))
        usage: Json = _usage(len(answer.prompt.ids), len(answer.turn.output_ids))
        return message | _ending(answer) | {"usage": usage} | self._told_ids(answer)

    def opening(self, reply: Reply) -> Iterable[Json]:
        yield {"type": "message_start", "message": self._message(reply, [])}

    def frames(self, reply: Reply, event: Event) -> Iterable[Json]:
        stream = self._stream = self._stream or BlockStream(reply.job.request_id)
        if isinstance(event, Delta):
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
        """The message as it begins: nothing has ended it yet."""
        prompt_ids = reply.job.choices[0].prompt.ids
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
        return {"token_ids": list(answer.turn.output_ids), "weight_versions": weight_versions(answer.turn)}


def messages_fault(error: BaseException) -> Fault:
    """An error as Anthropic's clients read it. What is not ours says nothing of its inside."""
    request_id = f"req_{secrets.token_hex(12)}"
    status, message, code = 500, "the gateway failed on this request; its log has the traceback.", "internal_error"
    if isinstance(error, MidflightError):
        status, message, code = error.status, str(error), error.code
    detail: dict[str, Json] = {"type": _ERROR_TYPES.get(status, _other_type(status)), "message": message, "details": {"error_code": code}}
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
    """Why the message ended. An answer that calls tools waits for their results, whatever ended its text."""
    finish = answer.turn.finish
    if finish.reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.message.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(finish.matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(num_prompt: int, num_output: int) -> dict[str, Json]:
    """Every token of the prompt counts as read anew: prices of a cache mean nothing here."""
    return {
        "input_tokens": num_prompt,
        "output_tokens": num_output,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
