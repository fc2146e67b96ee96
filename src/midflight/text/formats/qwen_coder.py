"""Calls as Qwen3-Coder writes them:
`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from midflight.text.formats.assistant import Calls, Tool, ToolCall
from midflight.text.formats.cursor import SPACES, Cursor, NotACall, Reading
from midflight.text.formats.json_call import loads
from midflight.text.formats.json_formats import END_TOOL_CALL, TOOL_CALL
from midflight.text.formats.lark import Lark, alternatives, json_value, literal
from midflight.types import Json

FUNCTION = "<function="
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"
END_FUNCTION = "</function>"

_NAME = re.compile(r"[^<>\n]+")
_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}


class QwenCoder:
    """The format of Qwen3-Coder. One newline at either end of a value belongs to the markers. A
    value is a string if the tool's schema says so; otherwise it is JSON if it can be read as JSON,
    else a string.
    """

    opening = TOOL_CALL
    announces = True
    markers = (TOOL_CALL, END_TOOL_CALL)

    def read(self, cursor: Cursor, calls: Calls, tools: Sequence[Tool]) -> Reading[None]:
        yield from cursor.run(SPACES)
        yield from cursor.expect(FUNCTION)
        name = yield from _name(cursor)
        schema = next((tool.parameters for tool in tools if tool.name == name), {})
        values: dict[str, str] = {}
        while (yield from _has_parameter(cursor)):
            key = yield from _name(cursor)
            text = yield from cursor.until(END_PARAMETER)
            text = text.removeprefix("\n").removesuffix("\n")
            values[key] = _written(text, _property(schema, key))
        yield from cursor.run(SPACES)
        yield from cursor.expect(END_TOOL_CALL)
        members = [
            f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items()
        ]
        calls.give(ToolCall(name, "{" + ", ".join(members) + "}"))

    def read_bare(self, cursor: Cursor, calls: Calls) -> None:
        return None

    def rules(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        names = [f"tool_{place}" for place in range(len(tools))]
        opening = lark.marker(TOOL_CALL)
        closing = lark.marker(END_TOOL_CALL)
        rules = ['calls: call ("\\n" call)*' if parallel else "calls: call"]
        rules.append(f'call: {opening} "\\n" {alternatives(names)} "\\n" {closing}')
        for name, tool in zip(names, tools, strict=True):
            rules += _tool_rules(lark, name, tool)
        return "\n".join(rules)


def _name(cursor: Cursor) -> Reading[str]:
    name = (yield from cursor.run(_NAME)).strip()
    yield from cursor.expect(">")
    if not name:
        raise NotACall
    return name


def _has_parameter(cursor: Cursor) -> Reading[bool]:
    """Takes `<parameter=` or `</function>`. Returns whether it was the first."""
    yield from cursor.run(SPACES)
    if (yield from cursor.literal(PARAMETER)):
        return True
    yield from cursor.expect(END_FUNCTION)
    return False


def _property(schema: Mapping[str, Json], key: str) -> Mapping[str, Json]:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    return found if isinstance(found, dict) else {}


def _written(text: str, schema: Mapping[str, Json]) -> str:
    """The JSON text of a value."""
    kinds = set(_kinds(schema))
    try:
        kind = _KINDS[type(loads(text))]
    except NotACall:
        kind = "string"
        kinds.add(kind)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    is_json = "string" not in kinds or (kind != "string" and fits)
    return text.strip() if is_json else json.dumps(text, ensure_ascii=False)


def _kinds(schema: Mapping[str, Json]) -> Iterator[str]:
    """The JSON types that a schema names. There are none if it leaves them open."""
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if isinstance(kind, str):
            yield kind
    if kinds is None:
        listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
        for value in listed if isinstance(listed, list) else []:
            yield _KINDS[type(value)]
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            if isinstance(option, dict):
                yield from _kinds(option)


def _tool_rules(lark: Lark, name: str, tool: Tool) -> Iterator[str]:
    """The rules of one tool's function block. Its parameters come in the order of the schema, and
    optional ones may be left out.
    """
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    shared = {
        key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters
    }
    parts: list[str] = []
    for place, key in enumerate(properties if isinstance(properties, dict) else {}):
        rule = f"{name}_{place}"
        parts.append(rule if isinstance(required, list) and key in required else f"{rule}?")
        yield from _parameter_rules(
            lark, rule, key, schema={**shared, **_property(tool.parameters, key)}
        )
    head = literal(f"{FUNCTION}{tool.name}>\n")
    tail = literal(END_FUNCTION)
    yield f"{name}: {' '.join([head, *parts, tail])}"


def _parameter_rules(
    lark: Lark, name: str, key: str, *, schema: Mapping[str, Json]
) -> Iterator[str]:
    head = literal(f"{PARAMETER}{key}>\n")
    tail = f"\n{END_PARAMETER}\n"
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if set(_kinds(schema)) != {"string"}:
        yield f"{name}: {head} {name}_value {literal(tail)}"
        yield f"{name}_value: {json_value(schema)}"
    elif isinstance(listed, list):
        values = alternatives([literal(str(value)) for value in listed])
        yield f"{name}: {head} {values} {literal(tail)}"
    else:
        yield rf'{name}: {head} {name}_value "\n"'
        yield lark.ending(f"{name}_value", END_PARAMETER)
