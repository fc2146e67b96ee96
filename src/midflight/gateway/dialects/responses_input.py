"""Input of OpenAI's responses: items in a row, as the chat messages that templates read.

The items of one answer (reasoning, message, calls) become the very message that stands for the recorded answer, so that its
tokens are found again (I4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pydantic import JsonValue

from midflight.errors import RequestRejected
from midflight.gateway.dialects.conversation import arguments_text, assistant, filled, text_of, tool_call, tool_result
from midflight.text import Message
from midflight.types import Json

Item: TypeAlias = Mapping[str, JsonValue]

_ROLES: Mapping[str, str] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles as templates know them."""

_TEXTS = ("input_text", "output_text")
_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def conversation(given: JsonValue, *, instructions: str | None) -> tuple[Message, ...]:
    """The whole conversation, the instructions first. Raises `RequestRejected` that names the item."""
    reader = _Reader()
    if instructions:
        reader.messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestRejected(f"input is {given!r:.80}: send a text, or a list of at least one item.", param="input")
    for place, item in enumerate(given):
        if not isinstance(item, dict):
            raise RequestRejected(f"input.{place} is {item!r:.80}: send an object.", param=f"input.{place}")
        reader.read(item, f"input.{place}")
    reader.end_turn()
    return tuple(reader.messages)


class _Reader:
    """Takes items one by one. An assistant's items gather in a turn until it ends.

    A turn ends with any item of another role. A message or reasoning right after a message belongs to the next turn; after a
    call it does not, because the next turn needs the call's output first.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._reasoning = ""
        self._content = ""
        self._calls: list[Json] = []
        self._begun = False
        self._after_message = False

    def read(self, item: Item, param: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        match kind:
            case "message":
                self._message(item, param)
            case "function_call":
                self._calls.append(_call(item, param))
                self._begun, self._after_message = True, False
            case "function_call_output":
                self._say(tool_result(_text(item, "output", param), call_id=filled(item.get("call_id"), f"{param}.call_id")))
            case "reasoning":
                self._next(message=False)
                self._reasoning += _thought(item, param)
            case "item_reference":
                name = f"{item.get('id')!r:.80}"
                raise RequestRejected(
                    f"{param} refers to the stored item {name}: nothing is stored here, send the item itself.", param=param
                )
            case _:
                raise RequestRejected(f"{param} is an item of type {kind!r:.80}: send {', '.join(_KINDS)} only.", param=param)

    def end_turn(self) -> None:
        if not self._begun:
            return
        self.messages.append(assistant(self._content, reasoning=self._reasoning, calls=self._calls))
        self._reasoning, self._content, self._calls = "", "", []
        self._begun = self._after_message = False

    def _message(self, item: Item, param: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise RequestRejected(f"{param}.role is {role!r:.80}: send one of {', '.join(_ROLES)}.", param=f"{param}.role")
        text = _text(item, "content", param)
        if role == "assistant":
            self._next(message=True)
            self._content += text
        else:
            self._say({"role": _ROLES[role], "content": text})

    def _next(self, *, message: bool) -> None:
        if self._after_message:
            self.end_turn()
        self._begun, self._after_message = True, message

    def _say(self, message: Message) -> None:
        self.end_turn()
        self.messages.append(message)


def _call(item: Item, param: str) -> Json:
    return tool_call(
        call_id=filled(item.get("call_id"), f"{param}.call_id"),
        name=filled(item.get("name"), f"{param}.name"),
        arguments=arguments_text(item.get("arguments"), f"{param}.arguments"),
    )


def _thought(item: Item, param: str) -> str:
    """The reasoning itself, or its summary where there is no more; what is encrypted cannot be read."""
    content = _parts(item.get("content") or [], ("reasoning_text",), f"{param}.content")
    return content or _parts(item.get("summary") or [], ("summary_text",), f"{param}.summary")


def _text(item: Item, name: str, param: str) -> str:
    """A text, or parts of text joined as they are."""
    value = item.get(name)
    return value if isinstance(value, str) else _parts(value, _TEXTS, f"{param}.{name}")


def _parts(value: JsonValue, kinds: Sequence[str], param: str) -> str:
    if not isinstance(value, list):
        raise RequestRejected(f"{param} is {value!r:.80}: send a text, or a list of parts of type {' or '.join(kinds)}.", param=param)
    return "".join(_part(part, kinds, f"{param}.{place}") for place, part in enumerate(value))


def _part(part: JsonValue, kinds: Sequence[str], param: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else part
    if not isinstance(part, dict) or kind not in kinds:
        raise RequestRejected(f"{param} is a part of type {kind!r:.80}: send parts of type {' or '.join(kinds)} only.", param=param)
    return text_of(part, "text", param)
