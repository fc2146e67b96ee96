"""Anthropic's conversations, whose messages are lists of blocks, as the chat messages that templates read.

One form for what an agent sends back: an assistant message becomes the very message that stands for the recorded answer, so
that its tokens are found again (I4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pydantic import JsonValue

from midflight.errors import RequestRejected
from midflight.gateway.dialects.conversation import arguments_text, assistant, filled, text_of, tool_call, tool_result
from midflight.text import Message
from midflight.types import Json

Block: TypeAlias = Mapping[str, JsonValue]

_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""What a message of each role may hold."""

_FIELDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"text", "citations"}),
    "thinking": frozenset({"thinking", "signature"}),
    "redacted_thinking": frozenset({"data"}),
    "tool_use": frozenset({"id", "name", "input", "caller"}),
    "tool_result": frozenset({"tool_use_id", "content", "is_error"}),
}
_FIELDS_OF_ALL = frozenset({"type", "cache_control"})


def conversation(system: JsonValue, messages: Sequence[Block]) -> tuple[Message, ...]:
    """The whole conversation, the system text first. Raises `RequestRejected` that names the block."""
    said = _text(_blocks(system, _BLOCKS["system"], "system")) if system is not None else ""
    first: list[Message] = [{"role": "system", "content": said}] if said else []
    if messages[-1].get("role") == "assistant":
        raise RequestRejected(
            "the last message is the assistant's: continuing it is not supported here, end with a message of the user.", param="messages"
        )
    return (*first, *(m for place, message in enumerate(messages) for m in _messages(message, f"messages.{place}")))


def _messages(message: Block, param: str) -> list[Message]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _BLOCKS:
        raise RequestRejected(f"{param}.role is {role!r:.80}: send one of {', '.join(_BLOCKS)}.", param=f"{param}.role")
    _only(message, frozenset({"role", "content"}), param)
    blocks = _blocks(message.get("content"), _BLOCKS[role], f"{param}.content")
    match role:
        case "assistant":
            return [_assistant(blocks, f"{param}.content")]
        case "user":
            return _user(blocks, f"{param}.content")
        case _:
            return [{"role": role, "content": _text(blocks)}]


def _user(blocks: Sequence[Block], param: str) -> list[Message]:
    """Results of tools are messages of their own, and come before what the user says beside them."""
    results = [_result(b, f"{param}.{place}") for place, b in enumerate(blocks) if b["type"] == "tool_result"]
    text = _text(blocks)
    return [*results, {"role": "user", "content": text}] if text or not results else results


def _assistant(blocks: Sequence[Block], param: str) -> Message:
    """Text, thinking and calls, each joined: the order between them is not part of a chat message."""
    calls = [_call(b, f"{param}.{place}") for place, b in enumerate(blocks) if b["type"] == "tool_use"]
    thinking = "".join(text_of(b, "thinking", param) for b in blocks if b["type"] == "thinking")
    return assistant(_text(blocks), reasoning=thinking, calls=calls)


def _call(block: Block, param: str) -> Json:
    given = block.get("input")
    if not isinstance(given, dict):
        raise RequestRejected(f"{param}.input is {given!r:.80}: send an object.", param=f"{param}.input")
    return tool_call(
        call_id=filled(block.get("id"), f"{param}.id"),
        name=filled(block.get("name"), f"{param}.name"),
        arguments=arguments_text(given, f"{param}.input"),
    )


def _result(block: Block, param: str) -> Message:
    """A failed result (`is_error`) reads like any other: its text says what failed."""
    content = block.get("content")
    text = "" if content is None else _text(_blocks(content, ("text",), f"{param}.content"))
    return tool_result(text, call_id=filled(block.get("tool_use_id"), f"{param}.tool_use_id"))


def _blocks(content: JsonValue, kinds: Sequence[str], param: str) -> list[Block]:
    """Blocks of these kinds; a string is one block of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestRejected(f"{param} is {content!r:.80}: send a text, or a list of blocks.", param=param)
    return [_block(value, kinds, f"{param}.{place}") for place, value in enumerate(content)]


def _block(value: JsonValue, kinds: Sequence[str], param: str) -> Block:
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or not isinstance(kind, str) or kind not in kinds:
        raise RequestRejected(f"{param} is a block of type {kind!r:.80}: send {' or '.join(kinds)} here.", param=param)
    _only(value, _FIELDS[kind] | _FIELDS_OF_ALL, param)
    if kind == "text":
        text_of(value, "text", param)
    return value


def _text(blocks: Sequence[Block]) -> str:
    """The text blocks, joined as they are."""
    return "".join(str(b["text"]) for b in blocks if b["type"] == "text")


def _only(value: Block, known: frozenset[str], param: str) -> None:
    """Refuses a field that would be lost; fields without a value say nothing."""
    lost = next((name for name, given in value.items() if name not in known and given is not None), None)
    if lost is not None:
        raise RequestRejected(f"unknown field {f'{param}.{lost}'[:80]!r}: leave it out.", param=f"{param}.{lost}"[:80])
