"""Calls as Mistral's models write them: `[TOOL_CALLS]` and a list of objects, or a name and its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from midflight.text.formats.assistant import Tool, ToolCall
from midflight.text.formats.cursor import SPACES, Cursor, NotACall, Reading
from midflight.text.formats.hermes import objects_of
from midflight.text.formats.json_call import as_call, read_object
from midflight.text.formats.lark import Lark, alternatives, arguments, literal
from midflight.text.formats.tool_format import Give

OPENING, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_NAME = re.compile(r"[\w.:/-]+")


@dataclass(frozen=True, slots=True)
class Mistral:
    """Both forms are read: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, whose calls are known when the list is
    closed, and `[TOOL_CALLS]name[ARGS]{...}` (in some versions without `[ARGS]`, or with `[CALL_ID]` and an id before it)."""

    named: bool
    """Whether the model is made to write the second form."""

    opening = OPENING
    markers = (OPENING, ARGUMENTS, CALL_ID)

    def read(self, cursor: Cursor, give: Give, tools: Sequence[Tool]) -> Reading[None]:
        yield from cursor.run(SPACES)
        if (yield from cursor.literal("[")):
            calls = yield from _listed(cursor)
        else:
            calls = [(yield from _named(cursor))]
        for call in calls:
            give(call)

    def read_bare(self, cursor: Cursor, give: Give) -> None:
        return None

    def rules(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        if self.named:
            return _named_rules(lark, tools, parallel=parallel)
        names, objects = objects_of(tools, "arguments")
        more = ' (", " call)*' if parallel else ""
        return "\n".join([f'calls: {lark.marker(OPENING)} "[" call{more} "]"', f"call: {alternatives(names)}", *objects])


def _listed(cursor: Cursor) -> Reading[list[ToolCall]]:
    calls: list[ToolCall] = []
    while True:
        yield from cursor.run(SPACES)
        calls.append(as_call((yield from read_object(cursor))))
        yield from cursor.run(SPACES)
        if not (yield from cursor.literal(",")):
            yield from cursor.expect("]")
            return calls


def _named(cursor: Cursor) -> Reading[ToolCall]:
    name = yield from cursor.run(_NAME)
    yield from cursor.run(SPACES)
    if (yield from cursor.literal(CALL_ID)):
        yield from cursor.run(_NAME)
    yield from cursor.literal(ARGUMENTS)
    yield from cursor.run(SPACES)
    mark = cursor.mark()
    yield from read_object(cursor)
    if not name:
        raise NotACall
    return ToolCall(name, cursor.since(mark))


def _named_rules(lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
    names = [f"tool_{place}" for place in range(len(tools))]
    rules = [f"calls: call{'+' if parallel else ''}", f"call: {lark.marker(OPENING)} {alternatives(names)}"]
    for name, tool in zip(names, tools, strict=True):
        rules += [
            f"{name}: {literal(tool.name)} {lark.marker(ARGUMENTS)} {name}_arguments",
            f"{name}_arguments: {arguments(tool.parameters)}",
        ]
    return "\n".join(rules)
