"""Tools and calls as text, for chat templates that leave both out. They have the form of Hermes,
because the calls of such models are read in that form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import cast

from midflight.types import Json

LIST_TOOLS = "list_tools"
"""The option of a template that is `False` if tools shall not be listed. The template of models
that Midflight makes has it.
"""

_WHOLE = r"\bmessages?\b(\[\w+\])?\s*\|\s*tojson"
"""A pattern that finds templates which write whole messages, with all their fields."""
_KNOWS_TOOLS = re.compile(rf"\b(tools|tool_calls)\b|{_WHOLE}")
_KNOWS_CALLS = re.compile(rf"\btool_calls\b|{_WHOLE}")


def knows_tools(template: str) -> bool:
    """True if a chat template writes tools, or at least their calls, in a form of its own."""
    return _KNOWS_TOOLS.search(template) is not None


def knows_calls(template: str) -> bool:
    """True if a chat template writes the calls of a message."""
    return _KNOWS_CALLS.search(template) is not None


def with_calls_as_text(message: Mapping[str, Json]) -> dict[str, Json]:
    """The message with its calls at the end of its content."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return dict(message)
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) and content else []
    texts += [_call(call) for call in calls]
    return {**message, "content": "\n".join(texts)}


def with_tools_as_text(
    messages: Sequence[dict[str, Json]], tools: Sequence[Mapping[str, Json]]
) -> list[dict[str, Json]]:
    """The conversation with the tools at the end of its system message, or in a system message of
    their own.
    """
    listed = _list(tools)
    first = messages[0] if messages else {}
    content = first.get("content")
    if first.get("role") == "system" and isinstance(content, str):
        return [{**first, "content": f"{content}\n\n{listed}"}, *messages[1:]]
    return [{"role": "system", "content": listed}, *messages]


def _list(tools: Sequence[Mapping[str, Json]]) -> str:
    lines = "\n".join(_written(cast(Json, tool)) for tool in tools)
    return (
        f"Tools, one JSON object a line:\n<tools>\n{lines}\n</tools>\n"
        'To call one, write:\n<tool_call>\n{"name": its name, "arguments": an object}\n</tool_call>'
    )


def _call(call: Json) -> str:
    """A call as the model writes it. A call of an unknown shape is written as it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return f"<tool_call>\n{_written(call)}\n</tool_call>"
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else _written(arguments)
    return (
        f'<tool_call>\n{{"name": {_written(function.get("name"))}, "arguments": '
        f"{written}}}\n</tool_call>"
    )


def _written(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
