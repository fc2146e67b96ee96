from __future__ import annotations

import pytest
from tests.text.written import CLOCK, WEATHER, model

from midflight.text.formats import AssistantMessage, CallPiece, ContentPiece, MessageFormat, ReasoningPiece, Tool, ToolCall
from midflight.types import Json

OSLO = ToolCall("weather", '{"city": "Oslo"}')
NOW = ToolCall("clock", "{}")


def read(tools: str, text: str, *, reasoning: str = "none", prompt: str | None = "x", calls: bool = True) -> AssistantMessage:
    return MessageFormat(model(), tools=tools, reasoning=reasoning).parse(text, prompt, calls=calls, tools=[WEATHER, CLOCK])


HERMES_OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HERMES_NOW = '<tool_call>{"name":"clock","arguments":{}}</tool_call>'
CODER_OSLO = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"

CALLS = [
    ("hermes", HERMES_OSLO, "", (OSLO,)),
    ("hermes", f"{HERMES_OSLO}\n{HERMES_NOW}\n", "", (OSLO, NOW)),
    ("hermes", f"Let me see.\n\n{HERMES_OSLO}", "Let me see.", (OSLO,)),
    ("hermes", f"\n{HERMES_OSLO}\nDone. ", "Done. ", (OSLO,)),
    ("hermes", f"One \n{HERMES_OSLO}\n two", "One \n\n two", (OSLO,)),
    ("hermes", f"a < b <tool {HERMES_NOW}", "a < b <tool", (NOW,)),
    ("hermes", f"<tool_call><tool_call> no {HERMES_NOW}", "<tool_call><tool_call> no", (NOW,)),
    (
        "hermes",
        '<tool_call>{"arguments": "{\\"city\\": \\"Oslo\\"}", "name": "weather", "id": [1, {"a": null}]}</tool_call>',
        "",
        (OSLO,),
    ),
    (
        "hermes",
        '<tool_call>{"name": "w", "arguments": {"a": "</tool_call>{\\"", "b": [1.5e3, -0, true, {"c": []}]}}</tool_call>',
        "",
        (ToolCall("w", '{"a": "</tool_call>{\\"", "b": [1.5e3, -0, true, {"c": []}]}'),),
    ),
    (
        "hermes",
        '<tool_call>[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "clock", "arguments": {}}]</tool_call>',
        "",
        (OSLO, NOW),
    ),
    ("hermes", 'See: <tool_call>[\n{"name": "clock", "arguments": {}}\n]\n</tool_call> so', "See:  so", (NOW,)),
    ("hermes", "<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", ()),
    ("llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}', "", (OSLO,)),
    ("llama3", '{"name": "weather", "parameters": {"city": "Oslo"}}', "", (OSLO,)),
    ("llama3", '\n{"name": "weather", "parameters": {"city": "Oslo"}} ; {"name": "clock", "parameters": {}}\n', "", (OSLO, NOW)),
    ("llama3", 'I call <|python_tag|>{"name": "clock", "parameters": {}}; {"name": "clock", "arguments": {}}', "I call", (NOW, NOW)),
    ("llama3", '<|python_tag|>{"name": "clock", "parameters": {}}; and more', "; and more", (NOW,)),
    ("llama3", '{"name": "clock", "parameters": {}};', "", (NOW,)),
    ("llama3", '{"name": "clock", "parameters": {}}; and more', "and more", (NOW,)),
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "clock", "arguments": {}}]', "", (OSLO, NOW)),
    ("mistral", '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "clock"}]', '{"name": "clock"}]', (NOW,)),
    ("mistral", 'See: [TOOL_CALLS] [{"name": "clock", "arguments": {}, "id": "abc"}]', "See:", (NOW,)),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]clock[ARGS]{}', "", (OSLO, NOW)),
    ("mistral", '[TOOL_CALLS]weather{"city": "Oslo"}', "", (OSLO,)),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]x1Y2[ARGS]{"city": "Oslo"}', "", (OSLO,)),
    ("qwen_coder", f"Well.\n{CODER_OSLO}\n{CODER_OSLO}", "Well.", (OSLO, OSLO)),
    ("qwen_coder", "<tool_call><function=clock></function></tool_call>", "", (NOW,)),
]


@pytest.mark.parametrize(("tools", "text", "content", "calls"), CALLS)
def test_calls_are_taken_out_of_the_text_around_them(tools: str, text: str, content: str, calls: tuple[ToolCall, ...]) -> None:
    assert read(tools, text) == AssistantMessage(content, tool_calls=calls)


def test_without_a_tool_format_only_a_forced_call_is_read() -> None:
    form = MessageFormat(model(), tools="none")
    assert form.parse(HERMES_OSLO, "x", calls=True) == AssistantMessage(HERMES_OSLO)
    assert form.parse(HERMES_OSLO, "x", calls=True, forced=True) == AssistantMessage("", tool_calls=(OSLO,))
    assert form.parse(HERMES_OSLO, "x", calls=False, forced=True) == AssistantMessage(HERMES_OSLO)


def test_a_model_that_shows_no_tool_format_is_read_in_that_of_hermes() -> None:
    assert MessageFormat(model(), tools="auto").parse(HERMES_OSLO, "x", calls=True) == AssistantMessage("", tool_calls=(OSLO,))


@pytest.mark.parametrize(("tools", "text"), [(tools, text) for tools, text, _, _ in CALLS])
def test_where_no_calls_are_looked_for_all_text_is_content(tools: str, text: str) -> None:
    assert read(tools, text, calls=False) == AssistantMessage(text)


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Os'),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {}}</tool_call'),
        ("hermes", '<tool_call>{"name": "clock", "arguments": []}</tool_call>'),
        ("hermes", '<tool_call>{"name": "clock", "arguments": "[]"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "clock", "arguments": "{\\"a\\": NaN}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "clock"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "clock", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'clock', 'arguments': {}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": 01}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": 1,}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": [}]}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": "line\nbreak"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {}} and more</tool_call>'),
        ("hermes", "</tool_call>"),
        ("llama3", '<|python_tag|>search.call(query="x")'),
        ("llama3", '{"city": "Oslo"}'),
        ("llama3", '{"name": "clock", "parameters": {}} is how it is called'),
        ("llama3", 'Thus: {"name": "clock", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "clock", "arguments": {}}'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]clock[ARGS]"),
        ("mistral", "[TOOL_CALLS]{}"),
        ("mistral", "[TOOL_CALLS]clock[ARG]{}"),
        ("qwen_coder", "<tool_call><function=clock><parameter=a>1</function></tool_call>"),
        ("qwen_coder", "<tool_call><function=></function></tool_call>"),
        ("qwen_coder", "<tool_call><function=clock"),
        ("qwen_coder", HERMES_NOW),
        ("hermes", "  plain \n"),
        ("hermes", ""),
    ],
)
def test_what_is_no_whole_call_is_content_word_for_word(tools: str, text: str) -> None:
    assert read(tools, text) == AssistantMessage(text)


def test_a_call_after_a_broken_one_is_found() -> None:
    broken = '<tool_call>{"name": oops}</tool_call>'
    assert read("hermes", f"{broken}\n{HERMES_NOW}") == AssistantMessage(broken, tool_calls=(NOW,))


@pytest.mark.parametrize(
    ("value", "schema", "written"),
    [
        ("12", None, "12"),
        ("twelve", None, '"twelve"'),
        ('{"a": [1]}', None, '{"a": [1]}'),
        ("12", {"type": "string"}, '"12"'),
        ("12", {"enum": ["12", "13"]}, '"12"'),
        ("12", {"type": "integer"}, "12"),
        ("12", {"type": "number"}, "12"),
        ("twelve", {"type": "integer"}, '"twelve"'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("12", {"type": ["string", "null"]}, '"12"'),
        ("12", {"anyOf": [{"type": "string"}, {"type": "number"}]}, "12"),
        ('"quoted"', {"type": "string"}, '"\\"quoted\\""'),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("\nü\n", {"type": "string"}, '"\\nü\\n"'),
    ],
)
def test_a_value_between_tags_has_the_type_of_the_schema(value: str, schema: dict[str, Json] | None, written: str) -> None:
    tools = [] if schema is None else [Tool("f", "", {"type": "object", "properties": {"a": schema}})]
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    message = MessageFormat(model(), tools="qwen_coder").parse(text, None, calls=True, tools=tools)
    assert message == AssistantMessage("", tool_calls=(ToolCall("f", f'{{"a": {written}}}'),))


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "expected"),
    [
        ("think", "x", "<think>\nOne.\n\nTwo.\n</think>\n\nYes.\n", ("One.\n\nTwo.", "Yes.\n")),
        ("think", "x", "\n<think>a</think>b", ("a", "b")),
        ("think", "x", "<think>\n\n</think>\n\nYes.", ("", "Yes.")),
        ("think", "x", "Yes. <think>a</think>", ("", "Yes. <think>a</think>")),
        ("think", "x", "  <thinking> b", ("", "  <thinking> b")),
        ("think", "x", "<think>a</think", ("a</think", "")),
        ("think", "x", "<think>a ", ("a", "")),
        ("think", "x", "<think>a</think>b</think>", ("a", "b</think>")),
        ("think", None, "<think>a</think>b", ("a", "b")),
        ("think", "x<think>\n", "a\n</think>\n\nb", ("a", "b")),
        ("think", "x<think>", "a, then", ("a, then", "")),
        ("think", "x<think>\n\n</think>\n\n", "a", ("", "a")),
        ("think", "x<think>\n\n</think>\n\n", "<think>a</think>b", ("a", "b")),
        ("mistral", "x", "[THINK]a [1]\n[/THINK]b", ("a [1]", "b")),
        ("mistral", "x", "<think>a</think>b", ("", "<think>a</think>b")),
        ("none", "x<think>\n", "a</think>b", ("", "a</think>b")),
    ],
)
@pytest.mark.parametrize("calls", [True, False])
def test_thinking_comes_first_and_is_no_content(
    reasoning: str, prompt: str | None, text: str, expected: tuple[str, str], calls: bool
) -> None:
    message = read("hermes", text, reasoning=reasoning, prompt=prompt, calls=calls)
    assert (message.reasoning, message.content) == expected
    assert message.tool_calls == ()


def test_a_call_while_thinking_is_thought_and_not_made() -> None:
    text = f"<think>I could write {HERMES_NOW}</think>\n{HERMES_OSLO}"
    assert read("hermes", text, reasoning="think") == AssistantMessage("", f"I could write {HERMES_NOW}", (OSLO,))


def test_a_message_may_be_bare_calls_after_thinking() -> None:
    text = '<think>a</think>\n\n{"name": "clock", "parameters": {}}'
    assert read("llama3", text, reasoning="think") == AssistantMessage("", "a", (NOW,))


def test_text_is_held_back_only_while_it_may_be_a_marker_or_a_call() -> None:
    parser = MessageFormat(model(), tools="hermes", reasoning="think").parser("x", calls=True)
    assert parser.feed("<thi") == ()
    assert parser.feed("nk>a") == (ReasoningPiece("a"),)
    assert parser.feed("b</") == (ReasoningPiece("b"),)
    assert parser.feed("x</think>c <to") == (ReasoningPiece("</x"), ContentPiece("c"))
    assert parser.feed("p <tool_call>") == (ContentPiece(" <top"),)
    assert parser.feed('{"name":"clock","arguments":{}}</tool_call') == ()
    assert parser.feed(">") == (CallPiece(0, NOW),)
    assert parser.feed(HERMES_OSLO + "d") == (CallPiece(1, OSLO), ContentPiece(" d"))
    assert parser.feed('<tool_call>{"') == ()
    assert parser.finish() == (ContentPiece('<tool_call>{"'),)
    assert parser.finish() == ()
