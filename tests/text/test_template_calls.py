"""Conversations with tool calls, as templates read and write them."""

from __future__ import annotations

import json

import pytest
from tests.text.written import CLOCK, CODER, LLAMA, MISTRAL, QWEN, WEATHER, model

from midflight.errors import RequestRejected
from midflight.testing.script import scripted_tokenizer
from midflight.text import Message
from midflight.text.formats import MessageFormat, ToolCall
from midflight.text.tokenizer import as_templates_read


def call(name: str, arguments: str) -> dict[str, object]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def asked(*calls: dict[str, object], content: str | None = None) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}  # pyright: ignore[reportReturnType]


OSLO = call("weather", '{"city":"Osl\\u00f6","days":2}')
ANSWER: Message = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "rain"}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            QWEN,
            '<|assistant|>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslö", "days": 2}}\n</tool_call><|end|>\n<|tool|>rain<|end|>\n',
        ),
        (LLAMA, '<|assistant|>{"name": "weather", "parameters": {"city": "Oslö", "days": 2}}<|end|><|tool|>rain<|end|>'),
        (MISTRAL, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslö", "days": 2}, "id": "c1"}]weather c1: rain'),
        (
            CODER,
            "<tool_call>\n<function=weather>\n<parameter=city>\nOslö\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>rain",
        ),
    ],
)
def test_templates_write_arguments_as_objects_though_clients_send_text(template: str, expected: str) -> None:
    assert model(template).render([asked(OSLO), ANSWER]) == expected


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL, CODER])
def test_a_call_in_the_history_is_read_back_as_that_call(template: str) -> None:
    tokenizer = model(template)
    message = MessageFormat(tokenizer, reasoning="none").parse(
        tokenizer.render([asked(OSLO)]).replace("<|assistant|>", "").replace("<|end|>", ""), None, calls=True
    )
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [("weather", {"city": "Oslö", "days": 2})]
    assert message.content == ""


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", '"text"', "", "[" * 100_000])
def test_arguments_that_are_no_object_stay_as_sent(arguments: str) -> None:
    assert as_templates_read(asked(call("f", arguments)))["tool_calls"] == [call("f", arguments)]


def test_what_is_no_tool_call_at_all_stays_as_sent() -> None:
    message: Message = {"role": "assistant", "content": "x", "tool_calls": [7, {"function": "f"}, {"id": "1"}]}
    assert as_templates_read(message) == message


def test_only_an_assistant_without_content_gets_an_empty_one() -> None:
    assert as_templates_read({"role": "assistant"}) == {"role": "assistant", "content": ""}
    assert as_templates_read({"role": "user", "content": None}) == {"role": "user", "content": None}
    assert as_templates_read(ANSWER) == ANSWER


def test_the_messages_given_are_not_changed() -> None:
    message = asked(OSLO)
    before = json.dumps(message)
    as_templates_read(message)
    assert json.dumps(message) == before


def test_half_a_surrogate_pair_in_arguments_is_refused() -> None:
    with pytest.raises(RequestRejected) as caught:
        model(QWEN).render([asked(call("f", '{"a": "\\ud800"}'))])
    assert caught.value.param == "messages"


def test_made_models_write_tools_and_calls_as_hermes_does() -> None:
    tokenizer = scripted_tokenizer()
    chat: list[Message] = [{"role": "user", "content": "hi"}, asked(OSLO, call("clock", "{}"), content="I see."), ANSWER]
    assert tokenizer.render(chat, tools=[CLOCK.as_json()], add_generation_prompt=True) == (
        "<|system|>Tools, one JSON object a line:\n<tools>\n"
        '{"type": "function", "function": {"name": "clock", "description": "", "parameters": {}}}\n'
        "</tools>\nTo call one, write:\n<tool_call>\n"
        '{"name": its name, "arguments": an object}\n</tool_call><|end|>'
        "<|user|>hi<|end|><|assistant|>I see.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslö", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|end|>'
        "<|tool|>rain<|end|><|assistant|>"
    )


def test_a_history_of_a_made_model_is_what_it_was_made_to_write() -> None:
    """So the ids of a turn with calls are found again in the next prompt."""
    tokenizer = scripted_tokenizer()
    said = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    message = MessageFormat(tokenizer).parse(said, None, calls=True, tools=[WEATHER, CLOCK])
    assert message.tool_calls == (ToolCall("weather", '{"city": "Oslo"}'), ToolCall("clock", "{}"))
    history = asked(*(call(c.name, c.arguments) for c in message.tool_calls))
    assert tokenizer.render([history]) == f"<|assistant|>{said}<|end|>"


def test_conversations_without_tools_are_written_as_plain_turns() -> None:
    chat: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    expected = "<|system|>s<|end|><|user|>u<|end|><|assistant|>a<|end|><|assistant|>"
    for tools in (None, []):
        assert scripted_tokenizer().render(chat, tools=tools, add_generation_prompt=True) == expected


# --- Templates that leave tools and calls out -------------------------------------------------------------------------

CHATML = "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content ~ '</>' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
LISTED = (
    'Tools, one JSON object a line:\n<tools>\n{"type": "function", "function": {"name": "clock", "description": "", "parameters": {}}}\n</tools>\n'
    'To call one, write:\n<tool_call>\n{"name": its name, "arguments": an object}\n</tool_call>'
)
USER: Message = {"role": "user", "content": "u"}


def test_calls_that_a_template_would_leave_out_stand_in_the_content_as_they_are_read() -> None:
    tokenizer = model(CHATML)
    said = 'I see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslö", "days": 2}}\n</tool_call>\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    chat: list[Message] = [USER, asked(OSLO, call("clock", "{}"), content="I see."), ANSWER]
    assert tokenizer.render(chat, add_generation_prompt=True) == f"<user>u</><assistant>{said}</><tool>rain</><assistant>"
    read = MessageFormat(tokenizer).parse(said, None, calls=True)
    assert [(c.name, json.loads(c.arguments)) for c in read.tool_calls] == [("weather", {"city": "Oslö", "days": 2}), ("clock", {})]


def test_tools_that_a_template_would_leave_out_are_listed_in_the_system_message() -> None:
    tokenizer, tools = model(CHATML), [CLOCK.as_json()]
    assert tokenizer.render([USER], tools=tools) == f"<system>{LISTED}</><user>u</>"
    assert tokenizer.render([{"role": "system", "content": "s"}, USER], tools=tools) == f"<system>s\n\n{LISTED}</><user>u</>"
    assert tokenizer.render([USER], tools=tools, options={"list_tools": False}) == "<user>u</>"
    assert tokenizer.render([USER]) == tokenizer.render([USER], tools=[]) == "<user>u</>"


@pytest.mark.parametrize("template", [LLAMA, MISTRAL, CODER, QWEN])
def test_a_template_that_writes_calls_itself_is_left_alone(template: str) -> None:
    assert "Tools, one JSON object a line" not in model(template).render([USER], tools=[CLOCK.as_json()])
    assert model(template).render([asked(OSLO)]).count("weather") == 1


@pytest.mark.parametrize("sent", [[7], [{"function": "f"}], [{"function": {"name": "f", "arguments": "no JSON"}}], "f", None])
def test_calls_of_any_shape_can_be_written(sent: object) -> None:
    message: Message = {"role": "assistant", "content": None, "tool_calls": sent}  # pyright: ignore[reportAssignmentType]
    assert model(CHATML).render([message]).startswith("<assistant>")
