"""Replies that come back in another form, and templates that write them otherwise."""

from __future__ import annotations

import json

import pytest
from tests.gateway.conversing import Model, turn, worded
from tests.text.conftest import bpe_folder, bpe_tokenizer  # noqa: F401  (fixtures)

from midflight.gateway.sessions.history import assistant_reply, canonical_arguments, digest, read
from midflight.gateway.sessions.tree import Matcher, TokenTree, harvest
from midflight.testing.script import scripted_tokenizer
from midflight.text import ChatTemplate, Message, Tokenizer
from midflight.text.formats import AssistantMessage, Tool, ToolCall
from midflight.types import Json

USER: Message = {"role": "user", "content": "hi"}
CALLING = 'Wait. <tool_call>\n{"name": "look", "arguments": {"at":"fox",  "n": 2.0}}\n</tool_call><|im_end|>'
TWO_CALLS = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call><|im_end|>'


def call(name: str, arguments: Json, call_id: str = "c1") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


@pytest.fixture
def model(bpe_tokenizer: Tokenizer) -> Model:  # noqa: F811
    return Model(worded(bpe_tokenizer))


@pytest.mark.parametrize(
    "form",
    [
        {"content": "A", "tool_calls": [call("f", '{"x":1,"y":[2.5]}')]},
        {"content": "A", "tool_calls": [call("f", '{ "y": [2.5], "x": 1.0 }', "other")], "refusal": None, "annotations": [], "audio": None},
        {"content": [{"type": "text", "text": "A"}], "tool_calls": [call("f", {"y": [2.5], "x": 1})], "name": None},
        {"content": " A\n", "tool_calls": [call("f", '{"x":1e0,"y":[2.50]}')], "reasoning": "hm", "provider_specific_fields": {"k": 1}},
    ],
)
def test_a_reply_is_the_same_in_whatever_form_a_client_sends_it(form: dict[str, Json]) -> None:
    recorded = assistant_reply(AssistantMessage("A", "a thought", (ToolCall("f", '{"x": 1, "y": [2.5]}'),)))
    assert digest({"role": "assistant", **form}) == digest(recorded)


@pytest.mark.parametrize("empty", [None, "", [], [{"type": "text", "text": ""}]])
def test_a_reply_of_calls_alone_has_no_content_in_any_form(empty: Json) -> None:
    recorded = assistant_reply(AssistantMessage("", "", (ToolCall("f", "{}"),)))
    assert digest({"role": "assistant", "content": empty, "tool_calls": [call("f", "")]}) == digest(recorded)


def test_other_words_calls_or_arguments_are_another_reply() -> None:
    forms = [
        AssistantMessage("A"),
        AssistantMessage("B"),
        AssistantMessage("A", "", (ToolCall("f", "{}"),)),
        AssistantMessage("A", "", (ToolCall("g", "{}"),)),
        AssistantMessage("A", "", (ToolCall("f", '{"x": 1}'),)),
        AssistantMessage("A", "", (ToolCall("f", '{"x": "1"}'),)),
        AssistantMessage("A", "", (ToolCall("f", "{}"), ToolCall("g", "{}"))),
        AssistantMessage("A", "", (ToolCall("g", "{}"), ToolCall("f", "{}"))),
    ]
    assert len({digest(assistant_reply(form)) for form in forms}) == len(forms)


@pytest.mark.parametrize("text", ["not json", "[" * 100_000, "{'x': 1}"])
def test_arguments_that_are_no_json_stay_as_they_are(text: str) -> None:
    assert canonical_arguments(f" {text}") == text


def test_results_of_tools_belong_to_the_position_of_their_call_and_not_to_its_id() -> None:
    def chat(first: str, second: str, *results: Message) -> bytes:
        calls: list[Json] = [call("f", "{}", first), call("f", "{}", second)]
        return read([USER, {"role": "assistant", "tool_calls": calls}, *results]).chain[-1]

    there = chat("p", "q", result("p", "1"), result("q", "2"))
    assert chat("x", "y", result("x", "1"), result("y", "2")) == there
    assert chat("x", "y", result("y", "1"), result("x", "2")) != there


def test_a_call_that_was_serialised_anew_keeps_the_ids_that_were_sampled(model: Model) -> None:
    """I4. The model gave the end of turn; what the template writes after it is context."""
    first = model.tree.plan_chat([USER])
    model.says(first, CALLING)
    sent_back: Message = {"role": "assistant", "content": "Wait.", "tool_calls": [call("look", '{"n":2,"at":"fox"}')]}
    second = model.tree.plan_chat([USER, sent_back, result("c1", "the fox")])
    assert second.parent is model.tree.nodes[0]
    after = "\n<|im_start|>tool\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert second.ids == first.ids + model.tokenizer.encode(CALLING) + model.tokenizer.encode(after)
    assert '"n": 2.0' not in (second.text or ""), "the template wrote it otherwise"
    assert second.respelled and not second.rewritten
    model.says(second, "Found.<|im_end|>")
    (row,) = harvest(model.tree.nodes).rows
    assert model.tokenizer.decode(tuple(row.token_ids[row.loss_mask])) == CALLING + "Found.<|im_end|>"
    assert (model.tree.num_branches, model.tree.num_rewritten, model.tree.num_mismatches) == (0, 0, 1)


def test_blanks_that_the_template_trims_are_no_other_reply(model: Model) -> None:
    model.says(model.tree.plan_chat([USER]), " the fox\n<|im_end|>")
    second = model.tree.plan_chat([USER, {"role": "assistant", "content": "the fox"}, USER])
    assert second.parent is model.tree.nodes[0]
    assert model.tokenizer.decode(second.ids).count("<|im_end|>") == 3


def test_a_thought_is_found_with_its_reply_but_goes_on_only_where_it_is_written(model: Model) -> None:
    """Reasoning counts: without it the model would read another text than it wrote."""
    said = model.says(model.tree.plan_chat([USER]), "<think>\n the dog\n</think>\nthe fox<|im_end|>")
    assert (said.content.strip(), said.reasoning.strip()) == ("the fox", "the dog")
    whole: Message = {"role": "assistant", "content": "the fox", "reasoning_content": "the dog"}
    kept = model.tree.plan_chat([USER, whole, USER])
    assert kept.parent is model.tree.nodes[0] and not kept.rewritten
    for changed in ({"reasoning_content": None}, {"reasoning_content": "the lazy dog"}):
        other = model.tree.plan_chat([USER, {**whole, **changed}, USER])
        assert other.parent is None and other.rewritten
        assert other.ids == model.tokenizer.encode(other.text or "")


def test_choices_that_differ_only_in_their_thoughts_are_told_apart(model: Model) -> None:
    thoughts = [f"<think>\n{thought}\n</think>\nfox<|im_end|>" for thought in ("one", "two", "three")]
    model.says(model.tree.plan_chat([USER]), *thoughts)
    for place, thought in enumerate(("one", "two", "three")):
        sent_back: Message = {"role": "assistant", "content": "fox", "reasoning": thought}
        assert model.tree.plan_chat([USER, sent_back, USER]).parent is model.tree.nodes[place]


@pytest.mark.parametrize("names", [["b", "a"], ["a"], ["a", "b", "a"]])
def test_calls_left_out_added_or_in_another_order_are_a_rewritten_history(model: Model, names: list[str]) -> None:
    model.says(model.tree.plan_chat([USER]), TWO_CALLS)
    calls: list[Json] = [call(name, "{}", name) for name in names]
    second = model.tree.plan_chat([USER, {"role": "assistant", "content": None, "tool_calls": calls}, result("a", "x")])
    assert second.parent is None and second.rewritten


def test_a_call_that_the_agent_was_not_shown_is_not_passed_over(model: Model) -> None:
    """Going on from both would be another text. (An answer of one call ends with it, so no agent is shown less than was said.)"""
    first = model.tree.plan_chat([USER])
    ids = model.tokenizer.encode(TWO_CALLS)
    reply = model.tokenizer.decode(ids, skip_special=True)
    model.tree.record(first, turn(first, ids), reply=reply, request=1, message=AssistantMessage("", "", (ToolCall("a", "{}"),)))
    second = model.tree.plan_chat([USER, {"role": "assistant", "tool_calls": [call("a", "{}")]}, result("c1", "x")])
    assert second.parent is None and second.rewritten


def test_only_a_recorded_reply_can_be_rewritten(model: Model) -> None:
    """A sub-agent, a summary and an example in the prompt start anew; an edited reply and an edited question rewrite."""
    model.says(model.tree.plan_chat([USER]), "the fox<|im_end|>")
    reply: Message = {"role": "assistant", "content": "the fox"}
    example: Message = {"role": "assistant", "content": "the answer"}
    fresh: list[list[Message]] = [
        [{"role": "system", "content": "other"}, USER],
        [{"role": "user", "content": "In short: the fox."}],
        [{"role": "user", "content": "example"}, example, USER],
    ]
    edited: list[list[Message]] = [[USER, example, USER], [{"role": "user", "content": "ho"}, reply, USER]]
    for messages, expected in [*((m, False) for m in fresh), *((m, True) for m in edited)]:
        prompt = model.tree.plan_chat(messages)
        assert (prompt.parent, prompt.rewritten) == (None, expected)
    assert not model.tree.plan_chat([USER, reply, USER]).rewritten


def test_an_edit_in_the_middle_goes_on_from_the_turn_before_it(model: Model) -> None:
    first: Message = {"role": "assistant", "content": "the fox"}
    second: Message = {"role": "assistant", "content": "the dog"}
    model.says(model.tree.plan_chat([USER]), "the fox<|im_end|>")
    model.says(model.tree.plan_chat([USER, first, result("c", "long")]), "the dog<|im_end|>")
    third = model.tree.plan_chat([USER, first, result("c", "..."), second, USER])
    assert third.parent is model.tree.nodes[0] and third.rewritten
    model.says(third, "over<|im_end|>")
    assert (model.tree.num_branches, model.tree.num_rewritten) == (1, 1)
    assert [model.tokenizer.decode(tuple(r.token_ids[r.loss_mask])) for r in harvest(model.tree.nodes).rows] == [
        "the fox<|im_end|>the dog<|im_end|>",
        "over<|im_end|>",
    ]


def test_a_template_without_an_end_of_turn_is_read_up_to_the_message() -> None:
    """Where nothing marks the end of a message, the template is asked to write the conversation up to it."""
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = Tokenizer(scripted_tokenizer().backend, template=ChatTemplate(plain, {}), eos_token_ids=frozenset({256}))
    assert Matcher(tokenizer).end_of_turn == ""
    model = Model(tokenizer)
    model.says(model.tree.plan_chat([USER]), "  fox<|end|>")
    second = model.tree.plan_chat([USER, {"role": "assistant", "content": "fox"}, USER])
    assert second.parent is model.tree.nodes[0]
    assert tokenizer.decode(second.ids).startswith("user: hi\nassistant:   fox<|end|>")


def test_a_template_that_refuses_the_probe_still_continues_what_it_writes_verbatim() -> None:
    source = "{{ raise_exception('system first') if messages[0].role != 'system' }}" + scripted_tokenizer().template.source  # type: ignore[union-attr]
    tokenizer = Tokenizer(scripted_tokenizer().backend, template=ChatTemplate(source, {}), eos_token_ids=frozenset({256}))
    model = Model(tokenizer)
    start: list[Message] = [{"role": "system", "content": "s"}, USER]
    model.says(model.tree.plan_chat(start), "fox<|end|>")
    assert model.tree.plan_chat([*start, {"role": "assistant", "content": "fox"}, USER]).parent is model.tree.nodes[0]


def test_a_conversation_of_many_turns_reads_few_of_them_back(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that drops every thought makes every reply differ; planning stays linear in the turns."""
    messages: list[Message] = [USER]
    for k in range(20):
        model.says(model.tree.plan_chat(messages), f"<think>\n{k}\n</think>\nfox {k}<|im_end|>")
        messages += [{"role": "assistant", "content": f"fox {k}"}, USER]
    read_back: list[str] = []
    parse = model.format.parse
    monkeypatch.setattr(model.format, "parse", lambda text, *a, **kw: read_back.append(text) or parse(text, *a, **kw))
    assert model.tree.plan_chat(messages).rewritten
    assert 0 < len(read_back) <= 2 * 8


def test_half_a_surrogate_pair_is_a_conversation_like_any_other() -> None:
    tree = TokenTree(scripted_tokenizer())
    lone = json.loads('"\\ud83d"')
    assert read([{"role": "user", "content": lone}, {"role": "assistant", "content": lone}]).chain
    assert tree.plan_ids((1, 2)).parent is None


def test_a_template_that_refuses_to_be_asked_again_costs_the_request_nothing() -> None:
    """A conversation that ends with a reply may be refused, while the request itself is not."""
    source = (
        "{{ raise_exception('ask something') if messages[-1].role == 'assistant' }}"
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}assistant: "
    )
    tokenizer = Tokenizer(scripted_tokenizer().backend, template=ChatTemplate(source, {}), eos_token_ids=frozenset({256}))
    model = Model(tokenizer)
    model.says(model.tree.plan_chat([USER]), "  fox<|end|>")
    second = model.tree.plan_chat([USER, {"role": "assistant", "content": "fox"}, USER])
    assert second.parent is None and second.rewritten


def test_other_tools_in_the_prompt_start_a_branch() -> None:
    source = "{{ tools | tojson if tools else '' }}" + scripted_tokenizer().template.source  # type: ignore[union-attr]
    tokenizer = Tokenizer(scripted_tokenizer().backend, template=ChatTemplate(source, {}), eos_token_ids=frozenset({256}))
    model = Model(tokenizer)
    model.says(model.tree.plan_chat([USER], tools=[Tool("f")]), "fox<|end|>")
    chat: list[Message] = [USER, {"role": "assistant", "content": "fox"}, USER]
    assert model.tree.plan_chat(chat, tools=[Tool("f")]).parent is model.tree.nodes[0]
    other = model.tree.plan_chat(chat, tools=[Tool("g")])
    assert other.parent is None and other.rewritten


def test_a_turn_that_called_is_gone_on_from_where_the_template_leaves_calls_out() -> None:
    """As SmolLM2's does. The call and what came of it are one row."""
    plain = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content ~ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    model = Model(Tokenizer(scripted_tokenizer().backend, template=ChatTemplate(plain, {}), eos_token_ids=frozenset({256})))
    first = model.tree.plan_chat([USER])
    said = '<tool_call>\n{"name": "look", "arguments": {"at":"fox"}}\n</tool_call><|end|>'
    model.says(first, said)
    sent_back: Message = {"role": "assistant", "content": None, "tool_calls": [call("look", '{"at": "fox"}')]}
    second = model.tree.plan_chat([USER, sent_back, result("c1", "the fox")])
    assert second.parent is model.tree.nodes[0] and not second.rewritten
    assert second.ids == first.ids + model.tokenizer.encode(f"{said}<|tool|>the fox<|end|><|assistant|>")
    model.says(second, "Found.<|end|>")
    assert len(harvest(model.tree.nodes).rows) == 1
