"""However a message is cut into pieces, it is the same message, nothing of it is lost, and reading it costs in proportion to its length."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.written import CLOCK, WEATHER, model

from midflight.text.formats import AssistantMessage, MessageFormat
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
    parser = FORMATS[name].parser("x", calls=True)
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
