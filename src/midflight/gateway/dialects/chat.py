"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field, JsonValue

from midflight.errors import RequestRejected
from midflight.gateway.call import Answer, CompletionCall, Delta, Event, Messages
from midflight.gateway.dialects.exchange import Reply
from midflight.gateway.dialects.fields import SamplingBody, Tokens, parse
from midflight.gateway.dialects.wording import token_bytes, token_text, usage, weight_versions
from midflight.text import Message, Tokenizer
from midflight.types import Json

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles as templates know them."""


class ChatBody(SamplingBody):
    messages: Annotated[list[dict[str, JsonValue]], Field(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class ChatExchange:
    """One chat request."""

    def __init__(self, body: bytes) -> None:
        parsed = parse(ChatBody, body)
        if parsed.top_logprobs:
            raise RequestRejected(
                f"top_logprobs is {parsed.top_logprobs}: only the sampled token's is known, send 0.", param="top_logprobs"
            )
        renamed = parsed.max_completion_tokens is not None
        self._logprobs = bool(parsed.logprobs)
        self._token_ids = bool(parsed.return_token_ids)
        self._include_usage = parsed.include_usage
        self.call = CompletionCall(
            sources=(Messages(tuple(_message(m, place) for place, m in enumerate(parsed.messages))),),
            asked=parsed.asked(parsed.max_completion_tokens if renamed else parsed.max_tokens),
            n=parsed.n or 1,
            stream=bool(parsed.stream),
            model=parsed.model,
            prompt_param="messages",
            max_tokens_param="max_completion_tokens" if renamed else "max_tokens",
        )

    def whole(self, reply: Reply, answers: Sequence[Answer]) -> Json:
        body = self._envelope(reply, "chat.completion", [self._choice(reply, answer) for answer in answers])
        body["usage"] = usage(answers)
        if self._token_ids:
            body["prompt_token_ids"] = list(answers[0].prompt.ids)
        return body

    def opening(self, reply: Reply) -> Iterable[Json]:
        first = True
        for choice in reply.job.choices:
            chunk = self._chunk(reply, choice.index, {"role": "assistant", "content": ""})
            if first and self._token_ids:
                chunk["prompt_token_ids"] = list(choice.prompt.ids)
            first = False
            yield chunk

    def frames(self, reply: Reply, event: Event) -> Iterable[Json]:
        if isinstance(event, Delta):
            if event.text or self._logprobs or self._token_ids:
                yield self._chunk(reply, event.choice, {"content": event.text}, delta=event)
        else:
            if event.tail:
                yield self._chunk(reply, event.choice, {"content": event.tail})
            yield self._chunk(reply, event.choice, {}, answer=event)

    def closing(self, reply: Reply, answers: Sequence[Answer]) -> Iterable[Json]:
        if self._include_usage:
            body = self._envelope(reply, "chat.completion.chunk", [])
            body["usage"] = usage(answers)
            yield body

    def _choice(self, reply: Reply, answer: Answer) -> Json:
        turn = answer.turn
        choice: dict[str, Json] = {
            "index": answer.choice,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._content(reply.tokenizer, turn.output_ids, turn.logprobs),
            "finish_reason": turn.finish.reason.value,
        }
        if isinstance(turn.finish.matched, str):
            choice["stop_reason"] = turn.finish.matched
        if self._token_ids:
            choice |= {"token_ids": list(turn.output_ids), "weight_versions": weight_versions(turn)}
        return choice

    def _chunk(
        self, reply: Reply, index: int, message: dict[str, Json], *, delta: Delta | None = None, answer: Answer | None = None
    ) -> dict[str, Json]:
        choice: dict[str, Json] = {"index": index, "delta": message, "finish_reason": answer.turn.finish.reason.value if answer else None}
        if delta is not None:
            choice["logprobs"] = self._content(reply.tokenizer, delta.token_ids, delta.logprobs)
        if self._token_ids and delta is not None:
            choice["token_ids"] = list(delta.token_ids)
        if self._token_ids and answer is not None:
            choice["weight_versions"] = weight_versions(answer.turn)
        return self._envelope(reply, "chat.completion.chunk", [choice])

    def _content(self, tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[float]) -> Json:
        if not self._logprobs:
            return None
        return {
            "content": [
                {"token": token_text(tokenizer, i), "logprob": p, "bytes": token_bytes(tokenizer, i), "top_logprobs": []}
                for i, p in zip(token_ids, logprobs, strict=True)
            ],
            "refusal": None,
        }

    def _envelope(self, reply: Reply, kind: str, choices: list[Json]) -> dict[str, Json]:
        return {
            "id": f"chatcmpl-{reply.job.request_id}",
            "object": kind,
            "created": reply.created,
            "model": reply.model,
            "choices": choices,
        }


def _message(message: dict[str, JsonValue], place: int) -> Message:
    """The message as the template reads it: a role it knows, content as one text, no empty fields."""
    param = f"messages.{place}"
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestRejected(f"{param}.role is {role!r}: send one of {', '.join(_ROLES)}.", param=f"{param}.role")
    for name in ("tool_calls", "function_call"):
        if message.get(name):
            raise RequestRejected(f"{param}.{name} is not supported here: send its meaning as text.", param=f"{param}.{name}")
    kept: dict[str, Json] = {name: value for name, value in message.items() if value not in (None, [], {})}
    return {**kept, "role": _ROLES[role], "content": _text(message.get("content"), f"{param}.content")}


def _text(content: JsonValue, param: str) -> str:
    """Text of a message; parts of it are joined as they are."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestRejected(f"{param} is {content!r:.80}: send a text, or a list of text parts.", param=param)
    return "".join(_part(part, f"{param}.{place}") for place, part in enumerate(content))


def _part(part: JsonValue, param: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise RequestRejected(f'{param} is a part of type {kind!r:.80}: send parts of type "text" only.', param=param)
    return text
