"""Canonical messages: the form in which a conversation sent again is recognised (DECISIONS 16). Pure.

Clients send a reply back in another form than they got it: empty fields, texts in parts, arguments serialised anew, new ids of
tool calls, without the reasoning. None of that changes a digest. Whether it changed what the model reads, the tokens decide.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import msgspec

from midflight.errors import RequestRejected
from midflight.text import Message
from midflight.text.formats import AssistantMessage
from midflight.types import Json

EMPTY = b""
"""Digest of a conversation without messages."""

Meaning: TypeAlias = tuple[str, str, tuple[tuple[str, str], ...]]
"""Content, reasoning, and the name and canonical arguments of each tool call."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=True, separators=(",", ":"))
_REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class History:
    """A conversation in digests."""

    chain: tuple[bytes, ...]
    """Entry k names the first k + 1 messages."""
    replies: dict[int, bytes]
    """The digest of each assistant message by itself, by its place."""

    def before(self, place: int) -> bytes:
        """Names the messages before a place."""
        return self.chain[place - 1] if place else EMPTY


def read(messages: Sequence[Message]) -> History:
    """Results of tools name the call they answer by its position, since clients choose their own ids."""
    chain: list[bytes] = []
    replies: dict[int, bytes] = {}
    calls: dict[str, int] = {}
    for place, message in enumerate(messages):
        own = digest(message, calls)
        chain.append(linked(chain[-1] if chain else EMPTY, own))
        if message.get("role") == "assistant":
            replies[place] = own
            calls = _positions(message.get("tool_calls"))
    return History(tuple(chain), replies)


def assistant_reply(message: AssistantMessage) -> dict[str, Json]:
    """The message that stands for an answer in the requests that follow."""
    calls: list[Json] = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls]
    return {"role": "assistant", "content": message.content, "tool_calls": calls}


def digest(message: Message, calls: Mapping[str, int] | None = None) -> bytes:
    """Names one message. `calls`: the position of each tool call, by its id, that the message may answer."""
    return _hashed(_named(_reply_meaning(message) if message.get("role") == "assistant" else _context_meaning(message, calls or {})))


def linked(before: bytes, own: bytes) -> bytes:
    """Names a conversation with one message more."""
    return _hashed(before + own)


def meaning(message: AssistantMessage) -> Meaning:
    """What two texts of one message have in common; blanks around content and reasoning are the template's affair."""
    calls = tuple((call.name, canonical_arguments(call.arguments)) for call in message.tool_calls)
    return message.content.strip(), message.reasoning.strip(), calls


def canonical_arguments(arguments: Json) -> str:
    """Arguments of a call, whoever serialised them: sorted keys, no blanks, 1.0 as 1. What is no JSON stays as it is."""
    text = arguments if isinstance(arguments, str) else _dumped(arguments).decode()
    try:
        return _dumped(cast(Json, json.loads(text.strip() or "{}", parse_float=_number))).decode()
    except (ValueError, RecursionError):
        return text.strip()


def _reply_meaning(message: Message) -> Json:
    """Only what the model said counts, and not its reasoning: many clients drop it, and add fields of their own."""
    content = _text(message.get("content"))
    calls: list[Json] = [_call_meaning(call) for call in _listed(message.get("tool_calls"))]
    return ["assistant", content.strip() if isinstance(content, str) else content, calls]


def _call_meaning(call: Json) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return [function.get("name"), canonical_arguments(function.get("arguments"))]


def _context_meaning(message: Message, calls: Mapping[str, int]) -> Json:
    """A message of the agent's: fields without a value do not count."""
    found: dict[str, Json] = {name: value for name, value in message.items() if value not in (None, "", [], {})}
    if "content" in found:
        found["content"] = _text(found["content"])
    answered = found.get("tool_call_id")
    if isinstance(answered, str) and answered in calls:
        found["tool_call_id"] = calls[answered]
    return found


def _text(content: Json) -> Json:
    """Content as one text, where it is text; parts that hold reasoning are left out."""
    if not isinstance(content, list):
        return content or ""
    parts = [part for part in content if not (isinstance(part, dict) and part.get("type") in _REASONING_PARTS)]
    texts = [part["text"] for part in parts if isinstance(part, dict) and part.get("type") in _TEXT_PARTS and "text" in part]
    if len(texts) < len(parts):
        return parts
    return "".join(text for text in texts if isinstance(text, str))


def _listed(calls: Json) -> list[Json]:
    return calls if isinstance(calls, list) else []


def _positions(calls: Json) -> dict[str, int]:
    ids = [call.get("id") if isinstance(call, dict) else None for call in _listed(calls)]
    return {call_id: place for place, call_id in enumerate(ids) if isinstance(call_id, str)}


def _number(text: str) -> float | int:
    """A client that knows one kind of number writes 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _named(value: Json) -> bytes:
    """One spelling of a value. The quick encoder refuses half characters and huge numbers, which the slow one spells."""
    try:
        return msgspec.json.encode(value, order="sorted")
    except (ValueError, OverflowError, RecursionError):
        return _dumped(value)


def _dumped(value: Json) -> bytes:
    try:
        return _CANONICAL.encode(value).encode()
    except RecursionError as error:
        raise RequestRejected("a message is nested too deeply to be read: send flatter JSON.", param="messages") from error


def _hashed(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
