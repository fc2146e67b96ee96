"""One conversation is one prompt, in whichever of the four chat dialects it is sent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.written import QWEN, model

from midflight.errors import RequestRejected
from midflight.gateway.dialects.chat import ChatExchange
from midflight.gateway.dialects.contents import ContentsExchange
from midflight.gateway.dialects.messages import MessagesExchange
from midflight.gateway.dialects.responses import ResponsesExchange
from midflight.gateway.sessions.request import CompletionCall
from midflight.gateway.sessions.session import Session

EVERYTHING = "{{ messages | tojson(sort_keys=true) }}{{ tools | tojson }}{{ reasoning_effort }}"
"""A template that shows all that a template could read."""

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
GOOGLES = {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}}
Objects: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True)
class Said:
    """One turn of the assistant: each call has a name, arguments and a result."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, dict[str, Any], str], ...]


Turn: TypeAlias = str | Said
"""A text is the user's."""


def ids(place: int, said: Said) -> list[str]:
    return [f"id{place}_{k}" for k in range(len(said.calls))]


def chat(system: str | None, turns: list[Turn]) -> CompletionCall:
    messages: Objects = [] if system is None else [{"role": "system", "content": system}]
    for place, turn in enumerate(turns):
        if isinstance(turn, str):
            messages.append({"role": "user", "content": [{"type": "text", "text": turn}]})
            continue
        calls = [
            {"id": i, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments, _) in zip(ids(place, turn), turn.calls, strict=True)
        ]
        messages.append({"role": "assistant", "content": turn.content or None, "reasoning_content": turn.reasoning, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": i, "content": result} for i, (_, _, result) in zip(ids(place, turn), turn.calls, strict=True)
        ]
    tool = {"type": "function", "function": {"name": "weather", "description": "Looks out.", "parameters": SCHEMA}}
    body = {"model": "m", "messages": messages, "tools": [tool], "reasoning_effort": "low"}
    return ChatExchange(json.dumps(body).encode()).call


def responses(system: str | None, turns: list[Turn]) -> CompletionCall:
    items: Objects = []
    for place, turn in enumerate(turns):
        if isinstance(turn, str):
            items.append({"role": "user", "content": [{"type": "input_text", "text": turn}]})
            continue
        if turn.reasoning:
            items.append({"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": turn.reasoning}]})
        if turn.content or not turn.calls:
            items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": turn.content}]})
        named = list(zip(ids(place, turn), turn.calls, strict=True))
        items += [{"type": "function_call", "call_id": i, "name": name, "arguments": json.dumps(given)} for i, (name, given, _) in named]
        items += [{"type": "function_call_output", "call_id": i, "output": result} for i, (_, _, result) in named]
    tool = {"type": "function", "name": "weather", "description": "Looks out.", "parameters": SCHEMA}
    body = {"model": "m", "input": items, "instructions": system, "tools": [tool], "reasoning": {"effort": "low"}}
    return ResponsesExchange(json.dumps(body).encode()).call


def messages(system: str | None, turns: list[Turn]) -> CompletionCall:
    """Results of tools and what the user says after them are one message."""
    found: Objects = []
    results: Objects = []
    for place, turn in enumerate(turns):
        if isinstance(turn, str):
            found.append({"role": "user", "content": [*results, {"type": "text", "text": turn}]})
            results = []
            continue
        if results:
            found.append({"role": "user", "content": results})
        named = list(zip(ids(place, turn), turn.calls, strict=True))
        blocks: Objects = [{"type": "thinking", "thinking": turn.reasoning, "signature": ""}, {"type": "text", "text": turn.content}]
        blocks += [{"type": "tool_use", "id": i, "name": name, "input": given} for i, (name, given, _) in named]
        found.append({"role": "assistant", "content": blocks})
        results = [{"type": "tool_result", "tool_use_id": i, "content": result} for i, (_, _, result) in named]
    tool = {"name": "weather", "description": "Looks out.", "input_schema": SCHEMA}
    body = {"model": "m", "max_tokens": 9, "system": system, "messages": found, "tools": [tool], "output_config": {"effort": "low"}}
    return MessagesExchange(json.dumps(body).encode()).call


def contents(system: str | None, turns: list[Turn]) -> CompletionCall:
    """What the model says comes in several contents, as SDKs keep the pieces of a stream; the second call names no id."""
    found: Objects = []
    results: Objects = []
    for place, turn in enumerate(turns):
        if isinstance(turn, str):
            found.append({"role": "user", "parts": [*results, {"text": turn}]})
            results = []
            continue
        if results:
            found.append({"role": "user", "parts": results})
        named = list(zip(ids(place, turn), turn.calls, strict=True))
        parts: Objects = [{"text": turn.reasoning, "thought": True}, {"text": turn.content[:2]}, {"text": turn.content[2:]}]
        parts += [{"functionCall": {"id": i, "name": name, "args": given}} for i, (name, given, _) in named]
        found += [{"role": "model", "parts": [part]} for part in parts]
        results = [{"functionResponse": {"id": i, "name": name, "response": {"output": result}}} for i, (name, _, result) in named]
        for result in results[1:]:
            del result["functionResponse"]["id"]
    declared = {"functionDeclarations": [{"name": "weather", "description": "Looks out.", "parameters": GOOGLES}]}
    body: dict[str, Any] = {"contents": found, "tools": [declared], "generationConfig": {"thinkingConfig": {"thinkingLevel": "LOW"}}}
    if system is not None:
        body["systemInstruction"] = {"parts": [{"text": system}]}
    return ContentsExchange(json.dumps(body).encode()).call


DIALECTS = {"chat": chat, "responses": responses, "messages": messages, "contents": contents}


def prompts(template: str, system: str | None, turns: list[Turn]) -> dict[str, tuple[int, ...]]:
    tokenizer = model(template)
    session = Session("s", tokenizer, key=None, sampling=None, tracked=False)
    return {name: session.plan(call(system, turns).sources[0]).ids for name, call in DIALECTS.items()}


WORDS = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
CALLS = st.tuples(st.sampled_from(["weather", "clock"]), st.dictionaries(WORDS, VALUES, max_size=3), WORDS)
ANSWERS = st.builds(Said, WORDS, WORDS, st.lists(CALLS, max_size=2).map(tuple))


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """The user begins and ends; an answer with calls may be followed by another, one without is answered by the user."""
    user = WORDS.filter(bool)
    turns: list[Turn] = [draw(user)]
    for answer in draw(st.lists(ANSWERS, max_size=4)):
        turns += [answer] if answer.calls else [answer, draw(user)]
    return [*turns, draw(user)] if isinstance(turns[-1], Said) else turns


@given(st.none() | st.text("abc", min_size=1, max_size=5), conversations())
def test_a_conversation_is_the_same_prompt_in_every_dialect(system: str | None, turns: list[Turn]) -> None:
    for template in (EVERYTHING, QWEN):
        found = prompts(template, system, turns)
        assert found["chat"] == found["responses"] == found["messages"] == found["contents"]


def test_everything_said_is_in_the_prompt() -> None:
    """So that the prompts cannot agree by all saying nothing."""
    calls = (("weather", {"city": "Oslo", "days": 2.0}, "rain"), ("clock", {}, "noon"))
    turns: list[Turn] = ["Where?", Said("Hm.", "Let me see.", calls), Said("So.", "It rains.", ()), "Thanks"]
    text = bytes(prompts(EVERYTHING, "Be brief.", turns)["responses"]).decode()
    messages_, _, rest = text.partition("][{")
    shown = json.loads(messages_ + "]")
    call = {"type": "function", "id": "id1_0", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2.0}}}
    assert [m["role"] for m in shown] == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert [m["content"] for m in shown] == ["Be brief.", "Where?", "Let me see.", "rain", "noon", "It rains.", "Thanks"]
    assert shown[2]["tool_calls"][0] == call and shown[2]["reasoning_content"] == "Hm."
    assert [m["tool_call_id"] for m in shown[3:5]] == ["id1_0", "id1_1"]
    assert "Looks out." in rest and rest.endswith("low")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_without_a_name_is_refused_in_every_dialect(dialect: str) -> None:
    with pytest.raises(RequestRejected, match=r"name is '': send a text that is not empty"):
        DIALECTS[dialect](None, ["x", Said("", "", (("", {}, ""),)), "y"])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_number_that_json_cannot_write_is_refused_in_every_dialect(dialect: str) -> None:
    with pytest.raises(RequestRejected, match=r"(arguments|input|args) is .*: send the JSON text of an object"):
        DIALECTS[dialect](None, ["x", Said("", "", (("f", {"a": float("inf")}, ""),)), "y"])
