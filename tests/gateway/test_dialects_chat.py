"""Chat completions field by field: what is honoured, what is ignored, what is refused by name; and streams against whole answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.gateway.generating import closed
from tests.gateway.offered import KEY, ScriptedGenerator, make_gateway, offered

from midflight.errors import RequestRejected
from midflight.gateway.answers.answer import News
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.dialects.chat import ChatExchange
from midflight.gateway.dialects.exchange import ParsedBodyCache, Reply, call_id
from midflight.gateway.sessions.request import Asked, CompletionCall, Messages, ToolChoice
from midflight.testing.virtual_time import run_virtual
from midflight.text.formats import AssistantMessage, CallPiece, ContentPiece, Piece, ReasoningPiece, Tool, ToolCall
from midflight.types import Feature, Finish, FinishReason, Grammar, GrammarKind, SamplingParams, Segment, Turn

CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOL = Tool("weather", "of a city", PARAMETERS)
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def exchange(**fields: object) -> ChatExchange:
    return ChatExchange(json.dumps(CHAT | fields).encode())


def call(**fields: object) -> CompletionCall:
    return exchange(**fields).call


ASKED: list[tuple[dict[str, Any], Asked]] = [
    ({"max_tokens": 5}, Asked(max_tokens=5)),
    ({"max_completion_tokens": 5}, Asked(max_tokens=5)),
    ({"max_tokens": 5, "max_completion_tokens": 5}, Asked(max_tokens=5)),
    ({"min_tokens": 2}, Asked(min_tokens=2)),
    ({"temperature": 0}, Asked(temperature=0)),
    ({"top_p": 0.5}, Asked(top_p=0.5)),
    ({"top_k": 3}, Asked(top_k=3)),
    ({"top_k": 0}, Asked()),
    ({"min_p": 0.1}, Asked(min_p=0.1)),
    ({"stop": ["a", "b"]}, Asked(stop=("a", "b"))),
    ({"stop_token_ids": [7]}, Asked(stop_token_ids=(7,))),
    ({"ignore_eos": True}, Asked(ignore_eos=True)),
    ({"seed": 4}, Asked(seed=4)),
    ({"frequency_penalty": -2}, Asked(frequency_penalty=-2)),
    ({"presence_penalty": 1.5}, Asked(presence_penalty=1.5)),
    ({"repetition_penalty": 1.1}, Asked(repetition_penalty=1.1)),
    ({"logit_bias": {"10": 5, "9": -100}}, Asked(logit_bias=((9, -100), (10, 5)))),
    ({"logprobs": True, "top_logprobs": 20}, Asked(top_logprobs=20)),
    ({"response_format": {"type": "text"}}, Asked()),
    ({"response_format": {"type": "json_object"}}, Asked(grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'))),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "null"}}}},
        Asked(grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type":"null"}')),
    ),
    ({"guided_json": '{"type": "null"}'}, Asked(grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type":"null"}'))),
    ({"guided_regex": "[ab]+"}, Asked(grammar=Grammar(GrammarKind.REGEX, "[ab]+"))),
    ({"guided_choice": ["yes", "no (a.b)"]}, Asked(grammar=Grammar(GrammarKind.REGEX, r"yes|no \(a\.b\)"))),
    ({"guided_grammar": 'start: "a"'}, Asked(grammar=Grammar(GrammarKind.LARK, 'start: "a"'))),
    ({"structured_outputs": {"json": {"type": "null"}}}, Asked(grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type":"null"}'))),
    ({"structured_outputs": {"regex": "a", "choice": None}}, Asked(grammar=Grammar(GrammarKind.REGEX, "a"))),
    ({"structured_outputs": {"json_object": True}}, Asked(grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'))),
]


@pytest.mark.parametrize(("fields", "asked"), ASKED, ids=lambda value: "+".join(value) if isinstance(value, dict) else "")
def test_a_sampling_field_reaches_the_call(fields: dict[str, Any], asked: Asked) -> None:
    assert call(**fields).asked == asked


IGNORED = {
    "user": "u", "safety_identifier": "u", "metadata": {"a": "b"}, "store": True, "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "service_tier": "auto", "prediction": {"type": "content", "content": "x"}, "modalities": ["text"],
    "skip_special_tokens": True, "separate_reasoning": True, "add_generation_prompt": True, "length_penalty": 1, "audio": None,
    "stream_options": {"include_obfuscation": True},
}  # fmt: skip


@pytest.mark.parametrize("field", IGNORED)
def test_a_harmless_field_changes_nothing(field: str) -> None:
    assert call(**{field: IGNORED[field]}) == call()


def tool(**function: object) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def assistant(**fields: object) -> dict[str, Any]:
    return {"messages": [*CHAT["messages"], {"role": "assistant", **fields}]}


def calling(**fields: object) -> dict[str, Any]:
    return assistant(tool_calls=[CALL | fields])


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"functions": [{"name": "f"}]}, "functions", "send `tools` instead"),
    ({"function_call": {"name": "f"}}, "function_call", "send `tool_choice` instead"),
    ({"audio": {"voice": "x"}}, "audio", "answers are text"),
    ({"modalities": ["text", "audio"]}, "modalities", "answers are text"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "'huge'"),
    ({"continue_final_message": True}, "messages.0", "not the assistant's"),
    ({"length_penalty": True}, "length_penalty", "send 1"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "5 and max_completion_tokens is 6"),
    ({"top_logprobs": 2}, "top_logprobs", "send logprobs true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "-2.1"),
    ({"temperature": 1e-320}, "temperature", "send 0"),
    ({"top_k": 10**30}, "top_k", "1000"),
    ({"repetition_penalty": 1e-9}, "repetition_penalty", "0.01"),
    ({"stop": 5}, "stop", "5"),
    ({"stop": ["a", 5]}, "stop", "5"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"logit_bias": {"the": 1}}, "logit_bias.the", "the"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "-1"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1", "x"),
    ({"logit_bias": {str(k): 1 for k in range(301)}}, "logit_bias", "300"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "None"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "response_format.json_schema.name", "a b"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema", "missing"),
    ({"guided_json": {"type": "objekt"}}, "guided_json.type", "objekt"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": {"properties": {"a": {"anyOf": 3}}}}, "guided_json.properties.a.anyOf", "a list of schemas"),
    ({"guided_json": {"properties": {"a": 1}}}, "guided_json.properties.a", "1"),
    ({"guided_json": {"required": "a"}}, "guided_json.required", "list of names"),
    ({"guided_json": '{"maximum": 1e999}'}, "guided_json", "finite"),
    ({"guided_json": {"properties": {"x" * 300: 1}}}, ("guided_json.properties." + "x" * 300)[:200], "is 1"),
    ({"guided_regex": ""}, "guided_regex", "not empty"),
    ({"guided_choice": []}, "guided_choice", "list"),
    ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", "Lark"),
    ({"guided_regex": "a", "guided_grammar": "start: A"}, "guided_grammar", "guided_regex and guided_grammar"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "regex and json_object"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unknown field"),
    ({"tools": [{"type": "custom"}]}, "tools.0.custom", "missing"),
    ({"tools": [{"type": "funktion"}]}, "tools", "Did you mean 'function'"),
    (tool(name="a b"), "tools.0.function.name", "a b"),
    (tool(name="x" * 65), "tools.0.function.name", "xxx"),
    (tool(description=3), "tools.0.function.description", "3"),
    (tool(parameters=[]), "tools.0.function.parameters", "[]"),
    (tool(parameters={"type": "string"}), "tools.0.function.parameters.type", "schema of an object"),
    (tool(parameters={"properties": []}), "tools.0.function.parameters.properties", "object of schemas"),
    ({"tools": [WEATHER, CLOCK, WEATHER]}, "tools.2.function.name", "rename one"),
    ({"tools": [CLOCK] * 1025}, "tools", "1024"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "any"),
    ({"tool_choice": "required"}, "tool_choice", "without tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.allowed_tools.tools", "list of tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.name", "None"),
    ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "web_search"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name", "weather"),
    ({"tools": [WEATHER], "parallel_tool_calls": 1}, "parallel_tool_calls", "1"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "set by the gateway"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token", "set by the gateway"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", "send role tool"),
    ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages.0.name", "3"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0", "input_audio"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0", "'x'"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0.tool_calls", "role user"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "None"),
    ({"messages": [{"role": "tool", "tool_call_id": "c"}]}, "messages.0.content", "missing"),
    (assistant(content="x", reasoning_content=3), "messages.1.reasoning_content", "3"),
    (assistant(content="x", function_call={"name": "f"}), "messages.1.function_call", "send tool_calls instead"),
    (assistant(tool_calls={}), "messages.1.tool_calls", "list of calls"),
    (assistant(tool_calls=["x"]), "messages.1.tool_calls.0", "'x'"),
    (calling(type="custom"), "messages.1.tool_calls.0.custom.input", "None"),
    (calling(id=None), "messages.1.tool_calls.0.id", "None"),
    (calling(function=None), "messages.1.tool_calls.0.function", "None"),
    (calling(function={"name": 1, "arguments": "{}"}), "messages.1.tool_calls.0.function.name", "1"),
    (calling(function={"name": "f", "arguments": "[]"}), "messages.1.tool_calls.0.function.arguments", "[]"),
    (calling(function={"name": "f", "arguments": "{]"}), "messages.1.tool_calls.0.function.arguments", "JSON text"),
    (calling(function={"name": "f", "arguments": "[" * 100_000}), "messages.1.tool_calls.0.function.arguments", "JSON text"),
    (calling(function={"name": "f"}), "messages.1.tool_calls.0.function.arguments", "None"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[f"{k}-{row[1]}" for k, row in enumerate(REFUSED)])
def test_a_fault_names_its_place_and_the_remedy(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        exchange(**fields)
    assert caught.value.param == param
    assert words in str(caught.value)


def test_the_body_that_a_group_sends_is_read_once_and_each_request_is_its_own() -> None:
    read: list[bytes] = []

    def reading(body: bytes) -> ChatExchange:
        read.append(body)
        return ChatExchange(body)

    recent = ParsedBodyCache(reading)
    body, long = json.dumps(CHAT | {"user": "ann"}).encode(), json.dumps(CHAT | {"user": "a" * 20_000}).encode()
    first, second = recent(body), recent(body)
    assert first is not second and first.call == second.call and len(read) == 1
    first.unread.note("tools.strict")
    assert set(second.unread.fields) == set(recent(body).unread.fields) == {"user"}
    assert recent(long).call == recent(long).call and len(read) == 3, "long bodies are not kept"
    for _ in range(2):
        with pytest.raises(RequestRejected):
            recent(b"{}")
    assert len(read) == 5
    for place in range(300):
        recent(json.dumps(CHAT | {"max_tokens": place + 1}).encode())
    recent(body)
    assert read[-1] == body, "the oldest are forgotten"


def test_tools_are_auto_unless_the_client_chooses() -> None:
    both: dict[str, Any] = {"tools": [WEATHER, CLOCK]}
    (source,) = call(**both).sources
    assert isinstance(source, Messages)
    assert source.tools == (TOOL, Tool("clock", "", {"type": "object", "properties": {}}))
    made = [
        call(**both, tool_choice=choice)
        for choice in (None, "none", "auto", "required", {"type": "function", "function": {"name": "clock"}})
    ]
    assert [(c.tool_choice, c.forced_tool) for c in made] == [
        (ToolChoice.AUTO, None), (ToolChoice.NONE, None), (ToolChoice.AUTO, None), (ToolChoice.REQUIRED, None), (ToolChoice.REQUIRED, "clock"),
    ]  # fmt: skip
    assert call(tool_choice="auto").tool_choice is ToolChoice.NONE
    assert [call(**both, parallel_tool_calls=value).parallel_tool_calls for value in (None, True, False)] == [True, True, False]


def test_the_history_of_an_agent_with_tools_is_read() -> None:
    messages = [
        {"role": "developer", "content": "be brief", "name": "boss"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "reasoning_content": "hm",
            "tool_calls": [{**CALL, "index": 0}],
            "audio": None,
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "assistant", "content": "x", "tool_calls": [{"id": "c2", "function": {"name": "clock", "arguments": ""}}]},
    ]
    (source,) = call(messages=messages).sources
    assert source == Messages(
        (
            {"role": "system", "content": "be brief", "name": "boss"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
            {
                "role": "assistant",
                "content": "x",
                "tool_calls": [{"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{}"}}],
            },
        )
    )


def test_options_go_to_the_template() -> None:
    (source,) = call(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low").sources
    assert isinstance(source, Messages)
    assert source.options == {"enable_thinking": False, "reasoning_effort": "low"}


# --- Answers -------------------------------------------------------------------------------------------------------------

PIECES: list[Piece] = [
    ReasoningPiece("I "),
    ReasoningPiece("see."),
    ContentPiece("Let me"),
    ContentPiece(" look."),
    CallPiece(0, ToolCall("weather", '{"city": "Rome"}')),
    CallPiece(1, ToolCall("clock", "{}")),
]


def answered(pieces: list[Piece], *, finish: FinishReason = FinishReason.STOP, **fields: object) -> tuple[Any, list[Any]]:
    """The whole answer and the frames of the stream, for a model that says these pieces, one with each second token."""
    ids = tuple(range(97, 97 + 2 * len(pieces)))
    logprobs = tuple(-float(i) for i in ids)
    top = tuple(((i, -0.5), (65, -1.0)) for i in ids)
    message = AssistantMessage(
        content="".join(p.text for p in pieces if isinstance(p, ContentPiece)),
        reasoning="".join(p.text for p in pieces if isinstance(p, ReasoningPiece)),
        tool_calls=tuple(p.call for p in pieces if isinstance(p, CallPiece)),
    )

    spoken = ChatExchange(json.dumps(CHAT | fields).encode())
    gateway = make_gateway(ScriptedGenerator(), limits=EngineLimits(2048, 262, frozenset(Feature)))
    job = gateway.prepare(gateway.session_for(path_token=None, api_key=None), spoken.call)
    reply = Reply(job, "policy", 7, gateway.tokenizer)
    prompt = job.answers[0].prompt
    turn = Turn(prompt.ids, ids, logprobs, (Segment(0, 0, 0, len(ids)),), Finish(finish))
    deltas = [
        News(0, "", ids[k : k + 1], logprobs[k : k + 1], (pieces[k // 2],) if k % 2 else (), top[k : k + 1]) for k in range(len(ids) - 1)
    ]
    deltas.append(News(0, "", ids[-1:], logprobs[-1:], (), top[-1:]))
    answer = closed(job.answers[0], turn, message=message, tail_pieces=pieces[-1:], top_logprobs=top)
    frames = [
        *spoken.opening(reply),
        *(f for event in (*deltas, answer) for f in spoken.frames(reply, event)),
        *spoken.closing(reply, [answer]),
    ]
    return spoken.whole(reply, [answer]), frames


def gathered(frames: list[Any]) -> Any:
    """The message that OpenAI's SDK gathers from a stream."""
    from openai.lib.streaming.chat import ChatCompletionStreamState
    from openai.types.chat import ChatCompletionChunk

    state = ChatCompletionStreamState()
    for frame in frames:
        state.handle_chunk(ChatCompletionChunk.model_validate(frame))
    return state.get_final_completion()


def test_an_answer_with_thinking_and_calls_has_them_in_their_fields() -> None:
    whole, _ = answered(PIECES, tools=[WEATHER, CLOCK])
    (choice,) = whole["choices"]
    request_id = whole["id"].removeprefix("chatcmpl-")
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me look.",
        "refusal": None,
        "reasoning_content": "I see.",
        "reasoning": "I see.",
        "tool_calls": [
            {"id": call_id(request_id, 0), "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
            {"id": call_id(request_id, 1), "type": "function", "function": {"name": "clock", "arguments": "{}"}},
        ],
    }
    assert choice["finish_reason"] == "tool_calls"
    assert answered(PIECES, finish=FinishReason.LENGTH)[0]["choices"][0]["finish_reason"] == "length"


def test_content_is_null_where_there_are_calls_only_and_empty_where_there_is_nothing() -> None:
    assert answered(PIECES[4:])[0]["choices"][0]["message"]["content"] is None
    assert answered([ContentPiece("")])[0]["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}


@pytest.mark.parametrize("pieces", [PIECES, PIECES[2:4], PIECES[:2], PIECES[4:], [PIECES[0], *PIECES[4:]]])
def test_a_stream_gathered_by_the_sdk_is_the_whole_answer(pieces: list[Piece]) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER, CLOCK], "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    whole, frames = answered(pieces, stream=True, **asked)
    final = gathered(frames)
    message, expected = final.choices[0].message, whole["choices"][0]["message"]
    assert (message.content or None) == (expected["content"] or None)
    assert (message.model_extra or {}).get("reasoning_content") == expected.get("reasoning_content")
    calls = [
        c.model_dump(include={"id", "type"}) | {"function": c.function.model_dump(include={"name", "arguments"})}
        for c in message.tool_calls or ()
    ]
    assert calls == expected.get("tool_calls", [])
    assert final.choices[0].finish_reason == whole["choices"][0]["finish_reason"]
    assert final.choices[0].logprobs.model_dump() == whole["choices"][0]["logprobs"]
    assert final.usage.model_dump(exclude_none=True) == whole["usage"]


def test_a_call_is_announced_before_its_arguments() -> None:
    _, frames = answered(PIECES[4:5], stream=True)
    deltas = [d for f in frames for d in f["choices"][0]["delta"].get("tool_calls", ())]
    assert deltas == [
        {"index": 0, "id": deltas[0]["id"], "type": "function", "function": {"name": "weather", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"city": "Rome"}'}},
    ]


def test_tokens_are_told_when_they_come_even_while_their_text_is_held_back() -> None:
    _, frames = answered(PIECES[4:], stream=True, logprobs=True, return_token_ids=True)
    told = [f["choices"][0]["token_ids"] for f in frames if "token_ids" in f["choices"][0]]
    assert told == [[97], [98], [99], [100]]
    assert [[t["token"] for t in f["choices"][0]["logprobs"]["content"]] for f in frames if f["choices"][0]["logprobs"]] == [
        ["a"],
        ["b"],
        ["c"],
        ["d"],
    ]


def test_alternatives_and_names_of_tokens_are_written_as_asked() -> None:
    whole, _ = answered([ContentPiece("x")], logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    first = whole["choices"][0]["logprobs"]["content"][0]
    assert first == {
        "token": "token_id:97",
        "logprob": -97.0,
        "bytes": [97],
        "top_logprobs": [
            {"token": "token_id:97", "logprob": -0.5, "bytes": [97]},
            {"token": "token_id:65", "logprob": -1.0, "bytes": [65]},
        ],
    }


def test_usage_comes_where_it_is_asked_for() -> None:
    _, frames = answered([ContentPiece("x")], stream=True)
    assert not any("usage" in f for f in frames)
    _, frames = answered([ContentPiece("x")], stream=True, stream_options={"include_usage": True})
    assert [f["usage"] for f in frames[:-1]] == [None] * (len(frames) - 1)
    assert frames[-1]["choices"] == [] and frames[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    _, frames = answered([ContentPiece("x"), ContentPiece("y")], stream=True, stream_options={"continuous_usage_stats": True})
    assert [f["usage"]["completion_tokens"] for f in frames] == [0, 2, 4, 4]


def test_what_the_engines_cannot_do_is_refused_over_the_wire() -> None:
    async def main() -> None:
        async with offered() as it:
            for fields, param in [
                ({"frequency_penalty": 1}, "frequency_penalty"),
                ({"logit_bias": {"1": 1}}, "logit_bias"),
                ({"response_format": {"type": "json_object"}}, "response_format"),
                ({"logprobs": True, "top_logprobs": 1}, "top_logprobs"),
            ]:
                answer = await it.http.post("/v1/chat/completions", json=CHAT | fields)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            fine = await it.http.post("/v1/chat/completions", json=CHAT | {"frequency_penalty": 0, "logit_bias": {}, "max_tokens": 3})
            assert fine.status_code == 200

    run_virtual(main())


def test_streamed_and_whole_answers_of_one_seed_are_the_same_over_the_wire() -> None:
    async def main() -> None:
        async with offered() as it:
            client = it.sdk()
            for fields in ({"stop": "e"}, {"n": 3}, {"logprobs": True}):
                asked = {"model": "policy", "messages": CHAT["messages"], "max_tokens": 20, "seed": 5, **fields}
                whole = await client.chat.completions.create(**asked)
                stream = await client.chat.completions.create(**asked, stream=True)
                frames = [chunk async for chunk in stream]
                for choice in whole.choices:
                    mine = [c for f in frames for c in f.choices if c.index == choice.index]
                    assert "".join(c.delta.content or "" for c in mine) == choice.message.content
                    assert mine[-1].finish_reason == choice.finish_reason
                    tokens = [t for c in mine if c.logprobs for t in c.logprobs.content]
                    assert tokens == (choice.logprobs.content if choice.logprobs else [])
            await asyncio.sleep(0)

    run_virtual(main())


SPOKEN = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|end|>'
)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tools": [WEATHER, CLOCK]}, ["weather", "clock"]),
        ({"tools": [WEATHER, CLOCK], "parallel_tool_calls": False}, ["weather"]),
        ({"tools": [WEATHER, CLOCK], "tool_choice": "none"}, []),
        ({}, []),
    ],
)
def test_what_a_model_writes_as_calls_reaches_the_sdk_whole_and_streamed(fields: dict[str, Any], names: list[str]) -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=[SPOKEN] * 2), limits=EngineLimits(2048, 262)) as it:
            asked: dict[str, Any] = {"model": "policy", "messages": CHAT["messages"], "max_tokens": 300, "logprobs": True, **fields}
            whole = (await it.sdk().chat.completions.create(**asked)).choices[0]
            stream = await it.sdk().chat.completions.create(**asked, stream=True)
            streamed = gathered([chunk.model_dump(exclude_unset=True) async for chunk in stream]).choices[0]
            calls = whole.message.tool_calls or []
            assert [c.function.name for c in calls] == names
            assert whole.finish_reason == streamed.finish_reason == ("tool_calls" if names else "stop")
            assert (streamed.message.content or "").strip() == (whole.message.content or "").strip()
            assert ("<tool_call>" in (whole.message.content or "")) is (not names)
            assert [(c.function.name, json.loads(c.function.arguments)) for c in streamed.message.tool_calls or []] == [
                (c.function.name, json.loads(c.function.arguments)) for c in calls
            ]
            assert streamed.logprobs == whole.logprobs
            ids = {c.id for c in calls}
            assert len(ids) == len(names) and all(i.startswith("call_") for i in ids)

    run_virtual(main())


def test_an_agent_that_sends_its_calls_back_stays_on_one_branch() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=[SPOKEN, "Sunny.<|end|>"]), limits=EngineLimits(2048, 262)) as it:
            handle = it.gateway.open(KEY, sampling=SamplingParams(max_tokens=300), tracked=True)
            client = it.sdk(base_url=handle.base_url)
            asked: dict[str, Any] = {"model": "policy", "tools": [WEATHER, CLOCK]}
            first = (await client.chat.completions.create(messages=CHAT["messages"], **asked)).choices[0].message
            results = [{"role": "tool", "tool_call_id": c.id, "content": "fine"} for c in first.tool_calls]
            await client.chat.completions.create(messages=[*CHAT["messages"], first.model_dump(), *results], **asked)
            record = it.gateway.close(handle.session_id)
            assert (record.num_turns, record.num_branches, len(record.rows)) == (2, 0, 1)

    run_virtual(main())
