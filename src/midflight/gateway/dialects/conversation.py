"""Messages of a conversation as templates read them: one form, whichever dialect they came in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pydantic import JsonValue
from pydantic_core import from_json

from midflight.errors import RequestRejected
from midflight.types import Json


def assistant(content: str, *, reasoning: str = "", calls: Sequence[Json] = ()) -> dict[str, Json]:
    """A message of the model. What it did not say has no field."""
    message: dict[str, Json] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def tool_call(*, call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(content: str, *, call_id: str) -> dict[str, Json]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def arguments_text(value: JsonValue, param: str) -> str:
    """The arguments of a call as JSON text. A text that was sent is kept as it is; an empty one means no arguments."""
    if value == "":
        return "{}"
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, dict) else value
        is_object = isinstance(text, str) and isinstance(from_json(text, allow_inf_nan=False), dict)
    except ValueError:
        text, is_object = value, False
    if not is_object:
        raise RequestRejected(f"{param} is {value!r:.80}: send the JSON text of an object.", param=param)
    return str(text)


def text_of(block: Mapping[str, JsonValue], name: str, param: str) -> str:
    """A field that must be a text."""
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestRejected(f"{param}.{name} is {value!r:.80}: send a text.", param=f"{param}.{name}")
    return value


def filled(value: JsonValue, param: str) -> str:
    """A text that is not empty, as names and ids must be."""
    if not isinstance(value, str) or not value:
        raise RequestRejected(f"{param} is {value!r:.80}: send a text that is not empty.", param=param)
    return value
