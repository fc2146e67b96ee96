"""Calls as Hermes, Qwen and many others write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after another."""

from __future__ import annotations

from collections.abc import Sequence

from midflight.text.formats.assistant import Tool
from midflight.text.formats.cursor import SPACES, Cursor, Reading
from midflight.text.formats.json_call import as_call, read_object
from midflight.text.formats.lark import Lark, alternatives, arguments, literal
from midflight.text.formats.tool_format import Give

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes:
    """Whitespace may stand around the object; text around the calls is content."""

    opening = OPENING
    markers = (OPENING, CLOSING)

    def read(self, cursor: Cursor, give: Give, tools: Sequence[Tool]) -> Reading[None]:
        yield from cursor.run(SPACES)
        call = as_call((yield from read_object(cursor)))
        yield from cursor.run(SPACES)
        yield from cursor.expect(CLOSING)
        give(call)

    def read_bare(self, cursor: Cursor, give: Give) -> None:
        return None

    def rules(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        names, objects = objects_of(tools, "arguments")
        opening, closing = lark.marker(OPENING), lark.marker(CLOSING)
        return "\n".join(
            [
                'calls: call ("\\n" call)*' if parallel else "calls: call",
                f'call: {opening} "\\n" {alternatives(names)} "\\n" {closing}',
                *objects,
            ]
        )


def objects_of(tools: Sequence[Tool], member: str) -> tuple[list[str], list[str]]:
    """A rule for each tool, `{"name": its name, member: its arguments}`: their names, and the rules."""
    names = [f"tool_{place}" for place in range(len(tools))]
    rules: list[str] = []
    for name, tool in zip(names, tools, strict=True):
        head = f'{{"name": {literal(tool.name)}, "{member}": '
        rules += [f'{name}: {literal(head)} {name}_arguments "}}"', f"{name}_arguments: {arguments(tool.parameters)}"]
    return names, rules
