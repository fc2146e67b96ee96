"""The native dialect field by field, and streams against whole answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.gateway.offered import ScriptedGenerator, make_gateway, offered

from midflight.errors import RequestRejected
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.dialects.exchange import Reply
from midflight.gateway.dialects.native import NativeExchange
from midflight.gateway.sessions.request import Asked, CompletionCall, Text, TokenIds
from midflight.testing.virtual_time import run_virtual
from midflight.types import Chunk, Feature, Finish, FinishReason, Grammar, GrammarKind, Segment, Turn

NATIVE: dict[str, Any] = {"input_ids": [1, 2]}


def call(**fields: object) -> CompletionCall:
    return NativeExchange(json.dumps(NATIVE | fields).encode()).call


ASKED: list[tuple[dict[str, Any], Asked]] = [
    ({"max_new_tokens": 5}, Asked(max_tokens=5)),
    ({"min_new_tokens": 5}, Asked(min_tokens=5)),
    ({"temperature": 0}, Asked(temperature=0)),
    ({"top_p": 0.5}, Asked(top_p=0.5)),
    ({"top_k": -1}, Asked()),
    ({"min_p": 0.5}, Asked(min_p=0.5)),
    ({"stop": "a"}, Asked(stop=("a",))),
    ({"stop_token_ids": [3]}, Asked(stop_token_ids=(3,))),
    ({"ignore_eos": True}, Asked(ignore_eos=True)),
    ({"sampling_seed": 3}, Asked(seed=3)),
    ({"frequency_penalty": 0.5}, Asked(frequency_penalty=0.5)),
    ({"presence_penalty": 0.5}, Asked(presence_penalty=0.5)),
    ({"repetition_penalty": 1.5}, Asked(repetition_penalty=1.5)),
    ({"logit_bias": {"4": -1}}, Asked(logit_bias=((4, -1),))),
    ({"json_schema": '{"type": "null"}'}, Asked(grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type":"null"}'))),
    ({"json_schema": {"type": "null"}}, Asked(grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type":"null"}'))),
    ({"regex": "a+"}, Asked(grammar=Grammar(GrammarKind.REGEX, "a+"))),
    ({"ebnf": 'start: "a"'}, Asked(grammar=Grammar(GrammarKind.LARK, 'start: "a"'))),
    ({"no_stop_trim": False, "skip_special_tokens": True, "spaces_between_special_tokens": True}, Asked()),
]


@pytest.mark.parametrize(("params", "asked"), ASKED, ids=lambda value: "+".join(value) if isinstance(value, dict) else "")
def test_a_sampling_parameter_reaches_the_call(params: dict[str, Any], asked: Asked) -> None:
    assert call(sampling_params=params).asked == asked


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"sampling_params": [{"top_p": 1}, {"top_p": 0.5}]}, "sampling_params", "requests of their own"),
    ({"rid": ["a", "b"]}, "rid", "requests of their own"),
    ({"return_logprob": [True]}, "return_logprob", "requests of their own"),
    ({"top_logprobs_num": [1]}, "top_logprobs_num", "requests of their own"),
    ({"top_logprobs_num": 1}, "top_logprobs_num", "send return_logprob true"),
    ({"top_logprobs_num": 21, "return_logprob": True}, "top_logprobs_num", "20"),
    ({"logprob_start_len": -2}, "logprob_start_len", "-2"),
    ({"rid": ""}, "rid", "''"),
    ({"sampling_params": {"stop": 3}}, "sampling_params.stop", "3"),
    ({"sampling_params": {"regex": "a", "ebnf": "start: A"}}, "sampling_params.ebnf", "sampling_params.regex and sampling_params.ebnf"),
    ({"sampling_params": {"ebnf": "root ::= A"}}, "sampling_params.ebnf", "Lark"),
    ({"sampling_params": {"json_schema": "3"}}, "sampling_params.json_schema", "3"),
    ({"sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex", "'a'"),
    ({"sampling_params": {"temperature": 1e-5}}, "sampling_params.temperature", "send 0"),
    ({"sampling_params": {"temperature": 1001}}, "sampling_params.temperature", "1000"),
    ({"sampling_params": {"top_k": 2**31}}, "sampling_params.top_k", "2147483648"),
    ({"input_ids": [10**40]}, "input_ids", "1000"),
    ({"image_data": "x"}, "image_data", "reads text"),
    ({"input_ids": [[1], [1.5]]}, "input_ids.1", "1.5"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[f"{k}-{row[1]}" for k, row in enumerate(REFUSED)])
def test_a_fault_names_its_place_and_the_remedy(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        call(**fields)
    assert caught.value.param == param
    assert words in str(caught.value)


def test_batches_are_texts_or_ids() -> None:
    assert call(input_ids=[[1], [2, 3]]).sources == (TokenIds((1,)), TokenIds((2, 3)))
    assert call(input_ids=None, text=["a", "b"]).sources == (Text("a"), Text("b"))


def answered(**fields: object) -> tuple[Any, list[Any]]:
    """The whole answer and the stream of a model that says "xy", where 121 stood beside "A"."""
    exchange = NativeExchange(json.dumps(NATIVE | {"sampling_params": {"stop": "yz"}} | fields).encode())
    gateway = make_gateway(ScriptedGenerator(), limits=EngineLimits(256, 262, frozenset(Feature)))
    job = gateway.prepare(gateway.session_for(path_token=None, api_key=None), exchange.call)
    reply, prompt, ids, logprobs = Reply(job, "policy", 7, gateway.tokenizer), job.answers[0].prompt, (120, 121), (-1.0, -2.0)
    top = (((120, -1.0),), ((65, -0.5), (121, -2.0))) if exchange.call.asked.number("top_logprobs") else ()
    turn = Turn(prompt.ids, ids, logprobs, (Segment(0, 0, 0, 2),), Finish(FinishReason.LENGTH))
    (answer,), frames = job.answers, []
    for place, finish in enumerate((None, turn.finish)):
        mark, end = answer.mark, place + 1
        answer.accept(Chunk(ids[place:end], logprobs[place:end], 0, 0, finish, top[place:end]), vocab_size=262)
        frames += exchange.frames(reply, answer.since(mark))
    assert answer.close() == turn
    return exchange.whole(reply, [answer]), [*frames, *exchange.frames(reply, answer)]


def test_alternatives_are_triples_with_text_where_it_is_wanted() -> None:
    meta = answered(return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True)[0]["meta_info"]
    assert meta["output_token_logprobs"] == [[-1.0, 120, "x"], [-2.0, 121, "y"]]
    assert meta["output_top_logprobs"] == [[[-1.0, 120, "x"]], [[-0.5, 65, "A"], [-2.0, 121, "y"]]]
    meta = answered(return_logprob=True)[0]["meta_info"]
    assert meta["output_token_logprobs"] == [[-1.0, 120, None], [-2.0, 121, None]]
    assert "output_top_logprobs" not in meta and "output_token_logprobs" not in answered()[0]["meta_info"]


def test_every_frame_says_all_so_far_and_the_last_is_the_whole_answer() -> None:
    whole, frames = answered(stream=True, return_logprob=True, top_logprobs_num=1)
    assert frames[-1] == whole
    assert [(f["text"], f["output_ids"]) for f in frames] == [("x", [120]), ("x", [120, 121]), ("xy", [120, 121])]
    assert [len(f["meta_info"]["output_top_logprobs"]) for f in frames] == [1, 2, 2]
    assert [f["meta_info"]["finish_reason"] for f in frames[:-1]] == [None, None]


def test_a_batch_with_a_name_has_a_name_for_each_answer() -> None:
    async def main() -> None:
        async with offered() as it:
            body = {"input_ids": [[1], [2]], "rid": "r", "sampling_params": {"max_new_tokens": 2}}
            answers = (await it.http.post("/generate", json=body)).json()
            assert [a["meta_info"]["id"] for a in answers] == ["r-0", "r-1"]
            assert len({r.request_id for r in it.generator.requests}) == 2

    run_virtual(main())
