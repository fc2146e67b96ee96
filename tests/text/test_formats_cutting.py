"""However a message is cut into pieces, it is the same message, nothing of it is lost, and reading it costs in proportion to its length."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json
from tests.text.written import CLOCK, WEATHER, model

from midflight.text.formats import ArgumentsPiece, AssistantMessage, CallPiece, MessageFormat, Piece, ToolCall
from midflight.text.formats.assistant import joined
from midflight.text.formats.format import TOOL_FORMATS

TOOLS = [name for name in TOOL_FORMATS if name not in ("auto", "none")]
FORMATS = {
    (tools, reasoning): MessageFormat(model(), tools=tools, reasoning=reasoning) for tools in TOOLS for reasoning in ("think", "mistral")
}
BLOCKS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>", "[THINK]", "[/THINK]"),
    *("<function=clock>", "<parameter=a>", "</parameter>", "</function>"),
    *('"name"', '"clock"', '"arguments"', '"parameters"', '{"name": "clock", "arguments": ', '{"a": 1}', '"{}"', "{}"),
    *("{", "}", "[", "]", ":", ",", ";", '"', "\\", "<", "</", ">", " ", "\n", "\t", "\r", "\u2003", "é", "a", "12", "true", "\\u00"),
    *('{"name": "clock", "parameters": {}}', '<tool_call>\n{"name": "clock", "arguments": {"a": "<"}}\n</tool_call>'),
    *(
        '[TOOL_CALLS][{"name": "clock", "arguments": {}}]',
        '[TOOL_CALLS]clock[ARGS]{"a": [1, 2]}',
        '<|python_tag|>{"name": "clock", "parameters": {}}',
    ),
    "<tool_call>\n<function=clock>\n<parameter=a>\nx < y\n</parameter>\n</function>\n</tool_call>",
]

texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join)
formats = st.sampled_from(sorted(FORMATS))
prompts = st.sampled_from([None, "x", "x<think>\n", "x[THINK]"])


def cut(text: str, places: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(borders)]


def fed(name: tuple[str, str], parts: list[str], prompt: str | None, *, calls: bool = True) -> AssistantMessage:
    parser = FORMATS[name].parser(prompt, calls=calls, tools=[WEATHER, CLOCK])
    pieces = tuple(piece for part in parts for piece in parser.feed(part))
    return joined(pieces + parser.finish())


@given(texts, formats, prompts, st.lists(st.integers(min_value=0, max_value=400), max_size=12), st.booleans())
@settings(max_examples=600, deadline=None)
def test_a_text_cut_anywhere_gives_the_message_of_the_whole(
    text: str, name: tuple[str, str], prompt: str | None, places: list[int], calls: bool
) -> None:
    whole = FORMATS[name].parse(text, prompt, calls=calls, tools=[WEATHER, CLOCK])
    assert fed(name, cut(text, places), prompt, calls=calls) == whole
    assert fed(name, list(text), prompt, calls=calls) == whole


@given(texts, formats, prompts)
@settings(max_examples=600, deadline=None)
def test_without_a_call_every_letter_is_reasoning_or_content(text: str, name: tuple[str, str], prompt: str | None) -> None:
    message = FORMATS[name].parse(text, prompt, calls=True, tools=[WEATHER, CLOCK])
    if message.tool_calls:
        return
    opening, closing = BLOCKS[name[1]]
    thought, said, letters = (solid(each) for each in (message.reasoning, message.content, text))
    begun = "" if prompt is not None and prompt.rstrip().endswith(opening) else opening
    assert letters in (said, begun + thought, begun + thought + closing + said)


def partly(name: tuple[str, str], parts: list[str], *, ends: bool = True) -> tuple[Piece, ...]:
    parser = FORMATS[name].parser("x", calls=True, tools=[WEATHER, CLOCK], partly=True)
    pieces = tuple(piece for part in parts for piece in parser.feed(part))
    return pieces + parser.finish() if ends else pieces


@given(texts, formats, st.lists(st.integers(min_value=0, max_value=400), max_size=12))
@settings(max_examples=600, deadline=None)
def test_told_partly_a_text_cut_anywhere_gives_one_message_whose_calls_are_the_whole_ones_or_begin_as_objects(
    text: str, name: tuple[str, str], places: list[int]
) -> None:
    whole, pieces = fed(name, [text], "x"), partly(name, list(text))
    message = joined(pieces)
    assert joined(partly(name, cut(text, places))) == message == joined(partly(name, [text]))
    ended = {piece.index for piece in pieces if isinstance(piece, ArgumentsPiece) and piece.last}
    begun = {piece.index for piece in pieces if isinstance(piece, CallPiece) and piece.begins}
    if begun <= ended:
        assert message == whole
    for index in begun:
        told = ""
        for piece in pieces:
            if isinstance(piece, ArgumentsPiece) and piece.index == index:
                told += piece.text
                assert isinstance(from_json(told, allow_partial="trailing-strings"), dict)


def solid(text: str) -> str:
    return "".join(letter for letter in text if letter not in " \t\r\n")


WHOLE = {
    "hermes": '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "clock", "parameters": {}}',
    "mistral": "[TOOL_CALLS]clock[ARGS]{}",
    "qwen_coder": "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
}
HALVES = ["a", "<", "<t", "<tool", "</tool_call", "<tool_call>", "<|python", "[", "[TOOL_", "[ARGS", '{"name"', '"', " ", "\n"]


@given(st.lists(st.sampled_from(HALVES) | st.just("CALL"), max_size=8), formats, st.booleans())
@settings(max_examples=400, deadline=None)
def test_every_whole_call_is_found_whatever_half_markers_stand_before_it(parts: list[str], name: tuple[str, str], thinks: bool) -> None:
    opening, closing = BLOCKS[name[1]]
    text = "".join(WHOLE[name[0]] if part == "CALL" else part for part in parts)
    message = fed(name, [f"{opening}a{closing}" * thinks + text], "x")
    assert [call.name for call in message.tool_calls] == ["clock"] * parts.count("CALL")
    assert solid(message.content) == solid("".join(part for part in parts if part != "CALL"))


ARGUMENTS = r'{"city": "O\"sl\u00f6\n", "days": -1.5e3, "at": {"x": [true, null]}}'
LETTERS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3": f'<|python_tag|>{{"name": "weather", "id": 1, "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "clock", "arguments": {{}}}}]',
}


@pytest.mark.parametrize("name", LETTERS)
def test_arguments_are_told_letter_by_letter_and_add_up_to_those_of_the_whole(name: str) -> None:
    pieces = partly((name, "think"), list(LETTERS[name]))
    told = [piece.text for piece in pieces if isinstance(piece, ArgumentsPiece) and piece.index == 0]
    # A number or a word is told with the letter after it, an escape when it is whole: -1.5e3, true, null, \", \u00f6 and \n.
    assert len([text for text in told if text]) == len(ARGUMENTS) - (6 + 4 + 4 + 1 + 5 + 1) and "".join(told) == ARGUMENTS
    assert pieces[0] == CallPiece(0, ToolCall("weather", ""), begins=True)
    assert joined(pieces) == FORMATS[name, "think"].parse(LETTERS[name], "x", calls=True)


@pytest.mark.parametrize(
    ("text", "told", "content"),
    [
        ('{"a": "b', '{"a": "b', ""),
        ('{"a": tru', '{"a": tru', ""),
        ('{"a": "\\u12', '{"a": "\\u12', ""),
        ('{"a": tx, 1}', '{"a": ', "tx, 1}"),
        ('{"a": "\\q"}', '{"a": "', '\\q"}'),
        ('{"a": 1} and more', '{"a": 1}', "and more"),
        ('{"a": 1}', '{"a": 1}', ""),
    ],
)
def test_a_call_that_was_begun_and_breaks_off_stays_one_with_the_arguments_told(text: str, told: str, content: str) -> None:
    message = joined(partly(("hermes", "think"), [f'<tool_call>{{"name": "clock", "arguments": {text}']))
    assert message == AssistantMessage(content, "", (ToolCall("clock", told),))
    assert fed(("hermes", "think"), [f'<tool_call>{{"name": "clock", "arguments": {text}'], "x").tool_calls == ()


def test_what_is_not_sure_to_be_a_call_of_a_known_tool_is_told_whole_or_not_at_all() -> None:
    """A tool that was not given, a name that comes late, arguments as a text, a message that may be JSON, and a tool that is told whole."""
    for name, text in [
        ("hermes", '<tool_call>{"name": "other", "arguments": {"a'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "clock"'),
        ("hermes", '<tool_call>{"name": "clock", "arguments": "{'),
        ("llama3", '{"name": "clock", "parameters": {"a'),
    ]:
        assert partly((name, "think"), list(text), ends=False) == ()
    parser = FORMATS["hermes", "think"].parser("x", calls=True, tools=[replace(CLOCK, told_whole=True)], partly=True)
    assert parser.feed('<tool_call>{"name": "clock", "arguments": {') == ()
    assert parser.feed("}}</tool_call>") == (CallPiece(0, ToolCall("clock", "{}")),)


CALL = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("tools", "beginning", "unit"),
    [
        ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": "', "x"),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": [', "1, "),
        ("hermes", '<tool_call>{"name": "clock", "arguments": ', '{"a": '),
        ("hermes", "", '<tool_call>{"'),
        ("hermes", "", "<tool_call>"),
        ("hermes", "", CALL),
        ("hermes", "", "\n"),
        ("hermes", "<think>", "\n<"),
        ("hermes", "<think>", "</th"),
        ("hermes", "", "<tool_cal"),
        ("llama3", "", '{"name": "clock", "parameters": {}};'),
        ("mistral", "[TOOL_CALLS][", '{"name": "clock", "arguments": {}},'),
        ("mistral", "[TOOL_CALLS]", "a"),
        ("qwen_coder", "<tool_call><function=f><parameter=a>", "</para"),
        ("qwen_coder", "<tool_call><function=f>", "<parameter=a>1</parameter>"),
    ],
)
def test_reading_letter_by_letter_costs_in_proportion_to_the_length(tools: str, beginning: str, unit: str) -> None:
    short, long = (deeds((tools, "think"), beginning + unit * (n // len(unit))) for n in (4_000, 8_000))
    assert long < 2.2 * short


def deeds(name: tuple[str, str], text: str) -> int:
    """Calls and returns of functions, of Python's and of C's, while the text is fed letter by letter."""
    parser = FORMATS[name].parser("x", calls=True, tools=[WEATHER, CLOCK], partly=True)
    count = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += 1

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        for letter in text:
            parser.feed(letter)
        parser.finish()
    finally:
        sys.setprofile(before)
    return count
