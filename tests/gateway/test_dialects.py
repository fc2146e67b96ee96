from __future__ import annotations

import json

import pytest

from midflight.errors import RequestRejected
from midflight.gateway.dialects.chat import ChatExchange
from midflight.gateway.dialects.completions import CompletionExchange
from midflight.gateway.dialects.native import NativeExchange
from midflight.gateway.sessions.request import Asked, Messages, Text, TokenIds

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "policy", "prompt": "hi"}
NATIVE = {"input_ids": [1, 2]}


def chat(**fields: object) -> ChatExchange:
    return ChatExchange(json.dumps(CHAT | fields).encode())


def test_every_sampling_field_reaches_the_call() -> None:
    exchange = chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, n=3, stop="x", seed=-1, min_tokens=1, ignore_eos=True, stop_token_ids=[4],
        max_completion_tokens=9, stream=True,
    )  # fmt: skip
    assert exchange.call.asked == Asked(
        max_tokens=9,
        min_tokens=1,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        stop=("x",),
        stop_token_ids=(4,),
        ignore_eos=True,
        seed=-1,
    )
    assert (exchange.call.n, exchange.call.stream, exchange.call.name_of("max_tokens")) == (3, True, "max_completion_tokens")


def test_nothing_asked_leaves_everything_to_the_session() -> None:
    assert chat().call.asked == Asked()
    assert chat(temperature=None, stop=None, tools=None, logit_bias=None).call.asked == Asked()


def test_harmless_and_neutral_fields_are_accepted() -> None:
    chat(
        user="me", metadata={"a": "b"}, store=True, stream_options={"include_usage": True}, parallel_tool_calls=True, tools=[],
        tool_choice="auto", frequency_penalty=0, presence_penalty=0.0, logit_bias={}, response_format={"type": "text"}, top_logprobs=0,
        top_k=-1, skip_special_tokens=True,
    )  # fmt: skip


def test_parts_of_text_are_joined_and_roles_are_those_templates_know() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts, "name": None}, {"role": "assistant", "content": None, "refusal": None}]
    (source,) = chat(messages=messages).call.sources
    assert source == Messages(({"role": "system", "content": "ab"}, {"role": "assistant", "content": ""}))


@pytest.mark.parametrize(
    ("prompt", "sources"),
    [
        ("a", (Text("a"),)),
        (["a", "b"], (Text("a"), Text("b"))),
        ([1, 2], (TokenIds((1, 2)),)),
        ([[1], [2, 3]], (TokenIds((1,)), TokenIds((2, 3)))),
    ],
)
def test_completions_take_texts_and_ids_one_or_many(prompt: object, sources: object) -> None:
    assert CompletionExchange(json.dumps(TEXT | {"prompt": prompt}).encode()).call.sources == sources


REFUSED = [
    (ChatExchange, CHAT | {"temperature": -0.1}, "temperature", "-0.1"),
    (ChatExchange, CHAT | {"temperature": "hot"}, "temperature", "hot"),
    (ChatExchange, CHAT | {"top_p": 0}, "top_p", "0"),
    (ChatExchange, CHAT | {"top_p": 1.5}, "top_p", "1.5"),
    (ChatExchange, CHAT | {"top_k": -2}, "top_k", "-2"),
    (ChatExchange, CHAT | {"min_p": 2}, "min_p", "2"),
    (ChatExchange, CHAT | {"n": 0}, "n", "0"),
    (ChatExchange, CHAT | {"max_tokens": 0}, "max_tokens", "0"),
    (ChatExchange, CHAT | {"max_tokens": 1.5}, "max_tokens", "1.5"),
    (ChatExchange, CHAT | {"seed": 2**64}, "seed", "18446744073709551616"),
    (ChatExchange, CHAT | {"stop": ["x"] * 17}, "stop", "17"),
    (ChatExchange, CHAT | {"stop": [""]}, "stop", "empty"),
    (ChatExchange, CHAT | {"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
    (ChatExchange, CHAT | {"logit_bias": {"1": 101}}, "logit_bias.1", "101"),
    (ChatExchange, CHAT | {"frequency_penalty": 2.5}, "frequency_penalty", "2.5"),
    (ChatExchange, CHAT | {"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    (ChatExchange, CHAT | {"top_logprobs": 3}, "top_logprobs", "without logprobs"),
    (ChatExchange, CHAT | {"temprature": 1}, "temprature", "Did you mean 'temperature'"),
    (ChatExchange, {"model": "policy"}, "messages", "missing"),
    (ChatExchange, {"messages": CHAT["messages"]}, "model", "missing"),
    (ChatExchange, CHAT | {"messages": []}, "messages", "[]"),
    (ChatExchange, CHAT | {"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "wizard"),
    (ChatExchange, CHAT | {"messages": [{"content": "x"}]}, "messages.0.role", "None"),
    (ChatExchange, CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0", "image_url"),
    (ChatExchange, CHAT | {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "5"),
    (ChatExchange, CHAT | {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function", "None"),
    (CompletionExchange, TEXT | {"suffix": "x"}, "suffix", "not supported"),
    (CompletionExchange, TEXT | {"best_of": 2}, "best_of", "not supported"),
    (CompletionExchange, TEXT | {"prompt": []}, "prompt", "[]"),
    (CompletionExchange, TEXT | {"prompt": None}, "prompt", "None"),
    (CompletionExchange, TEXT | {"prompt": [1, "a"]}, "prompt.0", "1"),
    (CompletionExchange, TEXT | {"prompt": [[1.5]]}, "prompt.0", "1.5"),
    (CompletionExchange, TEXT | {"logprobs": 21}, "logprobs", "21"),
    (NativeExchange, {}, "input_ids", "exactly one"),
    (NativeExchange, NATIVE | {"text": "a"}, "input_ids", "exactly one"),
    (NativeExchange, NATIVE | {"sampling_params": {"frequency_penalty": 3}}, "sampling_params.frequency_penalty", "3"),
    (NativeExchange, NATIVE | {"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens", "-1"),
    (NativeExchange, NATIVE | {"lora_path": "x"}, "lora_path", "weights are the run's"),
]


@pytest.mark.parametrize(("kind", "body", "param", "words"), REFUSED)
def test_a_fault_names_the_field_and_the_value(kind: type, body: object, param: str, words: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        kind(json.dumps(body).encode())
    assert caught.value.param == param
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"model": "policy", "prompt": "\\ud800"}', b'{"model":"p","prompt":NaN}']
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    for kind in (ChatExchange, CompletionExchange, NativeExchange):
        with pytest.raises(RequestRejected):
            kind(body)


def test_native_parameters_reach_the_call_under_their_own_names() -> None:
    params = {"max_new_tokens": 5, "min_new_tokens": 1, "temperature": 0.5, "top_k": -1, "stop": ["a"], "sampling_seed": 9, "n": 2}
    call = NativeExchange(json.dumps({"text": "hi", "rid": "r1", "sampling_params": params}).encode()).call
    assert call.asked == Asked(max_tokens=5, min_tokens=1, temperature=0.5, stop=("a",), seed=9)
    assert (call.n, call.request_id, call.may_abort, call.sources) == (2, "r1", True, (Text("hi"),))
