from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from tests.gateway.offered import DEFAULTS, KEY, Offered, ScriptedGenerator, offered

from midflight.errors import EngineUnavailable, RequestRejected
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.dialects.responses import ResponsesExchange
from midflight.gateway.sessions.request import Asked, Messages, ToolChoice
from midflight.testing.virtual_time import run_virtual
from midflight.text.formats import CallPiece, ContentPiece, MessageFormat, Piece, ReasoningPiece, Tool, ToolCall
from midflight.types import Feature, Grammar, GrammarKind, Json

BODY = {"model": "policy", "input": "hi"}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "status": "completed"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
SAID = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": "yo"}]}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], "status": "completed"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLING = 'so\n<tool_call>\n{"name": "add",  "arguments": {"a":1}}\n</tool_call><|end|>'
"""Spaced as no template would write it, so that ids reused are seen to be those of the answer."""
ALL = EngineLimits(max_context=1024, vocab_size=262, features=frozenset(Feature))

EVENT = pydantic.TypeAdapter[Any](ResponseStreamEvent)


def exchange(**fields: object) -> ResponsesExchange:
    return ResponsesExchange(json.dumps(BODY | fields).encode())


def messages(given: object, **fields: object) -> list[Any]:
    (source,) = exchange(input=given, **fields).call.sources
    assert isinstance(source, Messages)
    return list(source.messages)


# --- What a request means --------------------------------------------------------------------------------------------


def test_instructions_come_first_and_a_text_is_what_the_user_says() -> None:
    assert messages("hi", instructions="be brief") == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def test_messages_are_read_in_every_form_the_sdk_sends() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    given = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"type": "message", "role": "user", "content": parts},
        {"role": "assistant", "content": "ok", "phase": "final_answer"},
        SAID,
    ]
    assert messages(given) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "ok"},
        {"role": "assistant", "content": "yo"},
    ]


def test_the_items_of_one_answer_are_one_message() -> None:
    second = CALL | {"call_id": "c2"}
    given = [{"role": "user", "content": "hi"}, THOUGHT, SAID, CALL, second, OUTPUT, OUTPUT | {"call_id": "c2"}, SAID]
    assert messages(given) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo", "reasoning_content": "hm", "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
        {"role": "assistant", "content": "yo"},
    ]


def test_what_follows_a_call_without_its_output_is_of_the_same_answer() -> None:
    assert messages([SAID, CALL, SAID]) == [{"role": "assistant", "content": "yoyo", "tool_calls": [CHAT_CALL]}]
    assert messages([CALL, THOUGHT]) == [{"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CHAT_CALL]}]


def test_reasoning_after_a_message_opens_the_next_answer() -> None:
    assert messages([SAID, THOUGHT, SAID]) == [
        {"role": "assistant", "content": "yo"},
        {"role": "assistant", "content": "yo", "reasoning_content": "hm"},
    ]


def test_a_summary_stands_for_reasoning_that_is_not_there() -> None:
    item = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "xyz"}
    assert messages([item, SAID]) == [{"role": "assistant", "content": "yo", "reasoning_content": "hm"}]


def test_outputs_of_tools_may_be_parts_of_text() -> None:
    assert messages([OUTPUT | {"output": [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}]}]) == [
        {"role": "tool", "tool_call_id": "c1", "content": "42"}
    ]


def test_every_field_reaches_the_call() -> None:
    call = exchange(
        max_output_tokens=9, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, stop="x", seed=3, min_tokens=1, frequency_penalty=0.5,
        top_logprobs=2, tools=[ADD], tool_choice={"type": "function", "name": "add"}, parallel_tool_calls=False, stream=True,
        reasoning={"effort": "low"}, chat_template_kwargs={"enable_thinking": False},
    ).call  # fmt: skip
    asked = Asked(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, stop=("x",), seed=3, min_tokens=1, frequency_penalty=0.5,
        top_logprobs=2,
    )  # fmt: skip
    (source,) = call.sources
    assert isinstance(source, Messages)
    assert call.asked == asked
    assert source.tools == (Tool("add", "Adds.", {"type": "object", "properties": {}}),)
    assert source.options == {"enable_thinking": False, "reasoning_effort": "low"}
    assert (call.tool_choice, call.forced_tool, call.parallel_tool_calls, call.stream) == (ToolChoice.REQUIRED, "add", False, True)
    assert (call.prompt_param, call.name_of("max_tokens")) == ("input", "max_output_tokens")


def test_nothing_asked_leaves_everything_to_the_session() -> None:
    assert exchange().call.asked == Asked()
    assert (exchange().call.tool_choice, exchange(tools=[ADD]).call.tool_choice) == (ToolChoice.NONE, ToolChoice.AUTO)


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type": "object"}'),
        ({"type": "json_schema", "name": "n", "schema": {"type": "array"}, "strict": True}, '{"type":"array"}'),
    ],
)
def test_a_text_format_is_a_grammar(given: object, grammar: str | None) -> None:
    expected = None if grammar is None else Grammar(GrammarKind.JSON_SCHEMA, grammar)
    assert exchange(text={"format": given, "verbosity": "medium"}).call.asked.grammar == expected


def test_harmless_fields_are_accepted() -> None:
    exchange(
        store=True, metadata={"a": "b"}, user="me", safety_identifier="x", prompt_cache_key="k", service_tier="auto", background=False,
        include=["reasoning.encrypted_content"], truncation="disabled", max_tool_calls=3, reasoning={"summary": "auto"},
        stream_options={"include_obfuscation": False}, previous_response_id=None, tools=[], tool_choice="auto",
    )  # fmt: skip


REFUSED: list[tuple[dict[str, object], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole input"),
    ({"conversation": "conv_1"}, "conversation", "POST /v1/conversations"),
    ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id", "send one of them"),
    ({"prompt": {"id": "p"}}, "prompt", "send the whole input"),
    ({"background": True}, "background", "stream it"),
    ({"n": 2}, "n", "several requests"),
    ({"response_format": {"type": "text"}}, "response_format", "text.format"),
    ({"tools": [ADD, ADD]}, "tools.1.name", "add"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name", "sub"),
    ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "web_search"),
    ({"tool_choice": "required"}, "tool_choice", "required"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "missing"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format", "another field"),
    ({"reasoning": {"effort": "wild"}}, "reasoning.effort", "wild"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "leave it out"),
    ({"max_output_tokens": 0}, "max_output_tokens", "0"),
    ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "send `reasoning`"),
    ({"input": []}, "input", "[]"),
    ({"input": 5}, "input", "5"),
    ({"input": ["x"]}, "input.0", "x"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "send the item itself"),
    ({"input": [{"type": "computer_call"}]}, "input.0", "computer_call"),
    ({"input": [{"content": "x"}]}, "input.0", "None"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input.0.role", "wizard"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input.0.content.0", "input_image"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input.0.content.0", "input_file"),
    ({"input": [{"role": "user", "content": None}]}, "input.0.content", "None"),
    ({"input": [CALL | {"arguments": "[1]"}]}, "input.0.arguments", "[1]"),
    ({"input": [CALL | {"arguments": "{]"}]}, "input.0.arguments", "{]"),
    ({"input": [CALL | {"name": None}]}, "input.0.name", "None"),
    ({"input": [{"type": "function_call_output", "output": "3"}]}, "input.0.call_id", "None"),
    ({"input": [OUTPUT | {"output": [{"type": "input_image"}]}]}, "input.0.output.0", "input_image"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_a_refusal_names_the_field_the_value_and_the_remedy(fields: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        exchange(**fields)
    assert (caught.value.param, words in str(caught.value)) == (param, True), str(caught.value)


# --- What the SDK reads ----------------------------------------------------------------------------------------------


class BarParser:
    """Segments between bars: `T` thinking, `F` a call with its arguments, else content. Content is told at once."""

    def __init__(self) -> None:
        self._text, self.num_calls = "", 0

    def feed(self, text: str) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        for letter in text:
            self._text += letter
            if letter == "|":
                pieces += self.finish()
            elif self._text[0] not in "TF":
                pieces.append(ContentPiece(letter))
                self._text = "-"
        return tuple(pieces)

    def finish(self) -> tuple[Piece, ...]:
        text, self._text = self._text.removesuffix("|"), ""
        if text.startswith("T"):
            return (ReasoningPiece(text[1:]),)
        if text.startswith("F"):
            self.num_calls += 1
            return (CallPiece(self.num_calls - 1, ToolCall("add", text[1:])),)
        return ()


class Bars(MessageFormat):
    def parser(
        self, prompt_text: str | None, *, calls: bool, forced: bool = False, tools: Sequence[Tool] = (), partly: bool = False
    ) -> BarParser:
        return BarParser()


def serve(use: Callable[[Offered, openai.AsyncOpenAI], Awaitable[None]], *texts: str, **options: Any) -> None:
    """Runs `use` with a gateway that answers these texts."""
    generator = ScriptedGenerator(texts=list(texts), **{k: options.pop(k) for k in ("error", "error_after") if k in options})

    async def main() -> None:
        async with offered(generator, **{"limits": ALL, **options}) as it:
            await use(it, it.sdk())

    run_virtual(main())


async def events_of(client: openai.AsyncOpenAI, **fields: Any) -> list[Any]:
    """Each event checked against the SDK's own type, whose required fields the SDK itself does not insist on."""
    stream = await client.responses.create(**{"model": "policy", "input": "hi", **fields}, stream=True)
    events = [event async for event in stream]
    for event in events:
        EVENT.validate_python(event.model_dump(by_alias=True, exclude_unset=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def nameless(value: Json) -> Json:
    """Ids differ between two answers; everything else must not."""
    if isinstance(value, dict):
        return {k: nameless(v) for k, v in value.items() if k not in ("id", "call_id", "item_id")}
    return [nameless(v) for v in value] if isinstance(value, list) else value


def test_a_response_is_whole_as_the_sdk_knows_it() -> None:
    async def use(it: Offered, client: openai.AsyncOpenAI) -> None:
        raw = await client.responses.with_raw_response.create(
            model="policy", input="hi", include=["message.output_text.logprobs"], temperature=1, metadata={"a": "b"}
        )
        Response.model_validate_json(raw.http_response.text)
        response = raw.parse()
        assert (response.output_text, response.status, response.error, response.created_at) == ("yo", "completed", None, 7)
        assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (5, 3, 8)
        assert [(t.token, t.logprob) for t in response.output[0].content[0].logprobs] == [("y", -0.5), ("o", -1.0), ("<|end|>", -1.5)]
        assert (response.temperature, response.metadata, response.tool_choice) == (1, {"a": "b"}, "auto")

    serve(use, "yo<|end|>")


def test_the_events_of_a_text_come_in_order() -> None:
    async def use(it: Offered, client: openai.AsyncOpenAI) -> None:
        events = await events_of(client)
        assert [event.type.removeprefix("response.") for event in events] == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
            "output_text.done", "content_part.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["y", "o"]
        assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
        assert events[0].response.output == []

    serve(use, "yo<|end|>")


@pytest.mark.parametrize(
    "text", ["yo<|end|>", "Thm|yo<|end|>", "Thm|-yo|F{}|F{}<|end|>", "F{}|yo|F{}<|end|>", "東<|end|>", "<|end|>", "cut", "Thm|cut"]
)
def test_a_stream_says_what_the_whole_response_says(text: str) -> None:
    async def use(it: Offered, client: openai.AsyncOpenAI) -> None:
        fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "tools": [ADD], "extra_body": {"return_token_ids": True}}
        whole = await client.responses.create(model="policy", input="hi", **fields)
        events = await events_of(client, **fields)
        last = events[-1]
        assert last.type == f"response.{whole.status}"
        assert nameless(last.response.model_dump()) == nameless(whole.model_dump())
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.id for item in done] == [item.id for item in last.response.output]
        for place, item in enumerate(last.response.output):
            deltas = [e.delta for e in events if e.type.endswith(".delta") and (e.output_index, e.item_id) == (place, item.id)]
            assert "".join(deltas) == (item.arguments if item.type == "function_call" else item.content[0].text)

    serve(use, text, text, message_format=Bars(ScriptedGenerator().tokenizer))


def test_items_come_in_the_order_of_the_answer() -> None:
    async def use(it: Offered, client: openai.AsyncOpenAI) -> None:
        response = await client.responses.create(model="policy", input="hi", tools=[ADD])
        assert [tool.model_dump(exclude_unset=True) for tool in response.tools] == [ADD]
        thought, said, first, second = response.output
        assert (thought.type, thought.content[0].text, said.content[0].text) == ("reasoning", "hm", "yo")
        assert [(c.type, c.name, c.arguments, c.status) for c in (first, second)] == [
            ("function_call", "add", '{"a": 1}', "completed"),
            ("function_call", "add", "{}", "completed"),
        ]
        assert first.call_id != second.call_id

    serve(use, 'Thm|yo|F{"a": 1}|F{}<|end|>', message_format=Bars(ScriptedGenerator().tokenizer))


def test_the_stream_helper_of_the_sdk_gathers_calls_and_text() -> None:
    async def use(it: Offered, client: openai.AsyncOpenAI) -> None:
        async with client.responses.stream(model="policy", input="hi", tools=[ADD]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [e.snapshot for e in events if e.type == "response.function_call_arguments.delta"] == ['{"a": 1}']
        assert [e.snapshot for e in events if e.type == "response.output_text.delta"] == ["y", "yo"]
        assert (final.output_text, final.output[1].arguments) == ("yo", '{"a": 1}')

    serve(use, 'yo|F{"a": 1}<|end|>', message_format=Bars(ScriptedGenerator().tokenizer))


@pytest.mark.parametrize("stream", [True, False])
def test_a_tool_loop_is_one_row(stream: bool) -> None:
    async def use(it: Offered, client: openai.AsyncOpenAI) -> None:
        handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
        client = it.sdk(base_url=handle.base_url)
        asked: dict[str, Any] = {"model": "policy", "tools": [ADD], "max_output_tokens": 200}
        first = (await events_of(client, **asked))[-1].response if stream else await client.responses.create(input="hi", **asked)
        said, call = first.output
        assert (said.content[0].text.strip(), call.name, json.loads(call.arguments)) == ("so", "add", {"a": 1})
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        again = [{"role": "user", "content": "hi"}, *first.output, output]
        second = await client.responses.create(input=again, extra_body={"return_token_ids": True}, **asked)
        turn = it.gateway.tokenizer.encode(CALLING)
        assert bytes(i for i in turn if i < 256) in bytes(i for i in second.prompt_token_ids if i < 256)
        assert second.output_text == "3!"
        record = it.gateway.close(handle.session_id)
        assert (record.num_turns, record.num_branches, len(record.rows), record.failed_requests) == (2, 0, 1, 0)

    serve(use, CALLING, "3!<|end|>")


class Point(pydantic.BaseModel):
    x: int


def test_the_sdk_parses_an_answer_into_a_type() -> None:
    async def use(it: Offered, client: openai.AsyncOpenAI) -> None:
        parsed = await client.responses.parse(model="policy", input="hi", text_format=Point)
        assert parsed.output_parsed == Point(x=3)
        asked = it.generator.requests[0].sampling.grammar
        assert asked is not None and json.loads(asked.text)["properties"]["x"]["type"] == "integer"
        async with client.responses.stream(model="policy", input="hi", text_format=Point) as stream:
            assert (await stream.get_final_response()).output_parsed == Point(x=3)

    serve(use, '{"x":3}<|end|>', '{"x":3}<|end|>')


def test_an_answer_that_was_cut_is_incomplete() -> None:
    async def use(it: Offered, client: openai.AsyncOpenAI) -> None:
        response = await client.responses.create(model="policy", input="hi", max_output_tokens=2)
        assert (response.status, response.incomplete_details.reason, response.output_text) == ("incomplete", "max_output_tokens", "yo")
        assert response.output[0].status == "incomplete"

    serve(use, "yo<|end|>")


@pytest.mark.parametrize("stream", [True, False])
def test_items_sent_back_continue_the_recorded_answer(stream: bool) -> None:
    async def use(it: Offered, client: openai.AsyncOpenAI) -> None:
        handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
        client = it.sdk(base_url=handle.base_url)
        first = (await events_of(client))[-1].response if stream else await client.responses.create(model="policy", input="hi")
        again = [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "so?"}]
        second = await client.responses.create(model="policy", input=again, extra_body={"return_token_ids": True})
        ids = it.gateway.tokenizer.encode("<|user|>hi<|end|><|assistant|>yo<|end|><|user|>so?<|end|><|assistant|>")
        assert second.prompt_token_ids == list(ids)
        assert second.token_ids == [*b"bye", 256]
        assert second.weight_versions == [{"version": 0, "start": 0, "end": 2}, {"version": 1, "start": 2, "end": 4}]
        record = it.gateway.close(handle.session_id)
        assert (record.num_turns, record.num_branches, len(record.rows), record.failed_requests) == (2, 0, 1, 0)

    serve(use, "yo<|end|>", "bye<|end|>")


def test_an_answer_that_says_nothing_can_be_sent_back() -> None:
    async def use(it: Offered, client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="policy", input="hi")
        assert [(item.type, item.content[0].text) for item in first.output] == [("message", "")]

    serve(use, "<|end|>")


def test_an_error_in_mid_stream_is_raised_by_the_sdk_and_is_an_event_of_its_own() -> None:
    async def use(it: Offered, client: openai.AsyncOpenAI) -> None:
        stream = await client.responses.create(model="policy", input="hi", stream=True)
        seen: list[str] = []
        with pytest.raises(openai.APIError, match="the engine is gone"):
            async for event in stream:
                seen.append(event.type)
        assert seen[-1] == "response.output_text.delta"
        raw = await it.http.post("/v1/responses", json=BODY | {"stream": True})
        name, data = raw.text.strip().split("\n\n")[-1].split("\n")
        last = json.loads(data.removeprefix("data: "))
        assert name == "event: error"
        assert EVENT.validate_python(last).sequence_number == raw.text.count("event: ") - 1
        assert (last["message"], last["error"]["message"]) == ("the engine is gone",) * 2

    serve(use, "abc<|end|>", "abc<|end|>", error=EngineUnavailable("the engine is gone"), error_after=2)


def test_errors_before_the_answer_keep_their_status() -> None:
    async def use(it: Offered, client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="send the whole input"):
            await client.responses.create(model="policy", input="hi", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="other", input="hi", stream=True)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")

    serve(use)


def test_a_format_that_no_engine_can_hold_to_is_refused_by_its_own_name() -> None:
    async def use(it: Offered, client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="policy", input="hi", text={"format": {"type": "json_object"}})
        assert caught.value.param == "text.format"

    serve(use, limits=EngineLimits(max_context=256, vocab_size=262))
