"""Values of wrong types, at every place of a rich request: read, or refused by a 400 that names the place; never anything else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from midflight.errors import MidflightError, RequestRejected
from midflight.gateway.dialects.chat import ChatExchange
from midflight.gateway.dialects.contents import ContentsExchange
from midflight.gateway.dialects.messages import MessagesExchange
from midflight.gateway.dialects.responses import ResponsesExchange

SCHEMA = {
    "type": "object",
    "title": "t",
    "properties": {"city": {"type": "string", "enum": ["a"], "description": "d"}, "n": {"anyOf": [{"$ref": "#/$defs/p"}]}},
    "required": ["city"],
    "$defs": {"p": {"type": "array", "items": {"type": "string", "pattern": "x"}}},
}
GOOGLES = {
    "type": "OBJECT",
    "properties": {"city": {"type": "STRING", "enum": ["a"], "nullable": True}, "n": {"type": "ARRAY", "items": {"type": "INTEGER"}, "maxItems": "3"}},
    "required": ["city"],
    "propertyOrdering": ["n", "city"],
}  # fmt: skip
FORMAT = {"name": "p", "schema": SCHEMA, "strict": True}
CUSTOM = {"name": "patch", "description": "d", "format": {"type": "grammar", "syntax": "lark", "definition": "s"}}
BODIES: dict[str, tuple[type, dict[str, Any]]] = {
    "chat": (
        ChatExchange,
        {
            "model": "policy",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"},
                {
                    "role": "assistant",
                    "content": "x",
                    "reasoning_content": "r",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
                        {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "t"}},
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "sun"},
            ],
            "tools": [
                {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}},
                {"type": "custom", "custom": CUSTOM},
            ],
            "response_format": {"type": "json_schema", "json_schema": FORMAT},
            "stream_options": {"include_usage": True},
            "thinking": {"type": "enabled"},
            "reasoning": {"effort": "low", "enabled": True},
        },
    ),
    "responses": (
        ResponsesExchange,
        {
            "model": "policy",
            "input": [
                {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "function_call", "id": "f", "call_id": "c1", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sun"}]},
                {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "t"},
            ],
            "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}, {"type": "custom", **CUSTOM}],
            "text": {"format": {"type": "json_schema", **FORMAT}},
            "reasoning": {"effort": "low", "summary": "auto"},
            "metadata": {"a": "b"},
        },
    ),
    "messages": (
        MessagesExchange,
        {
            "model": "policy",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}, "title": "t", "context": "c"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": ""},
                        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "a"}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}], "is_error": False}]},
            ],
            "tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA}],
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    "contents": (
        ContentsExchange,
        {
            "systemInstruction": {"role": "user", "parts": [{"text": "s"}]},
            "contents": [
                {"role": "user", "parts": [{"text": "hi"}]},
                {
                    "role": "model",
                    "parts": [
                        {"text": "t", "thought": True, "thoughtSignature": "c2ln"},
                        {"functionCall": {"id": "c1", "name": "weather", "args": {"city": "a"}}},
                    ],
                },
                {"role": "user", "parts": [{"functionResponse": {"id": "c1", "name": "weather", "response": {"output": "sun"}}}]},
            ],
            "tools": [
                {"functionDeclarations": [{"name": "weather", "description": "d", "parameters": GOOGLES}]},
                {"functionDeclarations": [{"name": "clock", "parametersJsonSchema": SCHEMA}]},
            ],
            "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
            "generationConfig": {
                "temperature": 0.5, "topP": 0.9, "topK": 3, "maxOutputTokens": 9, "stopSequences": ["x"], "seed": 1, "candidateCount": 1,
                "responseMimeType": "application/json", "responseSchema": GOOGLES, "responseLogprobs": True,
                "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 4, "thinkingLevel": "LOW"},
            },
        },
    ),
}  # fmt: skip


def places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*place, key)
        yield from places(value[key], (*place, key))


def with_value(body: Any, place: tuple[str | int, ...], value: Any) -> Any:
    copied = holder = json.loads(json.dumps(body))
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return copied


@pytest.mark.parametrize("dialect", BODIES)
@pytest.mark.parametrize("value", [None, True, -1.5, "?", [7], {"a": 1}], ids=str)
def test_a_value_of_any_type_at_any_place_is_read_or_refused_by_its_place(dialect: str, value: Any) -> None:
    kind, good = BODIES[dialect]
    kind(json.dumps(good).encode())
    for place in places(good):
        try:
            kind(json.dumps(with_value(good, place, value)).encode())
        except MidflightError as error:
            where, named = ".".join(map(str, place)), str(getattr(error, "param", None))
            assert isinstance(error, RequestRejected) and 400 <= error.status < 500, where
            assert named.startswith(where) or where.startswith(named), f"{where} was refused as {named}"


def allowed(tools: Any, mode: str = "auto") -> dict[str, Any]:
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


@pytest.mark.parametrize(
    ("dialect", "place", "value"),
    [
        ("chat", "response_format.json_schema.strict", "yes"),
        ("chat", "response_format.json_schema.schema.title", 1),
        ("chat", "tools.0.function.parameters.properties.city.description", ["d"]),
        ("chat", "tools.0.function.parameters.$defs.p.items.pattern", 5),
        ("chat", "tools.0.function.parameters.properties.n.anyOf.0.$ref", {}),
        ("chat", "thinking.type", 1),
        ("responses", "input.0.type", {}),
        ("responses", "input.0.id", 7),
        ("responses", "input.0.status", []),
        ("responses", "input.0.content.0.annotations", "x"),
        ("responses", "input.1.summary", "x"),
        ("responses", "input.1.summary.0.text", 5),
        ("responses", "input.1.content", {}),
        ("responses", "metadata.a", 1),
        ("messages", "messages.0.content.0.source.media_type", 1),
        ("messages", "messages.0.content.0.source.data", 1),
        ("messages", "messages.0.content.0.title", []),
        ("messages", "messages.0.content.0.context", {}),
        ("messages", "messages.1.content.0.signature", 3),
        ("messages", "messages.2.content.0.is_error", "no"),
    ],
)
def test_what_was_passed_over_in_silence_is_refused_by_its_place(dialect: str, place: str, value: Any) -> None:
    kind, good = BODIES[dialect]
    keys = tuple(int(key) if key.isdigit() else key for key in place.split("."))
    with pytest.raises(RequestRejected) as caught:
        kind(json.dumps(with_value(good, keys, value)).encode())
    assert caught.value.param == place


@pytest.mark.parametrize(
    ("choice", "place"),
    [
        (allowed("x"), "tool_choice.allowed_tools.tools"),
        (allowed([7]), "tool_choice.allowed_tools.tools.0"),
        (allowed([{"type": 1}]), "tool_choice.allowed_tools.tools.0.type"),
        (allowed([{"type": "function", "function": {"name": "f"}}]), "tool_choice.allowed_tools.tools.0.function.name"),
        (allowed([], mode="sometimes"), "tool_choice.allowed_tools.mode"),
        ({"tool_choice": {"type": "allowed_tools", "tools": {}}}, "tool_choice.tools"),
    ],
)
def test_a_choice_among_tools_names_its_own_place(choice: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        ChatExchange(json.dumps(BODIES["chat"][1] | choice).encode())
    assert caught.value.param == place
