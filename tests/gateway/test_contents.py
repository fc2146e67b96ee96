"""Google's generateContent, in raw JSON. `tests/clients/test_google.py` drives it with the SDK."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.asked import CONTENTS, frames, streamed
from tests.gateway.offered import DEFAULTS, KEY, Offered, ScriptedGenerator, offered

from midflight.errors import EngineUnavailable, MidflightError, RequestRejected
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.dialects.contents import ContentsExchange, contents_fault
from midflight.gateway.dialects.contents_schemas import json_schema
from midflight.gateway.http import answer_stream
from midflight.gateway.sessions.request import Asked, Messages, ToolChoice
from midflight.testing.script import scripted_tokenizer
from midflight.testing.virtual_time import run_virtual
from midflight.text.formats import MessageFormat
from midflight.types import Feature, Grammar, GrammarKind

HI = [{"role": "user", "parts": [{"text": "hi"}]}]
SCHEMA = {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}}
WEATHER = {"functionDeclarations": [{"name": "weather", "description": "In a city.", "parameters": SCHEMA}]}
CLOCK = {"functionDeclarations": [{"name": "clock"}]}
TOLD = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ROOMY = EngineLimits(max_context=2000, vocab_size=262, features=frozenset(Feature))
COUNT = CONTENTS.replace("generateContent", "countTokens")


def exchange(**fields: Any) -> ContentsExchange:
    return ContentsExchange(json.dumps({"contents": HI} | fields).encode(), {"model": "policy"})


def configured(**fields: Any) -> Any:
    return exchange(generationConfig=fields).call


def said(*contents: dict[str, Any], **fields: Any) -> tuple[Any, ...]:
    """The chat that contents become."""
    (source,) = exchange(contents=list(contents), **fields).call.sources
    assert isinstance(source, Messages)
    return source.messages


def of(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def called(name: str, call_id: str | None = None, **args: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args, **({"id": call_id} if call_id else {})}}


def result(name: str, response: dict[str, Any], call_id: str | None = None) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response, **({"id": call_id} if call_id else {})}}


# --- Requests -----------------------------------------------------------------------------------------


def test_every_sampling_field_reaches_the_call_in_either_spelling() -> None:
    camel = {"temperature": 0.5, "topP": 0.9, "topK": 4.0, "maxOutputTokens": 7, "stopSequences": ["a", "b"], "seed": 3}
    camel |= {"presencePenalty": 0.5, "frequencyPenalty": 1, "candidateCount": 2}
    snake = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "max_output_tokens": 7, "stop_sequences": ["a", "b"], "seed": 3}
    snake |= {"presence_penalty": 0.5, "frequency_penalty": 1, "candidate_count": 2}
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "max_tokens": 7, "stop": ("a", "b"), "seed": 3}
    for call in (configured(**camel), exchange(generation_config=snake).call):
        assert call.asked == Asked(**wanted, presence_penalty=0.5, frequency_penalty=1)
        assert (call.n, call.model, call.stream) == (2, "policy", False)
    assert exchange(generationConfig=camel).unread.refusal is None, "Google's SDK writes topK as a float"
    assert exchange().call.asked == Asked()


def test_the_system_text_comes_first_and_texts_are_joined_as_they_are() -> None:
    system = {"parts": [{"text": "Be "}, {"text": "brief."}]}
    assert said(of("user", {"text": "a"}, {"text": "b"}), systemInstruction=system) == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
    )
    assert said({"parts": [{"text": "hi"}]}, system_instruction=system)[1] == {"role": "user", "content": "hi"}


def test_contents_of_the_model_that_follow_each_other_are_one_message() -> None:
    """SDKs keep each piece of a stream as a content of its own."""
    pieces = [of("model", {"text": "hm", "thought": True}), of("model", {"text": "I "}), of("model", {"text": "look."}), of("model", called("weather", "c1", city="Rome"))]  # fmt: skip
    (user, assistant, tool, last) = said(*HI, *pieces, of("user", result("weather", {"output": "sun"}), {"text": "so?"}))
    assert (user["content"], assistant["content"], assistant["reasoning_content"]) == ("hi", "I look.", "hm")
    assert assistant["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "sun"} and last == {"role": "user", "content": "so?"}


def test_results_find_their_calls_by_id_or_else_in_the_order_of_their_function() -> None:
    calls = of("model", called("f", a=1), called("g", "own"), called("f", a=2))
    answers = of("user", result("g", {"output": "3"}, "own"), result("f", {"output": "1"}), result("f", {"output": "2"}))
    messages = said(*HI, calls, answers)
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert ids == ["call_1", "own", "call_3"]
    assert [(m["tool_call_id"], m["content"]) for m in messages[2:]] == [("own", "3"), ("call_1", "1"), ("call_3", "2")]


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "x"}, "x"),
        ({"result": [1, 2]}, "[1, 2]"),
        ({"error": "it broke"}, "it broke"),
        ({"output": "x", "status": 0}, '{"output": "x", "status": 0}'),
        ({"city": "Rome"}, '{"city": "Rome"}'),
        ({}, "{}"),
    ],
)
def test_what_a_function_returned_is_told_as_text(response: dict[str, Any], text: str) -> None:
    assert said(*HI, of("model", called("f")), of("function", result("f", response)))[-1]["content"] == text


def test_functions_and_the_choice_between_them_reach_the_call() -> None:
    def chosen(**config: Any) -> tuple[Any, list[str]]:
        call = exchange(tools=[WEATHER, CLOCK], toolConfig={"functionCallingConfig": config} if config else None).call
        return call.tool_choice, [tool.name for tool in call.sources[0].tools]

    assert chosen() == chosen(mode="AUTO") == chosen(mode="VALIDATED") == (ToolChoice.AUTO, ["weather", "clock"])
    assert chosen(mode="NONE") == (ToolChoice.NONE, ["weather", "clock"])
    assert chosen(mode="ANY") == (ToolChoice.REQUIRED, ["weather", "clock"])
    assert chosen(mode="ANY", allowedFunctionNames=["clock"]) == (ToolChoice.REQUIRED, ["clock"])
    assert chosen(mode="AUTO", allowed_function_names=["clock"]) == (ToolChoice.AUTO, ["clock"])
    (weather, clock) = exchange(tools=[WEATHER, CLOCK]).call.sources[0].tools
    assert weather.parameters == {"type": "object", "properties": {"city": {"type": "string"}}}
    assert (weather.description, clock.parameters) == ("In a city.", {"type": "object", "properties": {}})
    assert exchange().call.tool_choice is ToolChoice.NONE


def test_thinking_is_an_option_of_the_template() -> None:
    def options(**config: Any) -> object:
        return configured(thinkingConfig=config).sources[0].options

    assert options(thinkingBudget=0) == {"enable_thinking": False}
    assert options(thinking_budget=100) == {"enable_thinking": True}
    assert options(thinkingBudget=-1) == options(includeThoughts=True) == {}
    assert options(thinkingLevel="HIGH") == {"reasoning_effort": "high"}


def test_a_schema_is_a_grammar_in_the_order_that_is_asked_for() -> None:
    schema = {"type": "OBJECT", "properties": {"a": {"type": "STRING", "nullable": True}, "b": {"type": "INTEGER", "format": "int32"}}}
    grammar = configured(responseMimeType="application/json", responseSchema={**schema, "propertyOrdering": ["b", "a"]}).asked.grammar
    assert grammar == Grammar(
        GrammarKind.JSON_SCHEMA, '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":["string","null"]}}}'
    )
    own = {"type": "array", "items": {"type": "integer"}}
    assert configured(responseMimeType="application/json", responseJsonSchema=own).asked.grammar.text == json.dumps(
        own, separators=(",", ":")
    )
    enum = configured(responseMimeType="text/x.enum", responseSchema={"type": "STRING", "enum": ["a.", "b"]}).asked.grammar
    assert enum == Grammar(GrammarKind.REGEX, r"a\.|b")
    assert configured(responseMimeType="application/json").asked.grammar.kind is GrammarKind.JSON_SCHEMA
    assert configured(responseMimeType="text/plain").asked.grammar is None


@pytest.mark.parametrize(
    ("google", "plain"),
    [
        ({"type": "TYPE_UNSPECIFIED"}, {}),
        ({"type": "ARRAY", "items": {"type": "NUMBER", "format": "double"}, "minItems": "1", "max_items": 3}, {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3}),
        ({"any_of": [{"type": "NULL"}, {"type": "BOOLEAN"}], "nullable": True}, {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "null"}]}),
        ({"type": "STRING", "format": "date-time"}, {"type": "string", "format": "date-time"}),
        ({"type": "STRING", "format": "enum", "enum": ["a"], "nullable": True}, {"type": ["string", "null"], "enum": ["a", None]}),
        ({"type": "object", "properties": {"any_of": {"type": "string"}}, "required": ["any_of"]}, {"type": "object", "properties": {"any_of": {"type": "string"}}, "required": ["any_of"]}),
        ({"ref": "#/$defs/p", "defs": {"p": {"type": "STRING"}}}, {"$ref": "#/$defs/p", "$defs": {"p": {"type": "string"}}}),
        ("x", "x"),
    ],
)  # fmt: skip
def test_a_schema_of_googles_is_one_of_json(google: Any, plain: Any) -> None:
    assert json_schema(google) == plain


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"contents": []}, "contents", "[]"),
    ({"contents": [{"role": "wizard", "parts": []}]}, "contents.0.role", "wizard"),
    ({"contents": [of("user", {"inlineData": {"mimeType": "image/png", "data": "x"}})]}, "contents.0.parts.0", "inlineData"),
    ({"contents": [of("user", {"file_data": {"fileUri": "x"}})]}, "contents.0.parts.0", "fileData"),
    ({"contents": [of("model", {"executableCode": {"code": "x"}}), *HI]}, "contents.0.parts.0", "executableCode"),
    ({"contents": [of("user", called("f"))]}, "contents.0.parts.0", "functionCall"),
    ({"contents": [of("user", {})]}, "contents.0.parts.0", "nothing"),
    ({"contents": [of("user", {"text": 5})]}, "contents.0.parts.0.text", "5"),
    ({"contents": [*HI, of("model", called("f"))]}, "contents.1", "ends with a call"),
    ({"contents": [of("model", called("")), *HI]}, "contents.0.parts.0.functionCall.name", "''"),
    ({"contents": [of("model", {"functionCall": {"name": "f", "args": "x"}}), *HI]}, "contents.0.parts.0.functionCall.args", "'x'"),
    ({"contents": [of("user", {"functionResponse": {"name": "f", "response": {}, "parts": [{}]}})]}, "contents.0.parts.0.functionResponse.parts", "text"),
    ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, "systemInstruction.parts.0", "inlineData"),
    ({"cachedContent": "cachedContents/1"}, "cachedContent", "contents"),
    ({"temperature": 1}, "temperature", "generationConfig"),
    ({"messages": []}, "messages", "contents"),
    ({"tools": [{"functionDeclarations": [{"name": "a b"}]}]}, "tools.0.functionDeclarations.0.name", "a b"),
    ({"tools": [{"functionDeclarations": [{"name": "f"}, {"name": "f"}]}]}, "tools.0.functionDeclarations.1.name", "another"),
    ({"tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "STRING"}}]}]}, "tools.0.functionDeclarations.0.parameters.type", "string"),
    ({"tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"type": "odd"}}]}]}, "tools.0.functionDeclarations.0.parametersJsonSchema.type", "odd"),
    ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig.mode", "without tools"),
    ({"tools": [WEATHER], "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}}}, "toolConfig.functionCallingConfig.allowedFunctionNames", "none of the tools"),
    ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities", "answers are text"),
    ({"generationConfig": {"speechConfig": {}}}, "generationConfig.speechConfig", "answers are text"),
    ({"generationConfig": {"responseMimeType": "image/png"}}, "generationConfig.responseMimeType", "image/png"),
    ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseSchema", "enum"),
    ({"generationConfig": {"responseSchema": SCHEMA}}, "generationConfig.responseMimeType", "application/json"),
    ({"generationConfig": {"responseMimeType": "application/json", "responseSchema": SCHEMA, "responseJsonSchema": {}}}, "generationConfig.responseJsonSchema", "one of them"),
    ({"generationConfig": {"logprobs": 2}}, "generationConfig.logprobs", "responseLogprobs"),
    ({"generationConfig": {"topP": 0}}, "generationConfig.topP", "0"),
    ({"generationConfig": {"topK": 1.5}}, "generationConfig.topK", "1.5"),
    ({"generationConfig": {"minP": 0.1}}, "generationConfig.minP", "This route does not have it"),
    ({"generationConfig": {"thinkingConfig": {"thinkingLevel": "SOME"}}}, "generationConfig.thinkingConfig.thinkingLevel", "SOME"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_a_fault_names_the_field_and_the_value(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        exchange(**fields)
    assert caught.value.param == param and words in str(caught.value)


@pytest.mark.parametrize("modalities", [["TEXT"], ["Text"], []])
def test_what_asks_for_text_asks_for_nothing(modalities: list[str]) -> None:
    assert exchange(generationConfig={"responseModalities": modalities}).unread.fields == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "parts", "text", "functionCall", "name", "args"]), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.sampled_from(["contents", "systemInstruction", "tools", "toolConfig", "generationConfig"]), JSON)
def test_whatever_is_sent_is_read_or_refused(field: str, value: object) -> None:
    try:
        exchange(**{field: value})
    except MidflightError as error:
        assert isinstance(error, RequestRejected)


# --- Answers ------------------------------------------------------------------------------------------


async def post(it: Offered, base: str = "", *, path: str = CONTENTS, **fields: Any) -> Any:
    answer = await it.http.post(base + path, json={"contents": HI, **fields})
    return frames(answer.text) if "alt=sse" in path and answer.status_code == 200 else answer.json()


def parts_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    return body["candidates"][0]["content"]["parts"]


@pytest.mark.parametrize(
    ("text", "limit", "ended", "parts"),
    [
        ("yo<|end|>", 90, "STOP", [{"text": "yo"}]),
        ("yoyo", 2, "MAX_TOKENS", [{"text": "yo"}]),
        ("<|end|>", 90, "STOP", [{"text": ""}]),
        (f"So.{TOLD}<|end|>", 200, "STOP", [{"text": "So."}, {"functionCall": {"name": "weather", "args": {"city": "Rome"}}}]),
        (TOLD, 55, "MAX_TOKENS", [{"functionCall": {"name": "weather", "args": {}}}]),
        ("<think>hm</think>yo<|end|>", 90, "STOP", [{"text": "hm", "thought": True}, {"text": "yo"}]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_holds_its_parts_in_the_order_they_were_said_and_says_why_it_ended(
    text: str, limit: int, ended: str, parts: list[dict[str, Any]], stream: bool
) -> None:
    async def main() -> None:
        form = MessageFormat(scripted_tokenizer(), reasoning="think")
        async with offered(ScriptedGenerator(texts=[text]), limits=ROOMY, message_format=form) as it:
            config = {"maxOutputTokens": limit, "thinkingConfig": {"includeThoughts": True}}
            told = await post(it, path=streamed(CONTENTS) if stream else CONTENTS, tools=[WEATHER], generationConfig=config)
            bodies = told if stream else [told]
            found: list[dict[str, Any]] = []
            for body in bodies:
                for part in parts_of(body):
                    if found and "text" in part and found[-1].keys() == part.keys():
                        found[-1] = {**part, "text": found[-1]["text"] + part["text"]}
                    else:
                        found.append(part)
            for part in found:
                assert "functionCall" not in part or part["functionCall"].pop("id").startswith("call_")
            assert found == parts
            assert [body["candidates"][0].get("finishReason") for body in bodies] == [None] * (len(bodies) - 1) + [ended]
            usage = bodies[-1]["usageMetadata"]
            tokens = min(limit, len(it.gateway.tokenizer.encode(text)))
            assert (usage["candidatesTokenCount"], usage["totalTokenCount"]) == (tokens, usage["promptTokenCount"] + tokens)
            assert bodies[-1]["modelVersion"] == "policy"

    run_virtual(main())


def test_thoughts_are_told_to_those_who_ask_for_them() -> None:
    async def main() -> None:
        form = MessageFormat(scripted_tokenizer(), reasoning="think")
        async with offered(ScriptedGenerator(texts=["<think>hm</think>yo<|end|>"] * 2), limits=ROOMY, message_format=form) as it:
            assert parts_of(await post(it, generationConfig={"maxOutputTokens": 90})) == [{"text": "yo"}]
            told = await post(it, path=streamed(CONTENTS), generationConfig={"maxOutputTokens": 90})
            assert "".join(part["text"] for body in told for part in parts_of(body)) == "yo"

    run_virtual(main())


def test_an_answer_sent_back_in_pieces_goes_on_from_its_tokens_and_counting_leaves_no_trace() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=[f"So.{TOLD}<|end|>", "Sunny.<|end|>"]), limits=ROOMY) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            base = f"/s/{handle.api_key}"
            ask = {"tools": [WEATHER], "generationConfig": {"maxOutputTokens": 200}}
            pieces = await post(it, base, path=streamed(CONTENTS), **ask)
            back = [body["candidates"][0]["content"] for body in pieces]
            (call,) = [part["functionCall"] for body in pieces for part in parts_of(body) if "functionCall" in part]
            again = [*HI, *back, of("user", result("weather", {"output": "sun"}, call["id"]))]
            counted = await post(
                it, base, path=COUNT, generateContentRequest={"contents": again, "model": "models/policy", **ask}, contents=None
            )
            second = await post(it, base, contents=again, **ask)
            assert parts_of(second) == [{"text": "Sunny."}]
            number = len(it.generator.requests[1].input_ids)
            assert counted["totalTokens"] == second["usageMetadata"]["promptTokenCount"] == number
            record = it.gateway.close(handle.session_id)
            assert (record.num_turns, len(record.rows), record.failed_requests) == (2, 1, 0)

    run_virtual(main())


@pytest.mark.parametrize("way", ["path", "x-goog-api-key", "key", "bearer"])
def test_a_session_is_named_by_the_path_or_wherever_googles_clients_put_their_key(way: str) -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["yo<|end|>"])) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            headers = {"x-goog-api-key": {"x-goog-api-key": handle.api_key}, "bearer": {"authorization": f"Bearer {handle.api_key}"}}.get(
                way, {}
            )
            prefix = f"/s/{handle.api_key}" if way == "path" else ""
            query = f"?key={handle.api_key}" if way == "key" else ""
            answer = await it.http.post(prefix + CONTENTS + query, json={"contents": HI}, headers=headers)
            assert answer.status_code == 200, answer.text
            assert it.gateway.close(handle.session_id).num_turns == 1

    run_virtual(main())


def test_both_versions_of_googles_paths_answer_the_same() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["yo<|end|>"] * 4), limits=ROOMY) as it:
            for path in (CONTENTS, streamed(CONTENTS), COUNT):
                told = [(await post(it, path=path.replace("v1beta", version))) for version in ("v1beta", "v1")]
                for body in [each for one in told for each in (one if isinstance(one, list) else [one])]:
                    body.pop("responseId", None)
                assert told[0] == told[1]

    run_virtual(main())


def test_several_candidates_are_numbered_and_their_prompt_counts_once() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(), limits=ROOMY) as it:
            config = {"candidateCount": 3, "maxOutputTokens": 4, "seed": 1}
            whole = await post(it, generationConfig=config)
            assert [each["index"] for each in whole["candidates"]] == [0, 1, 2]
            assert whole["usageMetadata"]["promptTokenCount"] == len(it.generator.requests[0].input_ids)
            pieces = await post(it, path=streamed(CONTENTS), generationConfig=config)
            assert pieces[-1]["usageMetadata"] == whole["usageMetadata"]

    run_virtual(main())


def test_log_probabilities_are_told_with_their_tokens() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["yo<|end|>"]), limits=ROOMY) as it:
            body = await post(it, generationConfig={"responseLogprobs": True, "maxOutputTokens": 9})
            (candidate,) = body["candidates"]
            chosen = candidate["logprobsResult"]["chosenCandidates"]
            assert [entry["logProbability"] for entry in chosen] == [-0.5, -1.0, -1.5]
            assert [entry["tokenId"] for entry in chosen] == list(it.gateway.tokenizer.encode("yo<|end|>"))
            assert candidate["avgLogprobs"] == -1.0

    run_virtual(main())


# --- Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "status", "word"),
    [
        (CONTENTS, {"contents": []}, 400, "INVALID_ARGUMENT"),
        (CONTENTS.replace("policy", "gemini-pro"), {}, 404, "NOT_FOUND"),
        ("/s/mf-x.y" + CONTENTS, {}, 404, "NOT_FOUND"),
        (streamed(CONTENTS).partition("?")[0], {}, 400, "INVALID_ARGUMENT"),
        (COUNT, {"contents": None}, 400, "INVALID_ARGUMENT"),
        (CONTENTS.replace("generateContent", "embedContent"), {}, 404, "NOT_FOUND"),
        ("/v1/models/policy:predictLongRunning", {}, 404, "NOT_FOUND"),
        ("/v1/cachedContents", {}, 404, "NOT_FOUND"),
        ("/v1/models/gemini:generateContent", {}, 404, "NOT_FOUND"),
        ("/v1beta/cachedContents", {}, 404, "NOT_FOUND"),
    ],
)
def test_an_error_has_googles_shape(path: str, fields: dict[str, Any], status: int, word: str) -> None:
    async def main() -> None:
        async with offered() as it:
            answer = await it.http.post(path, json={"contents": HI, **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["status"]) == (status, status, word), answer.text
            assert error["message"] and error["details"][0]["reason"]

    run_virtual(main())


def test_what_may_succeed_later_says_when_and_what_is_not_ours_says_nothing_of_its_inside() -> None:
    fault = contents_fault(EngineUnavailable("no engine"))
    assert isinstance(fault.body, dict) and isinstance(error := fault.body["error"], dict)
    assert (fault.status, error["status"], dict(fault.headers)[b"retry-after"]) == (503, "UNAVAILABLE", b"1")
    assert {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "1s"} in error["details"]  # type: ignore[operator]
    assert "secret" not in str(contents_fault(ValueError("secret")).body)


def test_an_error_in_the_middle_of_a_stream_is_json_of_its_own() -> None:
    """Google's SDKs take an event for a piece of an answer, and raise for JSON that is none."""

    async def main() -> None:
        async with offered(ScriptedGenerator(error=EngineUnavailable("the engine died"), error_after=5)) as it:
            answer = await it.http.post(streamed(CONTENTS), json={"contents": HI, "generationConfig": {"maxOutputTokens": 40}})
            *events, last = [block for block in answer.text.split("\n\n") if block]
            assert events and all(event.startswith("data: {") for event in events)
            assert json.loads(last)["error"]["status"] == "UNAVAILABLE"

    run_virtual(main())


def test_a_silent_stream_gets_empty_lines_and_no_word_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's SDKs fail at comments, and at `[DONE]`."""
    monkeypatch.setattr(answer_stream, "KEEP_ALIVE_SECONDS", 1.0)

    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["yo<|end|>"], seconds_per_token=3.0)) as it:
            answer = await it.http.post(streamed(CONTENTS), json={"contents": HI})
            assert "\n\n\n\n" in answer.text and "[DONE]" not in answer.text
            assert {line.partition(" ")[0] for line in answer.text.splitlines()} == {"data:", ""}

    run_virtual(main())


def test_the_model_is_listed_and_looked_up_in_googles_words() -> None:
    async def main() -> None:
        async with offered() as it:
            (model,) = (await it.http.get("/v1beta/models")).json()["models"]
            assert (model["name"], model["inputTokenLimit"]) == ("models/policy", 256)
            assert (await it.http.get("/v1beta/models/policy")).json() == model
            assert (await it.http.get("/v1/models")).json()["models"] == [model]
            assert (await it.http.get("/v1/models/policy")).json().items() >= model.items()
            assert (await it.http.get("/v1beta/models/gemini")).json()["error"]["status"] == "NOT_FOUND"

    run_virtual(main())
