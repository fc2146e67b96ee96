"""What is refused is named as the client named it, whichever dialect it speaks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace
from tests.gateway.offered import ScriptedGenerator, offered

from midflight.errors import RequestRejected
from midflight.gateway.answers.plan import EngineLimits, params_for
from midflight.gateway.dialects.chat import ChatExchange
from midflight.gateway.dialects.completions import CompletionExchange
from midflight.gateway.dialects.contents import ContentsExchange
from midflight.gateway.dialects.exchange import Exchange
from midflight.gateway.dialects.messages import MessagesExchange
from midflight.gateway.dialects.native import NativeExchange
from midflight.gateway.dialects.responses import ResponsesExchange
from midflight.gateway.sessions.request import CompletionCall
from midflight.testing.virtual_time import run_virtual
from midflight.types import Feature, Grammar, GrammarKind

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object"}
FUNCTION = {"name": "f", "parameters": SCHEMA}
FORM = {"type": "json_schema", "schema": SCHEMA}

DIALECTS: dict[str, tuple[type, dict[str, Any]]] = {
    "chat": (ChatExchange, {"model": "m", "messages": HI}),
    "completions": (CompletionExchange, {"model": "m", "prompt": "hi"}),
    "responses": (ResponsesExchange, {"model": "m", "input": "hi"}),
    "messages": (MessagesExchange, {"model": "m", "messages": HI, "max_tokens": 8}),
    "contents": (ContentsExchange, {"contents": [{"parts": [{"text": "hi"}]}]}),
    "native": (NativeExchange, {"text": "hi"}),
}
_DECLARED = {"tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": SCHEMA}]}]}
_OPENAI = [
    ({"frequency_penalty": 1}, "frequency_penalty"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"logit_bias": {"1": 1}}, "logit_bias"),
    ({"guided_json": SCHEMA}, "guided_json"),
    ({"guided_regex": "a"}, "guided_regex"),
    ({"guided_choice": ["a"]}, "guided_choice"),
    ({"guided_grammar": 'start: "a"'}, "guided_grammar"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"stop_token_ids": [99]}, "stop_token_ids"),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (dialect, fields, param) for dialect in ("chat", "completions", "responses") for fields, param in _OPENAI
    ),
    ("chat", {"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat", {"response_format": {"type": "text"}, "guided_regex": "a"}, "guided_regex"),
    ("chat", {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ("chat", {"tools": [{"type": "function", "function": FUNCTION}], "guided_regex": "a"}, "guided_regex"),
    ("chat", {"max_tokens": 40}, "max_tokens"),
    ("chat", {"max_completion_tokens": 40}, "max_completion_tokens"),
    ("chat", {"max_completion_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ("completions", {"logprobs": 2}, "logprobs"),
    ("completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("completions", {"max_tokens": 40}, "max_tokens"),
    ("responses", {"top_logprobs": 2}, "top_logprobs"),
    ("responses", {"text": {"format": {"type": "json_object"}}}, "text.format"),
    ("responses", {"max_output_tokens": 40}, "max_output_tokens"),
    ("messages", {"output_config": {"format": FORM}}, "output_config.format"),
    ("messages", {"output_format": FORM}, "output_format"),
    ("messages", {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}, "tool_choice"),
    ("messages", {"max_tokens": 40}, "max_tokens"),
    ("messages", {"min_tokens": 9}, "min_tokens"),
    ("contents", {**_DECLARED, "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig.mode"),
    *(
        ("contents", {"generationConfig": fields}, f"generationConfig.{name}")
        for fields, name in [
            ({"frequencyPenalty": 1}, "frequencyPenalty"),
            ({"presence_penalty": 1}, "presencePenalty"),
            ({"responseMimeType": "application/json"}, "responseMimeType"),
            ({"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT"}}, "responseSchema"),
            ({"responseMimeType": "application/json", "response_json_schema": SCHEMA}, "responseJsonSchema"),
            ({"responseLogprobs": True, "logprobs": 2}, "logprobs"),
            ({"maxOutputTokens": 40}, "maxOutputTokens"),
            ({"stopSequences": ["a"] * 17}, "stopSequences"),
        ]
    ),
    ("native", {"return_logprob": True, "top_logprobs_num": 2}, "top_logprobs_num"),
    *(
        ("native", {"sampling_params": fields}, f"sampling_params.{name}")
        for fields, name in [
            ({"frequency_penalty": 1}, "frequency_penalty"),
            ({"presence_penalty": 1}, "presence_penalty"),
            ({"repetition_penalty": 1.1}, "repetition_penalty"),
            ({"logit_bias": {"1": 1}}, "logit_bias"),
            ({"json_schema": SCHEMA}, "json_schema"),
            ({"regex": "a"}, "regex"),
            ({"ebnf": 'start: "a"'}, "ebnf"),
            ({"stop_token_ids": [99]}, "stop_token_ids"),
            ({"stop": ["a"] * 17}, "stop"),
            ({"stop": ""}, "stop"),
            ({"max_new_tokens": 40}, "max_new_tokens"),
            ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "fields", "param"), REFUSED)
def test_what_cannot_be_done_is_refused_by_the_clients_own_name(dialect: str, fields: dict[str, Any], param: str) -> None:
    """By engines that can do nothing special, with 30 tokens of room and 99 ids."""
    kind, body = DIALECTS[dialect]
    with pytest.raises(RequestRejected) as caught:
        exchange: Exchange = kind(json.dumps(body | fields).encode())
        call = exchange.call
        if call.tool_choice == "required" and call.asked.grammar is None:  # the gateway's grammar of the call that must come
            call = _forced(call)
        params_for(call, 10, defaults=None, limits=EngineLimits(max_context=40, vocab_size=99), strict=True)
    assert caught.value.param == param
    if "max" not in param.lower():
        assert str(caught.value).startswith(param)


WEATHER = {"type": "function", "function": FUNCTION}
REFUSED_BY_ENGINES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": HI, "response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/chat/completions", {"messages": HI, "tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
    ("/v1/completions", {"prompt": "hi", "guided_regex": "a"}, "guided_regex"),
    ("/v1/completions", {"prompt": "hi", "guided_regex": "a", "n": 2}, "guided_regex"),
    ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_object"}}}, "text.format"),
    ("/generate", {"text": "hi", "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED_BY_ENGINES)
def test_a_grammar_that_an_engine_refuses_is_named_as_the_client_named_it(path: str, fields: dict[str, Any], param: str) -> None:
    """Engines know it as `grammar`."""

    async def main() -> None:
        refusing = ScriptedGenerator(error=RequestRejected("constraining the answer: no.", param="grammar"))
        async with offered(refusing, limits=EngineLimits(max_context=256, vocab_size=262, features=frozenset(Feature))) as it:
            answer = await it.http.post(path, json=fields if path == "/generate" else {"model": "policy", **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    run_virtual(main)


def _forced(call: CompletionCall) -> CompletionCall:
    return replace(call, asked=call.asked.constrained(Grammar(GrammarKind.REGEX, "a")))
