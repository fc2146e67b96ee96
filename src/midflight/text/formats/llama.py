"""Calls as Llama 3 writes them: `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or as the whole message."""

from __future__ import annotations

import json
from collections.abc import Sequence

from midflight.text.formats.assistant import Tool, ToolCall
from midflight.text.formats.cursor import SPACES, Cursor, NotACall, Reading
from midflight.text.formats.json_call import as_call, read_object
from midflight.text.formats.lark import Lark, alternatives, arguments, literal
from midflight.text.formats.tool_format import Give

OPENING = "<|python_tag|>"


class Llama3:
    """Several objects are separated by `;`. After the tag each is a call of its own; without it, all of the message must be
    calls, which is known at its end."""

    opening = OPENING
    markers = (OPENING,)

    def read(self, cursor: Cursor, give: Give, tools: Sequence[Tool]) -> Reading[None]:
        yield from cursor.run(SPACES)
        while True:
            give(as_call((yield from read_object(cursor))))
            yield from cursor.run(SPACES)
            yield from cursor.expect(";")
            yield from cursor.run(SPACES)

    def read_bare(self, cursor: Cursor, give: Give) -> Reading[None]:
        calls: list[ToolCall] = []
        while True:
            calls.append(as_call((yield from read_object(cursor))))
            yield from cursor.run(SPACES)
            if not (yield from cursor.literal(";")):
                break
            yield from cursor.run(SPACES)
        if (yield from cursor.peek()):
            raise NotACall
        for call in calls:
            give(call)

    def rules(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        names = [f"tool_{place}" for place in range(len(tools))]
        return "\n".join(
            [
                f"calls: {lark.marker(OPENING)}? call" + (' ("; " call)*' if parallel else ""),
                f"call: {alternatives(names)}",
                *(rule for name, tool in zip(names, tools, strict=True) for rule in _tool_rules(name, tool)),
            ]
        )


def _tool_rules(name: str, tool: Tool) -> tuple[str, str]:
    """One tool's object, JSON token by JSON token: llguidance decides between it and other JSON that may stand in its place by
    comparing such tokens."""
    parts = ["{", '"name"', ":", " ", json.dumps(tool.name), ",", " ", '"parameters"', ":", " "]
    head = " ".join(literal(part) for part in parts)
    return f'{name}: {head} {name}_arguments "}}"', f"{name}_arguments: {arguments(tool.parameters)}"
