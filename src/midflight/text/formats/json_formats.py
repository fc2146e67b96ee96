"""The formats whose calls are JSON objects: Hermes (and Qwen), Llama 3 and Mistral."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from midflight.text.formats.assistant import Calls, Tool, ToolCall
from midflight.text.formats.cursor import SPACES, Cursor, NotACall, Reading
from midflight.text.formats.json_call import as_call, read_object
from midflight.text.formats.lark import Lark, alternatives, arguments, literal

TOOL_CALL = "<tool_call>"
END_TOOL_CALL = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"

_NAME = re.compile(r"[\w.:/-]+")


class Hermes:
    """The format of Hermes. Whitespace may surround the object, and text around the calls is
    content. Several objects may form a list, as SmolLM2 writes them.
    """

    opening = TOOL_CALL
    announces = True
    markers = (TOOL_CALL, END_TOOL_CALL)

    def read(self, cursor: Cursor, calls: Calls, tools: Sequence[Tool]) -> Reading[None]:
        yield from cursor.run(SPACES)
        if (yield from cursor.literal("[")):
            yield from _listed(cursor, calls, closing=END_TOOL_CALL)
            return
        call = as_call((yield from read_object(cursor, calls)))
        yield from cursor.run(SPACES)
        yield from cursor.expect(END_TOOL_CALL)
        calls.give(call)

    def read_bare(self, cursor: Cursor, calls: Calls) -> None:
        return None

    def rules(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        names, objects = _objects_of(tools, "arguments")
        opening = lark.marker(TOOL_CALL)
        closing = lark.marker(END_TOOL_CALL)
        rules = ['calls: call ("\\n" call)*' if parallel else "calls: call"]
        rules.append(f'call: {opening} "\\n" {alternatives(names)} "\\n" {closing}')
        rules += objects
        return "\n".join(rules)


def _objects_of(tools: Sequence[Tool], member: str) -> tuple[list[str], list[str]]:
    """The names of one rule for each tool, and the rules. The rule of a tool is `{"name": its name,
    member: its arguments}`.
    """
    names = [f"tool_{place}" for place in range(len(tools))]
    rules: list[str] = []
    for name, tool in zip(names, tools, strict=True):
        head = f'{{"name": {literal(tool.name)}, "{member}": '
        rules += [
            f'{name}: {literal(head)} {name}_arguments "}}"',
            f"{name}_arguments: {arguments(tool.parameters)}",
        ]
    return names, rules


class Llama3:
    """The format of Llama 3. Several objects are separated by `;`. After the tag each object is a
    call. Without the tag an object is a call if `;` or the end of the message follows it.
    """

    opening = PYTHON_TAG
    announces = False
    markers = (PYTHON_TAG,)

    def read(self, cursor: Cursor, calls: Calls, tools: Sequence[Tool]) -> Reading[None]:
        yield from cursor.run(SPACES)
        while True:
            calls.give(as_call((yield from read_object(cursor, calls))))
            yield from cursor.run(SPACES)
            yield from cursor.expect(";")
            yield from cursor.run(SPACES)

    def read_bare(self, cursor: Cursor, calls: Calls) -> Reading[None]:
        while True:
            call = as_call((yield from read_object(cursor)))
            yield from cursor.run(SPACES)
            if not (yield from cursor.literal(";")):
                break
            calls.give(call)
            yield from cursor.run(SPACES)
        if (yield from cursor.peek()):
            raise NotACall
        calls.give(call)

    def rules(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        names = [f"tool_{place}" for place in range(len(tools))]
        more = ' ("; " call)*' if parallel else ""
        rules = [
            f"calls: {lark.marker(PYTHON_TAG)}? call{more}",
            f"call: {alternatives(names)}",
        ]
        for name, tool in zip(names, tools, strict=True):
            rules += _tool_rules(name, tool)
        return "\n".join(rules)


def _tool_rules(name: str, tool: Tool) -> tuple[str, str]:
    """The rules of one tool's object, JSON token by JSON token. llguidance compares such tokens
    when it decides between the object and other JSON that may be in its place.
    """
    parts = ["{", '"name"', ":", " ", json.dumps(tool.name), ",", " ", '"parameters"', ":", " "]
    head = " ".join(literal(part) for part in parts)
    return (
        f'{name}: {head} {name}_arguments "}}"',
        f"{name}_arguments: {arguments(tool.parameters)}",
    )


@dataclass(frozen=True, slots=True)
class Mistral:
    """The formats of Mistral. Both forms are read: `[TOOL_CALLS][{"name": ..., "arguments": {...}},
    ...]`, in which the text after a call confirms it, and `[TOOL_CALLS]name[ARGS]{...}` (in some
    versions without `[ARGS]`, or with `[CALL_ID]` and an id before it).
    """

    named: bool
    """True if the model is made to write the second form."""

    opening = TOOL_CALLS
    announces = True
    markers = (TOOL_CALLS, ARGUMENTS, CALL_ID)

    def read(self, cursor: Cursor, calls: Calls, tools: Sequence[Tool]) -> Reading[None]:
        yield from cursor.run(SPACES)
        if (yield from cursor.literal("[")):
            yield from _listed(cursor, calls)
        else:
            calls.give((yield from _named(cursor, calls)))

    def read_bare(self, cursor: Cursor, calls: Calls) -> None:
        return None

    def rules(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        if self.named:
            return _named_rules(lark, tools, parallel=parallel)
        names, objects = _objects_of(tools, "arguments")
        more = ' (", " call)*' if parallel else ""
        rules = [
            f'calls: {lark.marker(TOOL_CALLS)} "[" call{more} "]"',
            f"call: {alternatives(names)}",
        ]
        rules += objects
        return "\n".join(rules)


def _listed(cursor: Cursor, calls: Calls, *, closing: str = "") -> Reading[None]:
    """Reads calls up to the end of their list, and the list's `closing` marker if it has one."""
    goes_on = True
    while goes_on:
        yield from cursor.run(SPACES)
        call = as_call((yield from read_object(cursor, calls)))
        yield from cursor.run(SPACES)
        goes_on = yield from cursor.literal(",")
        if not goes_on:
            yield from cursor.expect("]")
            if closing:
                yield from cursor.run(SPACES)
                yield from cursor.expect(closing)
        calls.give(call)


def _named(cursor: Cursor, calls: Calls) -> Reading[ToolCall]:
    name = yield from cursor.run(_NAME)
    yield from cursor.run(SPACES)
    if (yield from cursor.literal(CALL_ID)):
        yield from cursor.run(_NAME)
    yield from cursor.literal(ARGUMENTS)
    yield from cursor.run(SPACES)
    if not name:
        raise NotACall
    mark = cursor.mark()
    if (yield from cursor.peek()) == "{":
        calls.begin(name)
    yield from read_object(cursor)
    calls.end()
    return ToolCall(name, cursor.since(mark))


def _named_rules(lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
    names = [f"tool_{place}" for place in range(len(tools))]
    rules = [
        f"calls: call{'+' if parallel else ''}",
        f"call: {lark.marker(TOOL_CALLS)} {alternatives(names)}",
    ]
    for name, tool in zip(names, tools, strict=True):
        rules += [
            f"{name}: {literal(tool.name)} {lark.marker(ARGUMENTS)} {name}_arguments",
            f"{name}_arguments: {arguments(tool.parameters)}",
        ]
    return "\n".join(rules)
