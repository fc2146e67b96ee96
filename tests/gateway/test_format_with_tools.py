"""A response format beside tools that may be called: the answer is calls, or content of that format, over every chat dialect."""

from __future__ import annotations

import json
import random
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from tests.gateway.asked import CONTENTS
from tests.gateway.offered import DEFAULTS, KEY, Offered, ScriptedGenerator, offered
from tests.text.written import CODER, model

from midflight.engines.embedded.grammar import Grammars
from midflight.gateway.answers.plan import EngineLimits
from midflight.testing.script import scripted_tokenizer
from midflight.testing.virtual_time import run_virtual
from midflight.text.formats import MessageFormat
from midflight.types import Feature, Finish, FinishReason, GenerateRequest

HI = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}
POINT = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
ALL = EngineLimits(max_context=4000, vocab_size=262, features=frozenset(Feature))
FORMAT = {"type": "json_schema", "name": "point", "schema": POINT}

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": HI,
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": CITY}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}},
    },
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", "name": "weather", "parameters": CITY}],
        "text": {"format": FORMAT},
    },
    "/v1/messages": {
        "messages": HI,
        "max_tokens": 500,
        "tools": [{"name": "weather", "input_schema": CITY}],
        "output_config": {"format": {"type": "json_schema", "schema": POINT}},
    },
    CONTENTS: {
        "contents": [{"parts": [{"text": "hi"}]}],
        "tools": [{"functionDeclarations": [{"name": "weather", "parametersJsonSchema": CITY}]}],
        "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": POINT},
    },
}
ONE_CALL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"parallel_tool_calls": False},
    "/v1/responses": {"parallel_tool_calls": False},
    "/v1/messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}


class Walker(ScriptedGenerator):
    """Answers at random, but only what the request's grammar allows: a constrained engine without a model."""

    def answer(self, request: GenerateRequest) -> tuple[tuple[int, ...], tuple[float, ...], Finish]:
        assert request.sampling.grammar is not None
        rng = random.Random(len(self.requests))
        constraint = Grammars(self.tokenizer, vocab_size=262).constraint(request.sampling.grammar, ())
        ids: list[int] = []
        while not constraint.ended:
            allowed = constraint.allowed().nonzero()[0].tolist()
            ends = [i for i in allowed if i in self.tokenizer.eos_token_ids]
            ids.append(rng.choice(ends if ends and rng.random() < 0.5 else allowed))
            constraint.advance(ids[-1:])
        return tuple(ids), (-0.5,) * len(ids), Finish(FinishReason.STOP, ids[-1])


def said(path: str, body: dict[str, Any]) -> tuple[list[tuple[str, Any]], str]:
    """Calls and content of an answer."""
    match path:
        case "/v1/chat/completions":
            message = body["choices"][0]["message"]
            called = [call["function"] for call in message.get("tool_calls", [])]
            return [(call["name"], json.loads(call["arguments"])) for call in called], message["content"] or ""
        case "/v1/responses":
            items = body["output"]
            texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
            return [(i["name"], json.loads(i["arguments"])) for i in items if i["type"] == "function_call"], "".join(texts)
        case _ if path == CONTENTS:
            parts = body["candidates"][0]["content"]["parts"]
            called = [part["functionCall"] for part in parts if "functionCall" in part]
            return [(call["name"], call["args"]) for call in called], "".join(part.get("text", "") for part in parts)
        case _:
            blocks = body["content"]
            texts = [block["text"] for block in blocks if block["type"] == "text"]
            return [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"], "".join(texts)


async def post(it: Offered, path: str, **fields: Any) -> Any:
    answer = await it.http.post(path, json={"model": "policy", **REQUESTS[path], **fields})  # Google's address names it too
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", REQUESTS)
def test_whatever_a_model_says_is_calls_or_matches_the_format(path: str) -> None:
    async def main() -> None:
        called = spoken = several = 0
        async with offered(Walker(), limits=ALL) as it:
            for _ in range(20):
                calls, content = said(path, await post(it, path))
                assert bool(calls) != bool(content)
                assert all(name == "weather" and given in ({"city": "Rome"}, {"city": "Oslo"}) for name, given in calls)
                assert not content or json.loads(content) in ({"x": 1}, {"x": 2})
                called, spoken, several = called + bool(calls), spoken + bool(content), several + (len(calls) > 1)
        assert called and spoken and several

    run_virtual(main())


@pytest.mark.parametrize("path", ONE_CALL)
def test_without_parallel_calls_one_is_sampled_at_most(path: str) -> None:
    async def main() -> None:
        async with offered(Walker(), limits=ALL) as it:
            counts = {len(said(path, await post(it, path, **ONE_CALL[path]))[0]) for _ in range(10)}
            assert counts == {0, 1}

    run_virtual(main())


def test_a_forced_call_leaves_the_format_nothing_to_hold_for_and_no_choice_leaves_no_call() -> None:
    async def main() -> None:
        async with offered(Walker(), limits=ALL) as it:
            for _ in range(5):
                calls, content = said("/v1/chat/completions", await post(it, "/v1/chat/completions", tool_choice="required"))
                assert calls and not content
                calls, content = said("/v1/chat/completions", await post(it, "/v1/chat/completions", tool_choice="none"))
                assert not calls and json.loads(content) in ({"x": 1}, {"x": 2})

    run_virtual(main())


def test_the_turn_is_not_trained_on_for_another_distribution_was_sampled() -> None:
    async def main() -> None:
        async with offered(Walker(), limits=ALL) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            path = handle.base_url.removeprefix("http://memory") + "/chat/completions"
            body = {"model": "policy", "max_tokens": 500, **REQUESTS["/v1/chat/completions"]}
            assert (await it.http.post(path, json=body)).status_code == 200
            record = it.gateway.close(handle.session_id)
            assert (record.num_turns, sum(int(row.loss_mask.sum()) for row in record.rows)) == (1, 0)
            assert not it.generator.requests[0].sampling.samples_the_policy

    run_virtual(main())


CODED = "<tool_call>\n<function=weather>\n<parameter=city>\n007\n</parameter>\n</function>\n</tool_call><|end|>"
STRING = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(("schema", "given"), [(STRING, {"city": "12"}), ({"type": "object"}, {"city": 12})])
def test_values_without_quotes_get_the_types_of_the_tools_offered(schema: dict[str, Any], given: dict[str, Any]) -> None:
    async def main() -> None:
        tokenizer = model(CODER)
        generator = ScriptedGenerator(tokenizer, texts=[CODED.replace("007", "12")])
        async with offered(generator, limits=ALL, message_format=MessageFormat(tokenizer)) as it:
            tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
            body = {"model": "policy", "messages": HI, "tools": [tool]}
            answer = await it.http.post("/v1/chat/completions", json=body)
            assert said("/v1/chat/completions", answer.json()) == ([("weather", given)], "")

    run_virtual(main())


TOLD = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("choice", "calls", "content"), [("auto", [], TOLD), ("required", [("weather", {"city": "Rome"})], ""), ("none", [], TOLD)]
)
def test_without_a_tool_format_what_looks_like_a_call_is_content_unless_it_was_forced(
    choice: str, calls: list[tuple[str, Any]], content: str
) -> None:
    async def main() -> None:
        tokenizer = scripted_tokenizer()
        form = MessageFormat(tokenizer, tools="none")
        async with offered(ScriptedGenerator(tokenizer, texts=[f"{TOLD}<|end|>"]), limits=ALL, message_format=form) as it:
            body = {"model": "policy", **REQUESTS["/v1/chat/completions"], "tool_choice": choice, "response_format": None}
            answer = await it.http.post("/v1/chat/completions", json=body)
            assert said("/v1/chat/completions", answer.json()) == (calls, content)

    run_virtual(main())


class Point(BaseModel):
    x: Literal[1, 2]


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]


def test_the_sdk_parses_either_answer_into_its_type() -> None:
    """As agent frameworks ask: an output type, and strict tools beside it."""

    async def main() -> None:
        found: set[type] = set()
        async with offered(Walker(), limits=ALL) as it:
            tool = openai.pydantic_function_tool(Weather)
            for _ in range(10):
                answer = await it.sdk().chat.completions.parse(model="policy", messages=HI, response_format=Point, tools=[tool])
                message = answer.choices[0].message
                parsed = [call.function.parsed_arguments for call in message.tool_calls or []] or [message.parsed]
                found |= {type(value) for value in parsed}
        assert found == {Point, Weather}

    run_virtual(main())
