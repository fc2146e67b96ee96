"""What becomes of fields that change nothing: passed over, named in the answer's head and counted; or, by a strict gateway, refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.gateway.asked import streamed
from tests.gateway.offered import DEFAULTS, KEY, ScriptedGenerator, offered

from midflight.errors import RequestRejected
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.dialects.chat import ChatExchange
from midflight.gateway.dialects.completions import CompletionExchange
from midflight.gateway.dialects.contents import ContentsExchange
from midflight.gateway.dialects.messages import MessagesExchange
from midflight.gateway.dialects.native import NativeExchange
from midflight.gateway.dialects.responses import ResponsesExchange
from midflight.gateway.dialects.unread_fields import MAX_UNREAD
from midflight.gateway.sessions.request import Messages, ToolChoice
from midflight.observe.prometheus import Metrics
from midflight.testing.virtual_time import run_virtual
from midflight.types import Feature
from midflight.types.facts import FieldsIgnored

HI = [{"role": "user", "content": "hi"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CLIENT = {"name": "f", "input_schema": {"type": "object"}}
GOOD: dict[str, tuple[type, dict[str, Any], str]] = {
    "chat": (ChatExchange, {"model": "policy", "messages": HI}, "/v1/chat/completions"),
    "completions": (CompletionExchange, {"model": "policy", "prompt": "hi"}, "/v1/completions"),
    "responses": (ResponsesExchange, {"model": "policy", "input": "hi"}, "/v1/responses"),
    "messages": (MessagesExchange, {"model": "policy", "messages": HI, "max_tokens": 8}, "/v1/messages"),
    "contents": (ContentsExchange, {"contents": [{"parts": [{"text": "hi"}]}]}, "/v1beta/models/policy:generateContent"),
    "native": (NativeExchange, {"text": "hi"}, "/generate"),
}
PLACES = {"native": "sampling_params", "contents": "generationConfig"}
"""The objects in which bodies have their sampling."""


def exchange(dialect: str, **fields: Any) -> Any:
    kind, good, _ = GOOD[dialect]
    return kind(json.dumps(good | fields).encode())


def with_block(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", **more}]}]}


PASSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat", {"usage": {"include": True}}, "usage", "usage"),
    ("chat", {"provider": {"order": ["x"]}}, "provider", "provider"),
    ("chat", {"request_id": "r"}, "request_id", "request_id"),
    ("chat", {"cache_control": {"type": "ephemeral"}}, "cache_control", "cache_control"),
    ("chat", {"web_search_options": {}}, "web_search_options", "web_search_options"),
    ("chat", {"stream_options": {"usage": True}}, "stream_options.usage", "other"),
    ("chat", {"colour": "red"}, "colour", "other"),
    ("chat", {"reasoning": {"exclude": True}}, "reasoning.exclude", "reasoning.exclude"),
    ("chat", {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens", "thinking.budget_tokens"),
    ("chat", {"tools": [FUNCTION, {"type": "web_search"}]}, "tools.web_search", "tools.web_search"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "f", "schema": {}}}]}, "tools.function.schema", "other"),
    ("completions", {"colour": 1}, "colour", "other"),
    ("responses", {"client_metadata": {"a": "b"}}, "client_metadata", "client_metadata"),
    ("responses", {"context_management": [{"type": "compaction"}]}, "context_management", "context_management"),
    ("responses", {"truncation": "auto"}, "truncation", "truncation"),
    ("responses", {"include": ["web_search_call.results"]}, "include.web_search_call.results", "other"),
    (
        "responses",
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]},
        "tools.tools.web_search",
        "tools.tools.web_search",
    ),
    ("responses", {"tools": [ADD | {"defer_loading": True}]}, "tools.defer_loading", "tools.defer_loading"),
    ("responses", {"tools": [{"type": "new_kind_20300101"}]}, "tools.new_kind", "other"),
    ("responses", {"reasoning": {"budget": 3}}, "reasoning.budget", "other"),
    ("messages", {"context_management": {"edits": []}}, "context_management", "context_management"),
    ("messages", {"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display", "thinking.display"),
    ("messages", {"tools": [CLIENT | {"defer_loading": True}]}, "tools.defer_loading", "tools.defer_loading"),
    ("messages", {"tools": [CLIENT | {"input_examples": [{}]}]}, "tools.input_examples", "tools.input_examples"),
    ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}, "tools.web_search", "tools.web_search"),
    ("messages", {"tools": [CLIENT], "tool_choice": {"type": "auto", "strict": 1}}, "tool_choice.strict", "other"),
    ("messages", with_block(colour="red"), "messages.content.colour", "other"),
    ("messages", {"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages.name", "other"),
    ("native", {"colour": 1}, "colour", "other"),
    ("contents", {"colour": 1}, "colour", "other"),
    ("contents", {"tools": [{"googleSearch": {}}]}, "tools.googleSearch", "tools.googleSearch"),
    ("contents", {"tools": [{"google_search": {}}]}, "tools.google_search", "tools.google_search"),
    ("contents", {"tools": [{"functionDeclarations": [{"name": "f", "behavior": "BLOCKING"}]}]}, "tools.functionDeclarations.behavior", "tools.functionDeclarations.behavior"),
    ("contents", {"toolConfig": {"retrievalConfig": {"languageCode": "en"}}}, "toolConfig.retrievalConfig", "toolConfig.retrievalConfig"),
    ("contents", {"generationConfig": {"mediaResolution": "MEDIA_RESOLUTION_LOW"}}, "generationConfig.mediaResolution", "generationConfig.mediaResolution"),
    ("contents", {"generationConfig": {"colour": 1}}, "generationConfig.colour", "other"),
    ("contents", {"contents": [{"parts": [{"text": "x", "colour": "red"}]}]}, "contents.parts.colour", "other"),
    ("contents", {"contents": [{"name": "me", "parts": [{"text": "x"}]}]}, "contents.name", "other"),
    ("contents", {"tools": [{"functionDeclarations": [{"name": "f"}]}], "toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}}}, "toolConfig.functionCallingConfig.mode", "toolConfig.functionCallingConfig.mode"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "fields", "name", "label"), PASSED)
def test_what_cannot_change_the_text_is_passed_over_and_a_strict_gateway_names_it(
    dialect: str, fields: dict[str, Any], name: str, label: str
) -> None:
    unread = exchange(dialect, **fields).unread
    assert list(unread.fields) == [name] and unread.labels == (label,)
    assert unread.headers() == ((b"x-midflight-ignored", name.encode()),)
    assert isinstance(unread.refusal, RequestRejected) and unread.refusal.param


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_what_is_harmless_is_told_and_refused_by_none(dialect: str) -> None:
    """The responses route gives metadata back, so there it has an effect."""
    unread = exchange(dialect, metadata={"a": "b"}, service_tier="auto").unread
    assert (set(unread.fields) | {"metadata"}, unread.refusal) == ({"metadata", "service_tier"}, None)
    assert exchange(dialect).unread.headers() == ()


@pytest.mark.parametrize("dialect", GOOD)
@pytest.mark.parametrize("name", ["temprature", "top-p", "TopK", "typical_p", "mirostat", "xtc_probability", "no_repeat_ngram_size"])
def test_what_may_mean_a_sampling_parameter_is_refused_by_name(dialect: str, name: str) -> None:
    with pytest.raises(RequestRejected, match=name) as caught:
        exchange(dialect, **({PLACES[dialect]: {name: 0.5}} if dialect in PLACES else {name: 0.5}))
    assert str(caught.value.param).endswith(name)


def test_another_servers_name_for_a_parameter_is_refused_with_ours() -> None:
    for name, remedy in [("max_new_tokens", "`max_tokens`"), ("random_seed", "`seed`"), ("regex", "`guided_regex`")]:
        with pytest.raises(RequestRejected, match=f"{name} is not supported here: send {remedy} instead"):
            exchange("chat", **{name: 5})
    with pytest.raises(RequestRejected, match="send `stop_sequences` instead"):
        exchange("messages", stop=["x"])


def test_whole_numbers_may_be_written_as_floats_and_others_may_not() -> None:
    read = exchange("chat", top_k=20.0, max_tokens=4.0, stop_token_ids=[1.0, 2], top_logprobs=2.0, logprobs=True)
    assert read.call.asked.given == {"top_k": 20, "max_tokens": 4, "stop_token_ids": (1, 2), "top_logprobs": 2}
    assert read.unread.fields == {} and read.unread.refusal.param == "top_k", "a strict gateway wants whole numbers"
    assert exchange("native", sampling_params={"top_k": 20.0}).call.asked.given == {"top_k": 20}
    for value in (20.5, 1e300, -0.5):
        with pytest.raises(RequestRejected, match="top_k"):
            exchange("chat", top_k=value)
    with pytest.raises(RequestRejected, match="temperature is 'hot'"):
        exchange("chat", top_k=20.0, temperature="hot")


def test_too_many_fields_without_a_meaning_are_refused() -> None:
    assert len(exchange("chat", **{f"colour{k}": 1 for k in range(MAX_UNREAD)}).unread.fields) == MAX_UNREAD
    with pytest.raises(RequestRejected, match=str(MAX_UNREAD)):
        exchange("chat", **{f"colour{k}": 1 for k in range(MAX_UNREAD + 1)})


def test_names_in_the_head_are_printable_and_bounded() -> None:
    fields = {"ä\r\nx: y": 1} | {f"{k}-{'x' * 60}": 1 for k in range(100, 150)}
    ((_, value),) = exchange("chat", **fields).unread.headers()
    assert value.startswith(b"???x: y, ") and len(value) == 2048 and value.endswith(b"...")


def test_thinking_and_verbosity_reach_the_template_under_the_names_that_templates_read() -> None:
    def options(dialect: str, **fields: Any) -> object:
        (source,) = exchange(dialect, **fields).call.sources
        assert isinstance(source, Messages)
        return source.options

    assert options("chat", enable_thinking=False) == options("chat", thinking={"type": "disabled"}) == {"enable_thinking": False}
    assert options("chat", thinking=True) == options("chat", reasoning={"enabled": True}) == {"enable_thinking": True}
    assert options("chat", reasoning={"effort": "low"}) == options("chat", reasoning_effort="low") == {"reasoning_effort": "low"}
    assert options("chat", verbosity="low") == options("responses", text={"verbosity": "low"}) == {"verbosity": "low"}
    assert options("chat", enable_thinking=True, chat_template_kwargs={"enable_thinking": False}) == {"enable_thinking": False}


def test_of_the_tools_only_those_allowed_are_in_the_prompt() -> None:
    tools = [FUNCTION, {"type": "function", "function": {"name": "g"}}]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
    call = exchange("chat", tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}).call
    assert ([tool.name for tool in call.sources[0].tools], call.tool_choice, call.forced_tool) == (["g"], ToolChoice.REQUIRED, None)
    flat = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}, {"type": "web_search"}]}
    call = exchange("responses", tools=[ADD, ADD | {"name": "sub"}], tool_choice=flat).call
    assert ([tool.name for tool in call.sources[0].tools], call.tool_choice) == (["add"], ToolChoice.AUTO)
    with pytest.raises(RequestRejected, match="none of the tools"):
        exchange("responses", tools=[ADD], tool_choice=flat | {"tools": [{"type": "function", "name": "mul"}]})


def test_documents_of_text_are_read_as_text_and_others_are_refused() -> None:
    def text(block: dict[str, Any]) -> object:
        (source,) = exchange("messages", messages=[{"role": "user", "content": [block]}]).call.sources
        return source.messages[0]["content"]

    plain = {"type": "text", "media_type": "text/plain", "data": "body"}
    assert text({"type": "document", "source": plain, "title": "T", "context": "C"}) == "T\nC\nbody"
    assert text({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "body"}]}}) == "body"
    assert text({"type": "search_result", "source": "s", "title": "T", "content": [{"type": "text", "text": "x"}]}) == "T\ns\nx"
    with pytest.raises(RequestRejected, match="base64"):
        text({"type": "document", "source": {"type": "base64", "data": "x"}})


def test_heads_and_counts_say_what_had_no_effect_and_what_was_lowered() -> None:
    """A prompt of 18 tokens in a context of 64 leaves room for 46."""

    async def main() -> None:
        async with offered(limits=EngineLimits(max_context=64, vocab_size=262)) as it:
            metrics = Metrics()
            for dialect, (_, good, path) in GOOD.items():
                limit = "max_output_tokens" if dialect == "responses" else "max_tokens"
                limit = {"native": "max_new_tokens", "contents": "maxOutputTokens"}.get(dialect, limit)
                more = {PLACES[dialect]: {limit: 9000}} if dialect in PLACES else {limit: 9000}
                for stream in (False, True):
                    body = {**good, **more, "colour": 1}
                    if dialect == "contents":
                        path = streamed(path) if stream else path
                    else:
                        body["stream"] = stream
                    answer = await it.http.post(path, json=body)
                    assert answer.status_code == 200, answer.text
                    assert answer.headers["x-midflight-ignored"] == "colour"
                    name, _, value = answer.headers["x-midflight-clamped"].partition("=")
                    assert name == (f"{PLACES[dialect]}.{limit}" if dialect in PLACES else limit) and 0 < int(value) < 64
            plain = await it.http.post("/v1/completions", json={"model": "policy", "prompt": "hi", "max_tokens": 2})
            assert not [name for name in plain.headers if name.startswith("x-midflight")]
            counted = await it.http.post("/v1/messages/count_tokens", json={"model": "policy", "messages": HI, "colour": 1})
            assert counted.headers["x-midflight-ignored"] == "colour"
            body = {"contents": [{"parts": [{"text": "hi"}]}], "colour": 1}
            counted = await it.http.post("/v1beta/models/policy:countTokens", json=body)
            assert counted.headers["x-midflight-ignored"] == "colour"
            for fact in it.seen.of(FieldsIgnored):
                metrics.apply(fact)
            text = metrics.text().decode()
            assert 'midflight_ignored_fields_total{field="other",path="/v1/chat/completions"} 2.0' in text
            assert "colour" not in text, "what clients make up is no label"

    run_virtual(main())


def test_a_strict_gateway_refuses_all_of_it_by_name() -> None:
    async def main() -> None:
        async with offered(limits=EngineLimits(max_context=64, vocab_size=262), strict=True) as it:
            for dialect, fields, _, _ in PASSED:
                _, good, path = GOOD[dialect]
                answer = await it.http.post(path, json=good | fields)
                assert answer.status_code == 400 and "gateway.strict" in answer.json()["error"]["message"], (dialect, fields)
            for fields, param in (({"max_tokens": 9000}, "max_tokens"), ({"top_k": 20.0}, "top_k")):
                answer = await it.http.post("/v1/chat/completions", json=GOOD["chat"][1] | fields)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            fine = await it.http.post("/v1/chat/completions", json=GOOD["chat"][1] | {"metadata": {"a": "b"}, "max_tokens": 2})
            assert (fine.status_code, fine.headers["x-midflight-ignored"]) == (200, "metadata")
            assert not it.seen.of(FieldsIgnored)[1:]

    run_virtual(main())


# --- Tools that take a text -------------------------------------------------------------------------------------------

CALLING = '<tool_call>\n{"name": "patch",  "arguments": {"input":"a \\"b\\"\\n"}}\n</tool_call><|end|>'
"""Spaced as no template would write it, so that ids reused are seen to be those of the answer."""
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: A"}


def test_a_custom_tool_is_a_function_of_one_text_whose_grammar_is_told_in_words() -> None:
    flat = {"type": "custom", "name": "patch", "description": "Edits.", "format": LARK}
    nested = {"type": "custom", "custom": {"name": "patch", "description": "Edits.", "format": {"type": "grammar", "grammar": LARK}}}
    (a,), (b,) = (x.call.sources[0].tools for x in (exchange("responses", tools=[flat]), exchange("chat", tools=[nested])))
    assert a == b and a.description == "Edits.\n\nThe input must match this lark grammar:\nstart: A"
    assert a.parameters == {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    forced = exchange("responses", tools=[flat], tool_choice={"type": "custom", "name": "patch"}).call
    assert (forced.tool_choice, forced.forced_tool) == (ToolChoice.REQUIRED, "patch")
    assert exchange("chat", tools=[nested], tool_choice={"type": "custom", "custom": {"name": "patch"}}).call.forced_tool == "patch"


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_call_comes_back_as_one_and_its_tokens_are_found_again(stream: bool) -> None:
    tool = {"type": "custom", "name": "patch"}

    async def main() -> None:
        generator = ScriptedGenerator(texts=[CALLING, "ok<|end|>"])
        async with offered(generator, limits=EngineLimits(2048, 262, features=frozenset(Feature))) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS.changed(max_tokens=200), tracked=True)
            sdk = it.sdk(base_url=handle.base_url)
            asked: dict[str, Any] = {"model": "policy", "tools": [tool], "input": [{"role": "user", "content": "hi"}]}
            if stream:
                events = [event async for event in await sdk.responses.create(**asked, stream=True)]
                kinds = [event.type for event in events]
                assert "response.custom_tool_call_input.delta" in kinds and "response.custom_tool_call_input.done" in kinds
                output = events[-1].response.output
            else:
                output = (await sdk.responses.create(**asked)).output
            call = output[-1]
            assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", 'a "b"\n')
            back = [*asked["input"], *output, {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}]
            assert (await sdk.responses.create(**(asked | {"input": back}))).output_text == "ok"
            record = it.gateway.close(handle.session_id)
            assert (record.num_turns, len(record.rows), record.num_rewritten) == (2, 1, 0)

    run_virtual(main())


AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "For helpers.",
    "tools": [
        {"type": "function", "name": "ask", "description": "Asks one."},
        {"type": "custom", "name": "patch", "description": "Edits."},
    ],
}


def test_functions_of_a_namespace_are_tools_whose_names_begin_with_its_name() -> None:
    read = exchange(
        "responses",
        tools=[ADD, AGENTS, {**AGENTS, "name": "mcp__files__"}],
        tool_choice={"type": "function", "name": "ask", "namespace": "agents"},
    )
    assert read.call.forced_tool == "agents__ask" and not read.unread.fields
    tools = {tool.name: tool.description for tool in read.call.sources[0].tools}
    assert list(tools) == ["add", "agents__ask", "agents__patch", "mcp__files__ask", "mcp__files__patch"]
    assert (tools["agents__ask"], tools["agents__patch"]) == ("For helpers.\n\nAsks one.", "Edits.")
    for wrong, param in (
        ([AGENTS, AGENTS], "tools.1.tools.0.name"),
        ([{"type": "namespace", "name": "a", "tools": [AGENTS]}], "tools.0.tools.0.type"),
        ([{"type": "namespace", "tools": []}], "tools.0.name"),
        ([{"type": "namespace", "name": f"n{k}", "tools": [ADD] * 1024} for k in range(2)], "tools"),
    ):
        with pytest.raises(RequestRejected) as refused:
            exchange("responses", tools=wrong)
        assert refused.value.param == param


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_into_a_namespace_comes_back_apart_from_it_and_its_tokens_are_found_again(stream: bool) -> None:
    text = "".join(f'<tool_call>\n{{"name": "agents__{name}", "arguments": {{"input": "x"}}}}\n</tool_call>' for name in ("ask", "patch"))

    async def main() -> None:
        generator = ScriptedGenerator(texts=[f"{text}<|end|>", "ok<|end|>"])
        async with offered(generator, limits=EngineLimits(2048, 262, features=frozenset(Feature))) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS.changed(max_tokens=200), tracked=True)
            sdk = it.sdk(base_url=handle.base_url)
            asked: dict[str, Any] = {"model": "policy", "tools": [AGENTS], "input": [{"role": "user", "content": "hi"}]}
            if stream:
                events = [event async for event in await sdk.responses.create(**asked, stream=True)]
                answer = events[-1].response
                added = [event.item.namespace for event in events if event.type == "response.output_item.added"]
                assert added == ["agents", "agents"]
            else:
                answer = await sdk.responses.create(**asked)
            assert [(call.type, call.namespace, call.name) for call in answer.output] == [
                ("function_call", "agents", "ask"),
                ("custom_tool_call", "agents", "patch"),
            ]
            assert [tool.name for tool in answer.tools[0].tools] == ["ask", "patch"]
            back = [*asked["input"], *(call.model_dump(exclude_none=True) for call in answer.output)]
            back += [{"type": f"{call.type}_output", "call_id": call.call_id, "output": "done"} for call in answer.output]
            assert (await sdk.responses.create(**(asked | {"input": back}))).output_text == "ok"
            record = it.gateway.close(handle.session_id)
            assert (record.num_turns, len(record.rows), record.num_rewritten) == (2, 1, 0)

    run_virtual(main())


def test_a_chat_tells_custom_calls_as_such_whole_and_streamed() -> None:
    tool = {"type": "custom", "custom": {"name": "patch"}}

    async def main() -> None:
        generator = ScriptedGenerator(texts=[CALLING, CALLING, "ok<|end|>"])
        async with offered(generator, limits=EngineLimits(2048, 262, features=frozenset(Feature))) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS.changed(max_tokens=200), tracked=True)
            sdk = it.sdk(base_url=handle.base_url)
            asked: dict[str, Any] = {"model": "policy", "tools": [tool], "messages": HI}
            message = (await sdk.chat.completions.create(**asked)).choices[0].message
            call = message.tool_calls[0]
            assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", 'a "b"\n')
            told = [d async for d in await sdk.chat.completions.create(**asked, stream=True)]
            parts = [c.model_dump() for d in told for choice in d.choices for c in choice.delta.tool_calls or ()]
            assert parts[0]["type"] == "custom" and "".join(part["custom"]["input"] for part in parts) == 'a "b"\n'
            back = [*HI, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
            answer = await sdk.chat.completions.create(**(asked | {"messages": back}))
            assert answer.choices[0].message.content == "ok"
            record = it.gateway.close(handle.session_id)
            assert (record.num_rewritten, record.num_turns) == (0, 3)

    run_virtual(main())
