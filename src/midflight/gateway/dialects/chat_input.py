"""Messages of a chat as the model's template reads them: known roles, content as one text, calls that can be read."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from midflight.errors import RequestRejected
from midflight.gateway.dialects.conversation import arguments_text, assistant, filled, tool_call, tool_result
from midflight.text import Message
from midflight.types import Json

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles as templates know them."""

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which clients send thinking back; the first that says something counts."""

_READ = {"role", "content", "tool_calls", "tool_call_id", *_REASONING}

JsonObject = dict[str, JsonValue]


def conversation(messages: Sequence[JsonObject]) -> tuple[Message, ...]:
    """Every message checked; a fault names its place, as in `messages.2.tool_calls.0.function.name`."""
    return tuple(_message(message, f"messages.{place}") for place, message in enumerate(messages))


def _message(message: JsonObject, param: str) -> Message:
    """Fields without a value are dropped, fields that are not ours are the template's business."""
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        remedy = "send role tool" if role == "function" else f"send one of {', '.join(ROLES)}"
        raise RequestRejected(f"{param}.role is {role!r:.80}: {remedy}.", param=f"{param}.role")
    _check_fields(message, role, param)
    kept: dict[str, Json] = {name: value for name, value in message.items() if name not in _READ and value not in (None, [], {})}
    content = _content(message, role, param)
    match role:
        case "tool":
            return kept | tool_result(content, call_id=filled(message.get("tool_call_id"), f"{param}.tool_call_id"))
        case "assistant":
            return kept | assistant(content, reasoning=_reasoning(message), calls=_calls(message, param))
        case _:
            return kept | {"role": ROLES[role], "content": content}


def _check_fields(message: JsonObject, role: str, param: str) -> None:
    """What no message may hold, or not one of this role."""
    for name in ("function_call", "audio", "refusal"):
        if message.get(name):
            remedy = "send tool_calls instead" if name == "function_call" else "send its meaning as content"
            raise RequestRejected(f"{param}.{name} is not supported here: {remedy}.", param=f"{param}.{name}")
    for name in ("name", *_REASONING):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise RequestRejected(f"{param}.{name} is {value!r:.80}: send a text, or leave it out.", param=f"{param}.{name}")
    if message.get("tool_calls") and role != "assistant":
        raise RequestRejected(
            f"{param}.tool_calls stands in a message of role {role}: send it in one of role assistant.", param=f"{param}.tool_calls"
        )


def _content(message: JsonObject, role: str, param: str) -> str:
    """An assistant may have said nothing; everybody else says something, if only the empty text."""
    content = message.get("content")
    if content is None and role != "assistant":
        raise RequestRejected(f"{param}.content is missing: send a text, or a list of text parts.", param=f"{param}.content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestRejected(f"{param}.content is {content!r:.80}: send a text, or a list of text parts.", param=f"{param}.content")
    return "".join(_part(part, f"{param}.content.{place}") for place, part in enumerate(content))


def _part(part: JsonValue, param: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise RequestRejected(f'{param} is a part of type {kind!r:.80}: send parts of type "text" only.', param=param)
    return text


def _reasoning(message: JsonObject) -> str:
    return str(next((message[name] for name in _REASONING if message.get(name)), ""))


def _calls(message: JsonObject, param: str) -> list[Json]:
    calls = message.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise RequestRejected(f"{param}.tool_calls is {calls!r:.80}: send a list of calls.", param=f"{param}.tool_calls")
    return [_call(call, f"{param}.tool_calls.{place}") for place, call in enumerate(calls)]


def _call(call: JsonValue, param: str) -> Json:
    if not isinstance(call, dict):
        raise RequestRejected(f"{param} is {call!r:.80}: send an object with id, type and function.", param=param)
    if call.get("type", "function") != "function":
        raise RequestRejected(f'{param}.type is {call["type"]!r:.80}: send "function".', param=f"{param}.type")
    function = call.get("function")
    if not isinstance(function, dict):
        raise RequestRejected(f"{param}.function is {function!r:.80}: send an object with name and arguments.", param=f"{param}.function")
    return tool_call(
        call_id=filled(call.get("id"), f"{param}.id"),
        name=filled(function.get("name"), f"{param}.function.name"),
        arguments=arguments_text(function.get("arguments"), f"{param}.function.arguments"),
    )
