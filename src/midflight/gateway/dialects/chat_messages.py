"""Messages of a conversation as templates read them. They have one form for all dialects."""

import json
from collections.abc import Sequence

from pydantic import JsonValue
from pydantic_core import from_json

from midflight.errors import RequestRejected
from midflight.text import Ending, Message
from midflight.types import Json


def assistant(content: str, *, reasoning: str = "", calls: Sequence[Json] = ()) -> dict[str, Json]:
    """A message of the model. Empty parts have no field."""
    message: dict[str, Json] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def ending(messages: Sequence[Message], *, opens: bool) -> Ending:
    """Returns how the prompt ends. With `opens` the last message is continued. It must then be the
    assistant's and must not end with a call.
    """
    if not opens:
        return Ending.TURN
    last = len(messages) - 1
    if messages[last].get("role") != "assistant":
        raise RequestRejected(
            f"messages.{last} is not the assistant's: only such a message can be continued.",
            param=f"messages.{last}",
        )
    if messages[last].get("tool_calls"):
        raise RequestRejected(
            f"messages.{last} ends with a call, which can't be continued: send its result.",
            param=f"messages.{last}",
        )
    return Ending.OPEN


def tool_call(*, call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(content: str, *, call_id: str) -> dict[str, Json]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def arguments_text(value: JsonValue, param: str) -> str:
    """The arguments of a call as JSON text. A text that was sent is kept as it is; an empty one
    means no arguments. A text that breaks off is accepted, because a stream may have ended
    there.
    """
    if value == "":
        return "{}"
    try:
        text = value
        if isinstance(value, dict):
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if isinstance(text, str):
            read: object = from_json(text, allow_inf_nan=False, allow_partial=True)
            if isinstance(read, dict):
                return text
    except ValueError:
        pass
    raise RequestRejected(
        f"{param} is {value!r:.80}: send the JSON text of an object.", param=param
    )


def json_text(value: JsonValue, param: str) -> str:
    """A value as JSON text. Raises `RequestRejected` for a number that JSON cannot write."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise RequestRejected(
            f"{param} holds a number that JSON cannot write: send finite numbers.", param=param
        ) from None
