"""Text completions field by field, and streams against whole answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.gateway.generating import closed
from tests.gateway.offered import ScriptedGenerator, make_gateway, offered

from midflight.errors import RequestRejected
from midflight.gateway.answers.answer import News
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.dialects.completions import CompletionExchange
from midflight.gateway.dialects.exchange import Reply
from midflight.gateway.sessions.request import Asked, CompletionCall
from midflight.testing.virtual_time import run_virtual
from midflight.text.formats import AssistantMessage
from midflight.types import Feature, Finish, FinishReason, Grammar, GrammarKind, Segment, Turn

TEXT: dict[str, Any] = {"model": "policy", "prompt": "ab"}


def call(**fields: object) -> CompletionCall:
    return CompletionExchange(json.dumps(TEXT | fields).encode()).call


ASKED: list[tuple[dict[str, Any], Asked]] = [
    ({"max_tokens": 5}, Asked(max_tokens=5)),
    ({"temperature": 0.3}, Asked(temperature=0.3)),
    ({"logprobs": 0}, Asked(top_logprobs=0)),
    ({"logprobs": 5}, Asked(top_logprobs=5)),
    ({"frequency_penalty": 1}, Asked(frequency_penalty=1)),
    ({"presence_penalty": 1}, Asked(presence_penalty=1)),
    ({"repetition_penalty": 2}, Asked(repetition_penalty=2)),
    ({"logit_bias": {"7": 1.5}}, Asked(logit_bias=((7, 1.5),))),
    ({"response_format": {"type": "json_object"}}, Asked(grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'))),
    ({"guided_regex": "a+"}, Asked(grammar=Grammar(GrammarKind.REGEX, "a+"))),
    ({"n": 2, "best_of": 2}, Asked()),
    ({"best_of": 1, "echo": False, "suffix": None, "user": "u"}, Asked()),
]


@pytest.mark.parametrize(("fields", "asked"), ASKED, ids=lambda value: "+".join(value) if isinstance(value, dict) else "")
def test_a_sampling_field_reaches_the_call(fields: dict[str, Any], asked: Asked) -> None:
    assert call(**fields).asked == asked


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"echo": True, "logprobs": 1}, "echo", "score no prompts"),
    ({"max_tokens": 0}, "max_tokens", "echo"),
    ({"max_tokens": 0}, "max_tokens", "send 1 or more"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"best_of": 3}, "best_of", "send n = 1"),
    ({"n": 2, "best_of": 3}, "best_of", "send n = 2"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"logprobs": True}, "logprobs", "True"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"prompt": [2**31]}, "prompt", "2147483648"),
    ({"prompt": ["a", [-1]]}, "prompt.1", "-1"),
    ({"prompt_embeds": "x"}, "prompt_embeds", "send text or token ids"),
    ({"prompt": ["a", []], "n": 1}, "prompt", "at least one token"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[f"{k}-{row[1]}" for k, row in enumerate(REFUSED)])
def test_a_fault_names_its_place_and_the_remedy(fields: dict[str, Any], param: str, words: str) -> None:
    gateway = make_gateway(ScriptedGenerator())
    with pytest.raises(RequestRejected) as caught:
        gateway.prepare(gateway.session_for(path_token=None, api_key=None), call(**fields))
    assert caught.value.param == param
    assert words in str(caught.value)


def answered(**fields: object) -> tuple[Any, list[Any]]:
    """The whole answer and the stream of a model that says "xyz", where 121 stood beside "A" and 122 beside another "z"."""
    exchange = CompletionExchange(json.dumps(TEXT | fields).encode())
    gateway = make_gateway(ScriptedGenerator(), limits=EngineLimits(256, 262, frozenset(Feature)))
    job = gateway.prepare(gateway.session_for(path_token=None, api_key=None), exchange.call)
    reply, prompt, ids, logprobs = Reply(job, "policy", 7, gateway.tokenizer), job.answers[0].prompt, (120, 121, 122), (-1.0, -2.0, -3.0)
    top = (((120, -1.0),), ((65, -0.5),), ((122, -3.0), (66, -4.0))) if exchange.call.asked.number("top_logprobs") else ()
    turn = Turn(prompt.ids, ids, logprobs, (Segment(0, 0, 0, 3),), Finish(FinishReason.STOP, "z"))
    deltas = [News(0, "x", ids[:1], logprobs[:1], (), top[:1]), News(0, "", ids[1:], logprobs[1:], (), top[1:])]
    answer = closed(job.answers[0], turn, message=AssistantMessage("xy"), tail="y", top_logprobs=top)
    frames = [
        *exchange.opening(reply),
        *(f for event in (*deltas, answer) for f in exchange.frames(reply, event)),
        *exchange.closing(reply, [answer]),
    ]
    return exchange.whole(reply, [answer]), frames


def test_alternatives_hold_the_sampled_token_too() -> None:
    whole, _ = answered(logprobs=2)
    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["x", "y", "z"],
        "token_logprobs": [-1.0, -2.0, -3.0],
        "top_logprobs": [{"x": -1.0}, {"A": -0.5, "y": -2.0}, {"z": -3.0, "B": -4.0}],
        "text_offset": [0, 1, 2],
    }
    assert answered(logprobs=0)[0]["choices"][0]["logprobs"]["top_logprobs"] is None
    assert answered()[0]["choices"][0]["logprobs"] is None
    named, _ = answered(logprobs=1, return_tokens_as_token_ids=True)
    assert named["choices"][0]["logprobs"]["tokens"] == ["token_id:120", "token_id:121", "token_id:122"]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_a_stream_joined_is_the_whole_answer(logprobs: int | None) -> None:
    whole, frames = answered(stream=True, logprobs=logprobs, return_token_ids=True, stream_options={"include_usage": True})
    choices, expected = [c for f in frames for c in f["choices"]], whole["choices"][0]
    assert "".join(c["text"] for c in choices) == expected["text"] == "xy"
    assert [i for c in choices for i in c["token_ids"]] == expected["token_ids"]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [v for c in choices if c["logprobs"] for v in c["logprobs"][name] or ()]
        assert joined == ((expected["logprobs"] or {}).get(name) or [])
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"], expected["stop_reason"]) == ("stop", "z", "z")
    assert frames[-1]["usage"] == whole["usage"] and frames[-1]["choices"] == [] and frames[0]["usage"] is None


def test_usage_may_come_with_every_frame() -> None:
    _, frames = answered(stream=True, stream_options={"continuous_usage_stats": True}, logprobs=0)
    assert [f["usage"]["total_tokens"] for f in frames] == [3, 5, 5]


def test_batches_times_n_are_numbered_prompt_by_prompt_and_stream_the_same() -> None:
    async def main() -> None:
        async with offered() as it:
            client = it.sdk()
            asked: dict[str, Any] = {"model": "policy", "prompt": ["ab", "c"], "n": 2, "max_tokens": 9, "seed": 3, "logprobs": 0}
            whole = await client.completions.create(**asked)
            stream = await client.completions.create(**asked, stream=True)
            frames = [c for f in [f async for f in stream] for c in f.choices]
            assert [c.index for c in whole.choices] == [0, 1, 2, 3]
            assert len({c.text for c in whole.choices}) == 4
            for choice in whole.choices:
                mine = [f for f in frames if f.index == choice.index]
                assert "".join(f.text for f in mine) == choice.text
                assert [t for f in mine if f.logprobs for t in f.logprobs.tokens] == choice.logprobs.tokens

    run_virtual(main())
