"""Anthropic's Messages API, in raw JSON. `tests/clients/test_anthropic.py` drives it with the SDK."""

from __future__ import annotations

import asyncio
import json
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.generating import closed
from tests.gateway.offered import DEFAULTS, KEY, Offered, ScriptedGenerator, make_gateway, offered

from midflight.errors import EngineUnavailable, NoEngine, RequestRejected
from midflight.gateway.answers.answer import Answer, News
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.dialects.exchange import Reply
from midflight.gateway.dialects.messages import MessagesExchange, messages_fault
from midflight.gateway.sessions.request import Asked, Messages, ToolChoice
from midflight.testing.script import scripted_tokenizer
from midflight.testing.virtual_time import run_virtual
from midflight.text import Tokenizer
from midflight.text.formats import CallPiece, ContentPiece, Piece, ReasoningPiece, Tool, ToolCall
from midflight.text.formats.assistant import joined
from midflight.text.tokenizer import ChatTemplate
from midflight.types import Finish, FinishReason, Grammar, GrammarKind, Segment, Turn

HI = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "policy", "max_tokens": 8, "messages": HI}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "In a city.", "input_schema": SCHEMA}
TOLD = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def messages(**fields: Any) -> MessagesExchange:
    return MessagesExchange(json.dumps(BODY | fields).encode())


def said(*conversation: dict[str, Any], **fields: Any) -> tuple[Any, ...]:
    """The chat that a conversation becomes."""
    (source,) = messages(messages=list(conversation), **fields).call.sources
    assert isinstance(source, Messages)
    return source.messages


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds from a stream; refuses an order that no client understands."""
    assert events[0]["type"] == "message_start" and [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    message, inputs = json.loads(json.dumps(events[0]["message"])), ""
    assert message["content"] == [] and message["stop_reason"] is None
    open_index = None
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert open_index is None and event["index"] == len(message["content"])
            open_index, inputs = event["index"], ""
            message["content"].append(dict(event["content_block"]))
            continue
        assert event["index"] == open_index
        block = message["content"][open_index]
        if event["type"] == "content_block_stop":
            open_index = None
            if block["type"] == "tool_use":
                block["input"] = json.loads(inputs)
            continue
        assert event["type"] == "content_block_delta"
        match event["delta"]:
            case {"type": "text_delta", "text": text}:
                block["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                block["thinking"] += text
            case {"type": "signature_delta", "signature": text}:
                block["signature"] = text
            case {"type": "input_json_delta", "partial_json": text}:
                inputs += text
            case other:
                raise AssertionError(other)
    assert open_index is None
    last = events[-2]
    return message | last["delta"] | {k: v for k, v in last.items() if k not in ("type", "delta")}


def answered(pieces: list[Piece], finish: Finish, tail: list[Piece]) -> tuple[Reply, Answer]:
    """A finished answer of three tokens that says `pieces`, of which `tail` has not been streamed."""
    generator = ScriptedGenerator()
    gateway = make_gateway(generator)
    job = gateway.prepare(gateway.session_for(path_token=None, api_key=None), messages().call)
    prompt = job.answers[0].prompt
    turn = Turn(prompt.ids, (1, 2, 3), (-1.0,) * 3, (Segment(0, 0, 0, 3),), finish)
    answer = closed(job.answers[0], turn, message=joined(tuple(pieces)), tail_pieces=tail)
    return Reply(job, "policy", 7, generator.tokenizer), answer


def with_tail(answer: Answer, tail: list[Piece]) -> Answer:
    """The same answer, of which these pieces have not been streamed."""
    other = copy(answer)
    other.tail_pieces = tuple(tail)
    return other


def whole(pieces: list[Piece], finish: Finish = Finish(FinishReason.STOP, 256)) -> dict[str, Any]:
    reply, answer = answered(pieces, finish, pieces)
    return messages().whole(reply, [answer])


STOPPED = Finish(FinishReason.STOP, 256)
CALL = CallPiece(0, ToolCall("weather", '{"city": "Rome"}'))


def test_every_sampling_field_reaches_the_call() -> None:
    exchange = messages(
        temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["x", "y"], stream=True, min_p=0.1, min_tokens=1, seed=3,
        metadata={"user_id": "me"}, service_tier="auto", cache_control={"type": "ephemeral"}, return_token_ids=True,
    )  # fmt: skip
    assert exchange.call.asked == Asked(max_tokens=8, min_tokens=1, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, stop=("x", "y"), seed=3)
    assert (exchange.call.stream, exchange.call.model, exchange.call.n) == (True, "policy", 1)
    assert messages().call.asked == Asked(max_tokens=8)


def test_the_system_text_comes_first_and_text_blocks_are_joined_as_they_are() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}, "citations": None}]
    expected = ({"role": "system", "content": "ab"}, {"role": "user", "content": "ab"})
    assert said({"role": "user", "content": blocks}, system=blocks) == expected
    assert said({"role": "user", "content": "ab"}, system="ab") == expected
    assert said({"role": "user", "content": "ab"}, system=[]) == expected[1:]
    assert said({"role": "user", "content": "x"}, {"role": "system", "content": "y"})[1] == {"role": "system", "content": "y"}


def test_a_turn_sent_back_is_one_assistant_message_and_results_come_before_what_the_user_says() -> None:
    turn = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Let me "},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}, "caller": None},
        {"type": "text", "text": "see."},
        {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {}},
    ]
    results = [
        {"type": "text", "text": "And "},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}], "is_error": False},
        {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
        {"type": "text", "text": "now?"},
    ]
    chat = said(*HI, {"role": "assistant", "content": turn}, {"role": "user", "content": results})
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    other = {"id": "toolu_2", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert chat[1] == {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": [call, other]}
    assert chat[2:] == (
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": ""},
        {"role": "user", "content": "And now?"},
    )
    only = said(*HI, {"role": "assistant", "content": turn}, {"role": "user", "content": results[1:3]})
    assert [m["role"] for m in only] == ["user", "assistant", "tool", "tool"]


def test_tools_and_the_choice_between_them_reach_the_call() -> None:
    def choice(**tool_choice: Any) -> tuple[ToolChoice, str | None, bool]:
        call = messages(tools=[WEATHER], tool_choice=tool_choice).call
        return call.tool_choice, call.forced_tool, call.parallel_tool_calls

    (source,) = messages(tools=[WEATHER | {"type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}]).call.sources
    assert isinstance(source, Messages) and source.tools == (Tool("weather", "In a city.", SCHEMA, strict=True),)
    assert messages(tools=[WEATHER]).call.tool_choice is ToolChoice.AUTO
    assert messages(tools=[]).call.tool_choice is messages(tool_choice={"type": "auto"}).call.tool_choice is ToolChoice.NONE
    assert choice(type="auto", disable_parallel_tool_use=True) == (ToolChoice.AUTO, None, False)
    assert choice(type="any") == (ToolChoice.REQUIRED, None, True)
    assert choice(type="tool", name="weather") == (ToolChoice.REQUIRED, "weather", True)
    assert choice(type="none") == (ToolChoice.NONE, None, True)


def test_thinking_and_effort_are_options_of_the_template_and_a_schema_is_a_grammar() -> None:
    def options(**fields: Any) -> object:
        (source,) = messages(**fields).call.sources
        assert isinstance(source, Messages)
        return source.options

    assert options(thinking={"type": "enabled", "budget_tokens": 1024}) == {"enable_thinking": True}
    assert options(thinking={"type": "disabled"}, output_config={"effort": "low"}) == {"enable_thinking": False, "reasoning_effort": "low"}
    assert options(thinking={"type": "adaptive"}) == options() == {}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert messages(output_config={"format": form}).call.asked.grammar == grammar
    assert messages(output_format=form).call.asked.grammar == grammar


def with_block(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}, *HI]}


FORM = {"type": "json_schema", "schema": {"type": "object"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "None"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"temperature": 1000.5}, "temperature", "1000.5"),
    ({"temperature": 0.00001}, "temperature", "send 0 for the likeliest"),
    ({"top_k": 2**31}, "top_k", "2147483648"),
    ({"stop_sequences": [""]}, "stop_sequences.0", "''"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences", "16"),
    ({"n": 2}, "n", "several requests"),
    ({"max_token": 2}, "max_token", "Did you mean 'max_tokens'"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "not supported"),
    ({"thread": {"type": "create"}}, "thread", "whole conversation"),
    ({"messages": []}, "messages", "[]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "tool"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "None"),
    (
        {"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
        "messages.1",
        "send its result",
    ),
    (with_block({"type": "image", "source": {}}), "messages.0.content.0", "image"),
    (with_block({"type": "document", "source": {"type": "base64"}}), "messages.0.content.0.source", "base64"),
    (with_block({"type": "tool_use", "id": "a", "name": "f", "input": {}}), "messages.0.content.0", "tool_use"),
    (with_block({"type": "text"}), "messages.0.content.0.text", "None"),
    (with_block({"type": "tool_result", "content": "x"}), "messages.0.content.0.tool_use_id", "None"),
    (
        with_block({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
        "messages.0.content.0.content.0",
        "image",
    ),
    (with_block({"type": "tool_use", "id": "a", "name": "f", "input": "{}"}, "assistant"), "messages.0.content.0.input", "'{}'"),
    ({"system": [{"type": "image"}]}, "system.0", "image"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema", "missing"),
    ({"tools": [WEATHER, WEATHER]}, "tools.1.name", "weather"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "without tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name", "missing"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name", "weather"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format.schema.type", "5"),
    ({"output_format": {"type": "json_schema", "schema": {"title": "x" * 2**16}}}, "output_format.schema", "65536 at most"),
    ({"output_format": FORM, "output_config": {"format": FORM}}, "output_format", "send one of them"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_a_fault_names_the_field_and_the_value(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        messages(**fields)
    assert caught.value.param == param
    assert words in str(caught.value)


WORDS = st.sampled_from(["user", "assistant", "text", "tool_use", "tool_result", "thinking", "a", ""])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "text", "id", "name", "input", "tool_use_id", "input_schema"]), inner)
    ),
    max_leaves=12,
)


@given(st.sampled_from(["messages", "system", "tools", "tool_choice", "thinking", "output_config"]), JSON | st.lists(JSON, max_size=2))
@settings(deadline=None)
def test_whatever_is_sent_is_read_or_refused(field: str, value: object) -> None:
    try:
        messages(**{field: value})
    except RequestRejected as refused:
        assert refused.param is not None and refused.param.startswith(field)


def test_a_whole_message_holds_its_blocks_in_the_order_they_were_said() -> None:
    message = whole([ReasoningPiece("h"), ReasoningPiece("m"), ContentPiece("Wait"), ContentPiece("."), CALL])
    call = message["content"].pop()
    assert message.pop("id").startswith("msg_") and call.pop("id").startswith("toolu_")
    assert call == {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}}
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Wait."}],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        # <|user|> h i <|end|> <|assistant|>
        "usage": {"input_tokens": 5, "output_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
    }


def test_the_stop_reason_says_what_ended_the_message() -> None:
    def ending(pieces: list[Piece], finish: Finish) -> tuple[object, object]:
        message = whole(pieces, finish)
        return message["stop_reason"], message["stop_sequence"]

    text: list[Piece] = [ContentPiece("a")]
    assert ending(text, STOPPED) == ("end_turn", None)
    assert ending(text, Finish(FinishReason.STOP, "END")) == ("stop_sequence", "END")
    assert ending(text, Finish(FinishReason.LENGTH)) == ending([CALL], Finish(FinishReason.LENGTH)) == ("max_tokens", None)
    assert ending([CALL], STOPPED) == ("tool_use", None)


def test_a_message_without_a_word_has_one_empty_text() -> None:
    assert whole([])["content"] == [{"type": "text", "text": ""}]


TEXTS = st.text("ab<", max_size=3)
PIECES = st.lists(TEXTS.map(ContentPiece) | TEXTS.map(ReasoningPiece) | st.none(), max_size=8)


@given(PIECES, st.integers(0, 8), st.sampled_from([STOPPED, Finish(FinishReason.LENGTH), Finish(FinishReason.STOP, "END")]))
@settings(deadline=None)
def test_a_streamed_message_accumulates_to_the_whole_one(drawn: list[Piece | None], told: int, finish: Finish) -> None:
    calls = iter(range(len(drawn)))
    pieces: list[Piece] = [replace(CALL, index=next(calls)) if piece is None else piece for piece in drawn]
    reply, answer = answered(pieces, finish, pieces[told:])
    exchange = messages(stream=True)
    events = list(exchange.opening(reply))
    for piece in pieces[:told]:
        events += exchange.frames(reply, News(0, "", (), (), (piece,)))
    events += [*exchange.frames(reply, answer), *exchange.closing(reply, [answer])]
    assert accumulated(events) == messages().whole(reply, [with_tail(answer, pieces)])


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (410, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_an_error_has_anthropics_shape_and_the_type_of_its_status(status: int, kind: str) -> None:
    class Failure(NoEngine):
        pass

    Failure.status = status
    fault = messages_fault(Failure("no engine"))
    body: Any = fault.body
    assert fault.status == status
    assert body["error"] == {"type": kind, "message": "no engine", "details": {"error_code": "no_engine"}}
    assert dict(fault.headers) == {b"request-id": body["request_id"].encode(), b"retry-after": b"1"}
    assert body["type"] == "error"


def test_what_is_not_ours_says_nothing_of_its_inside() -> None:
    fault = messages_fault(ValueError("secret"))
    assert fault.status == 500 and "secret" not in str(fault.body)
    assert [name for name, _ in fault.headers] == [b"request-id"]


async def post(it: Offered, base: str, *, count: bool = False, **fields: Any) -> Any:
    """An answer of `/v1/messages`: the message, or the list of events."""
    path = "/messages/count_tokens" if count else "/messages"
    body = ({k: v for k, v in BODY.items() if k != "max_tokens"} if count else BODY) | fields
    response = await it.http.post(base + path, json=body, headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x"})
    if response.status_code != 200 or not fields.get("stream"):
        return response.json()
    named = [block.split("\n", 1) for block in response.text.split("\n\n") if block]
    events = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name for name, _ in named] == [f"event: {event['type']}" for event in events]
    return events


def back(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": message["content"]}


def test_an_answer_sent_back_goes_on_from_its_tokens_and_counting_leaves_no_trace() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["yo<|end|>", "bye<|end|>", "so<|end|>"])) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            first = await post(it, handle.base_url)
            again = [*HI, back(first), {"role": "user", "content": [{"type": "text", "text": "so?"}]}]
            tree = it.gateway.registry.get(handle.session_id).tree
            before = (len(tree.nodes), tree.num_branches, tree.num_rewritten, tree.num_mismatches)
            assert await post(it, handle.base_url, count=True, messages=again) == {"input_tokens": 14}
            other = [*HI, {"role": "assistant", "content": "never said"}, {"role": "user", "content": "so?"}]
            assert (await post(it, handle.base_url, count=True, messages=other))["input_tokens"] == 22
            assert (len(tree.nodes), tree.num_branches, tree.num_rewritten, tree.num_mismatches) == before
            second = accumulated(await post(it, handle.base_url, messages=again, stream=True))
            assert (second["content"], second["usage"]["input_tokens"]) == ([{"type": "text", "text": "bye"}], 14)
            third = await post(it, handle.base_url, messages=[*again, back(second), *HI])
            assert third["content"][0]["text"] == "so"
            record = it.gateway.close(handle.session_id)
            assert (record.num_turns, record.num_branches, len(record.rows), record.failed_requests) == (3, 0, 1, 0)

    run_virtual(main())


def test_a_tool_is_called_and_its_result_continues_the_recorded_turn() -> None:
    async def main() -> None:
        texts = [TOLD + "<|end|>", "Sunny.<|end|>"]
        async with offered(ScriptedGenerator(texts=texts), limits=EngineLimits(max_context=2000, vocab_size=262)) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            first = await post(it, handle.base_url, tools=[WEATHER], max_tokens=200)
            [call] = first["content"]
            assert (call["name"], call["input"], first["stop_reason"]) == ("weather", {"city": "Rome"}, "tool_use")
            result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}]}
            ask = {"tools": [WEATHER], "messages": [*HI, back(first), result]}
            counted = await post(it, handle.base_url, count=True, **ask)
            second = accumulated(await post(it, handle.base_url, max_tokens=200, stream=True, **ask))
            assert second["content"] == [{"type": "text", "text": "Sunny."}]
            assert counted["input_tokens"] == second["usage"]["input_tokens"] == len(it.generator.requests[1].input_ids)
            record = it.gateway.close(handle.session_id)
            assert (record.num_turns, len(record.rows)) == (2, 1)

    run_virtual(main())


def thinking_tokenizer() -> Tokenizer:
    """Of a model whose template writes thinking, and ends it at once where it is told not to think."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}<|assistant|>{% if enable_thinking is false %}<think></think>{% endif %}"
    )
    plain = scripted_tokenizer()
    return Tokenizer(plain.backend, template=ChatTemplate(template, {}), eos_token_ids=plain.eos_token_ids)


def test_thinking_is_told_apart_and_its_tokens_are_found_again_when_it_is_sent_back() -> None:
    async def main() -> None:
        tokenizer = thinking_tokenizer()
        async with offered(ScriptedGenerator(tokenizer, ["<think>hm</think>yo<|end|>", "so<|end|>"])) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            first = accumulated(await post(it, handle.base_url, max_tokens=50, stream=True))
            assert first["content"] == [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "yo"}]
            again = [*HI, back(first), {"role": "user", "content": "so?"}]
            await post(it, handle.base_url, max_tokens=50, messages=again, thinking={"type": "disabled"})
            assert tokenizer.decode(it.generator.requests[1].input_ids) == (
                "<|user|>hi<|end|><|assistant|><think>hm</think>yo<|end|><|user|>so?<|end|><|assistant|><think></think>"
            )
            record = it.gateway.close(handle.session_id)
            assert (record.num_turns, len(record.rows)) == (2, 1)

    run_virtual(main())


@pytest.mark.parametrize("text", ["plain<|end|>", f"Wait.{TOLD}{TOLD}<|end|>", "<tool_call>\n{broken<|end|>", "<|end|>", "東<|end|>"])
def test_streamed_and_whole_are_the_same_message(text: str) -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=[text] * 2), limits=EngineLimits(max_context=2000, vocab_size=262)) as it:
            ask = {"tools": [WEATHER], "max_tokens": 300, "return_token_ids": True}
            streamed = accumulated(await post(it, "/v1", stream=True, **ask))
            once = await post(it, "/v1", **ask)
            assert once["token_ids"] == list(it.gateway.tokenizer.encode(text))
            for message in (streamed, once):
                del message["id"]
                for block in message["content"]:
                    block.pop("id", None)
            assert streamed == once

    run_virtual(main())


def test_errors_before_and_in_the_middle_of_a_stream_are_anthropics() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(error=EngineUnavailable("the engine died"))) as it:
            early = await it.http.post("/v1/messages", json=BODY | {"stream": True})
            assert (early.status_code, early.headers["retry-after"]) == (503, "1")
            assert early.json()["error"]["type"] == "overloaded_error"
            assert early.headers["request-id"] == early.json()["request_id"]
            it.generator.error_after = 2
            events = await post(it, "/v1", stream=True)
            assert [event["type"] for event in events][:1] == ["message_start"]
            assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "overloaded_error")

    run_virtual(main())


def test_bad_requests_cost_themselves_only() -> None:
    async def main() -> None:
        async with offered() as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            for base, fields, status in [
                ("/v1", {"model": "gpt"}, "not_found_error"),
                ("/s/mf-x.y/v1", {}, "not_found_error"),
                (handle.base_url.replace("/v1", "no/v1"), {}, "authentication_error"),
                ("/v1", {"messages": []}, "invalid_request_error"),
                ("/v1", {"system": 5}, "invalid_request_error"),
            ]:
                for count in (False, True):
                    assert (await post(it, base, count=count, **fields))["error"]["type"] == status
            assert (await post(it, "/v1", count=True, temperature=1))["error"]["message"].startswith("unknown field 'temperature'")
            assert (await it.http.post("/v1/messages", content=b"{")).status_code == 400
            thread = (await post(it, "/v1", thread={"type": "create"}))["error"]
            assert thread["details"] == {"error_code": "thread_unsupported_request"}  # the SDK goes on without a thread
            assert (await post(it, "/v1", max_tokens=250))["usage"]["input_tokens"] == 5
            it.gateway.close(handle.session_id)
            assert (await it.http.post(f"{handle.base_url}/messages", json=BODY)).status_code == 410
            await asyncio.sleep(0)
        assert it.generator.running == 0

    run_virtual(main())


def test_what_the_engines_cannot_do_is_refused_in_the_clients_words() -> None:
    async def main() -> None:
        async with offered(limits=EngineLimits(max_context=2000, vocab_size=262)) as it:  # engines without features
            form = {"type": "json_schema", "schema": {"type": "object"}}
            for fields, name in [
                ({"output_config": {"format": form}}, "output_config.format"),
                ({"output_format": form}, "output_format"),
                ({"tools": [WEATHER], "tool_choice": {"type": "any"}}, "tool_choice"),
            ]:
                refused = (await post(it, "/v1", **fields))["error"]
                assert refused["type"] == "invalid_request_error" and refused["message"].startswith(f"{name} is not supported")

    run_virtual(main())


def test_the_models_are_listed_in_both_worlds_words() -> None:
    async def main() -> None:
        async with offered() as it:
            listed = (await it.http.get("/v1/models")).json()
            [model] = listed["data"]
            assert (listed["object"], listed["has_more"], listed["first_id"], listed["last_id"]) == ("list", False, "policy", "policy")
            assert (model["object"], model["type"], model["id"], model["display_name"]) == ("model", "model", "policy", "policy")
            assert (model["created"], model["created_at"]) == (7, "1970-01-01T00:00:07+00:00")

    run_virtual(main())
