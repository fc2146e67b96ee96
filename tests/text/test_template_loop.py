"""A template that goes on where it left off writes what it writes of the whole conversation, or says that it cannot."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.conversing import WORDED_TEMPLATE
from tests.text.conftest import THINKING_TEMPLATE
from tests.text.templates import CHATML, COUNTING, QWEN, TEMPLATES

from midflight.gateway.sessions.seams import ShownMessages
from midflight.text import ChatTemplate, Message, tokenizer
from midflight.text.byte_tokenizer import CHAT_TEMPLATE
from midflight.text.template_loop import NotResumable

EVERY = {"made": CHAT_TEMPLATE, "worded": WORDED_TEMPLATE, "thinking": THINKING_TEMPLATE, **TEMPLATES}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALLS: Any = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "fox"}'}}]


def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIALS)


def text_of(messages: list[Message], template: ChatTemplate, tools: Any) -> str:
    return template.render(messages, tools=tools, add_generation_prompt=True)


MESSAGES = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, st.sampled_from(["hi", "", "<tool_response>a</tool_response>"])),
    st.builds(lambda text: {"role": "assistant", "content": text}, st.sampled_from(["yo", "<think>\nso\n</think>\n\nwell", " "])),
    st.builds(lambda: {"role": "assistant", "content": "", "tool_calls": CALLS, "reasoning_content": "hm"}),
    st.builds(lambda: {"role": "tool", "tool_call_id": "c", "content": "a fox"}),
    st.builds(lambda: {"role": "system", "content": "rule"}),
)


@settings(max_examples=200)
@given(
    name=st.sampled_from(list(EVERY)),
    parts=st.lists(st.lists(MESSAGES, min_size=1, max_size=4), min_size=2, max_size=6),
    tools=st.sampled_from([None, [TOOL]]),
)
def test_what_is_written_from_a_place_on_is_the_end_of_the_whole(name: str, parts: list[list[Message]], tools: Any) -> None:
    template = compiled(EVERY[name])
    messages: list[Message] = []
    place = None
    for part in parts:
        shown = None
        if place is not None:
            last = max(0, place.item - 2)
            shown = ShownMessages.of(messages, last=last)
            assert shown is not None
            shown = shown.between(last, len(messages)).grown(part)
            assert shown is not None
        messages = [*messages, *part]
        whole = text_of(messages, template, tools)
        found = None
        if place is not None and shown is not None:
            try:
                found = template.write_on(shown, tools=tools, since=place)
            except NotResumable:
                found = None
        if found is not None:
            assert found.start + len(found.text) == len(whole)
            assert whole.endswith(found.text)
        else:
            found = template.write_on(messages, tools=tools)
            assert found.text == whole
        place = found.place


@pytest.mark.parametrize("name", ["made", "worded", "chatml with tools", "llama", "mistral", "prompts at the end"])
def test_a_conversation_that_goes_on_is_written_from_its_last_message_on(name: str) -> None:
    template = compiled(EVERY[name])
    messages: list[Message] = [{"role": "user", "content": "hi"}]
    place = template.write_on(messages).place
    for number in range(5):
        assert place is not None and place.item == len(messages) - 1
        more: list[Message] = [{"role": "assistant", "content": "yo"}, {"role": "user", "content": f"more {number}"}]
        shown = ShownMessages.of(messages, last=max(0, place.item - 2))
        assert shown is not None
        shown = shown.grown(more)
        assert shown is not None
        messages += more
        found = template.write_on(shown, since=place)
        assert found.start == place.num_letters and text_of(messages, template, None).endswith(found.text)
        place = found.place


def test_a_message_that_came_before_is_not_looked_at_again() -> None:
    template = compiled(CHATML)
    messages: list[Message] = [{"role": "user", "content": f"m{k}"} for k in range(6)]
    place = template.write_on(messages).place
    assert place is not None
    shown = ShownMessages.of(messages, last=4)
    assert shown is not None
    with pytest.raises(NotResumable):
        shown[3]["content"]
    assert shown[3]["role"] == "user" and shown[1]["content"] == "m1" and shown[5]["content"] == "m5"


def test_a_text_of_a_later_question_is_not_written_from_the_place_before_it() -> None:
    """The last question is a variable from before the loop, and it has changed."""
    template = compiled(QWEN)
    messages: list[Message] = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "<think>\nso\n</think>\n\na"}]
    place = template.write_on([*messages, {"role": "tool", "content": "r"}]).place
    shown = ShownMessages.of([*messages, {"role": "tool", "content": "r"}, {"role": "user", "content": "two"}], last=0)
    assert place is not None and shown is not None
    with pytest.raises(NotResumable):
        template.write_on(shown, since=place)


def test_a_template_that_counts_goes_on_only_from_before_its_first_count() -> None:
    place = compiled(COUNTING).write_on([{"role": "user", "content": "x"}] * 6).place
    assert place is not None and place.item == 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
        "{% macro all() %}{% for m in messages %}{{ m.content }}{% endfor %}{% endmacro %}{{ all() }}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if loop.changed(m.role) %}{{ m.role }}{% endif %}{% endfor %}",
        "{% set all = messages | list %}{% for m in all %}{{ m.content }}{% endfor %}",
        "{% set sep = joiner(', ') %}{% for m in messages %}{{ sep() }}{{ m.content }}{% endfor %}",
        "{% for m in messages + messages %}{{ m.content }}{% endfor %}",
        "{% filter upper %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfilter %}",
        "{{ messages }}",
    ],
)
def test_a_template_that_is_not_understood_writes_the_whole(source: str) -> None:
    template = compiled(source)
    messages: list[Message] = [{"role": "user", "content": f"m{k}"} for k in range(3)]
    try:
        place = template.write_on(messages).place
    except NotResumable:
        return
    shown = ShownMessages.of([*messages, {"role": "user", "content": "m3"}], last=0)
    assert shown is not None
    if place is not None:
        try:
            found = template.write_on(shown, since=place)
        except NotResumable:
            return
        assert text_of([*messages, {"role": "user", "content": "m3"}], template, None).endswith(found.text)


def test_a_template_that_was_never_understood_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    template = compiled("{% for m in messages + messages %}{{ m.content }}{% endfor %}")
    for _ in range(20):
        with pytest.raises(NotResumable):
            template.write_on([{"role": "user", "content": "x"}])


def test_with_another_inside_of_jinja_a_template_writes_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*_: object) -> None:
        raise AttributeError("'Template' object has no attribute 'root_render_func'")

    monkeypatch.setattr(tokenizer, "LoopTemplate", changed)
    template = compiled(CHATML)
    messages: list[Message] = [{"role": "user", "content": "x"}]
    with pytest.raises(NotResumable):
        template.write_on(messages)
    assert "x" in text_of(messages, template, None)
