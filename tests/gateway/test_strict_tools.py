"""Tools that are strict under `tool_choice: auto`: the model is free to call them, and their arguments follow the schema; or the answer's head says no."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tests.gateway.offered import DEFAULTS, KEY, ScriptedGenerator, offered
from tests.gateway.test_format_with_tools import said

from midflight.engines.embedded.grammar import Grammars
from midflight.gateway.answers.plan import EngineLimits
from midflight.testing.virtual_time import run_virtual
from midflight.types import Feature, Finish, FinishReason, GenerateRequest, Kind, RolloutKey

HI = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}
ALL = EngineLimits(max_context=4000, vocab_size=262, features=frozenset(Feature))
STRICT: dict[str, Any] = {"name": "weather", "strict": True}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "tools": [{"type": "function", "function": STRICT | {"parameters": CITY}}]},
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", **STRICT, "parameters": CITY}]},
    "/v1/messages": {"messages": HI, "max_tokens": 500, "tools": [STRICT | {"input_schema": CITY}]},
}
BEGUN = 'Well.\n<tool_call>\n{"name": "weather", "arguments": {'


class Wanderer(ScriptedGenerator):
    """Begins a call half of the time, and goes on at random with what the grammar allows; without one it says nonsense."""

    def answer(self, request: GenerateRequest) -> tuple[tuple[int, ...], tuple[float, ...], Finish]:
        rng = random.Random(len(self.requests))
        grammar = request.sampling.grammar
        ids = list(self.tokenizer.encode(BEGUN if rng.random() < 0.7 else "No"))
        if grammar is None:
            ids += self.tokenizer.encode('"town": 5}}\n</tool_call><|end|>')
        else:
            constraint = Grammars(self.tokenizer, vocab_size=262).constraint(grammar, ids)
            while not constraint.ended:
                allowed = constraint.allowed().nonzero()[0].tolist()
                ends = [i for i in allowed if i in self.tokenizer.eos_token_ids]
                ids.append(ends[0] if ends else rng.choice(allowed))
                constraint.advance(ids[-1:])
        return tuple(ids), (-0.5,) * len(ids), Finish(FinishReason.STOP, ids[-1])


@pytest.mark.parametrize("path", REQUESTS)
def test_a_model_that_is_free_to_call_calls_with_arguments_of_the_schema(path: str) -> None:
    async def main() -> None:
        async with offered(Wanderer(), limits=ALL) as it:
            called = []
            for _ in range(8):
                answer = await it.http.post(path, json={"model": "policy", **REQUESTS[path]})
                assert answer.status_code == 200 and "x-midflight-ignored" not in answer.headers, answer.text
                calls, content = said(path, answer.json())
                assert content == ("Well." if calls else "No")
                called += calls
            assert called and all(name == "weather" and given in ({"city": "Rome"}, {"city": "Oslo"}) for name, given in called)

    run_virtual(main())


@pytest.mark.parametrize("path", REQUESTS)
def test_where_calls_cannot_be_held_to_their_schema_the_head_says_so_and_a_strict_gateway_refuses(path: str) -> None:
    """An engine without grammars, and a session that is trained: a turn under a grammar would not be the policy's."""

    async def main() -> None:
        for limits, key, strict in [
            (EngineLimits(4000, 262), None, False),
            (ALL, KEY, False),
            (ALL, KEY, True),
            (ALL, RolloutKey(KEY.group, KEY.sample, Kind.EVALUATION), True),
        ]:
            async with offered(Wanderer(), limits=limits, strict=strict) as it:
                prefix = "" if key is None else it.gateway.open(key, sampling=DEFAULTS.changed(max_tokens=200), tracked=True).base_url[:-3]
                answer = await it.http.post(f"{prefix}{path}", json={"model": "policy", **REQUESTS[path]})
                (request,) = it.generator.requests or [None]
                if not strict:
                    assert (answer.status_code, answer.headers["x-midflight-ignored"]) == (200, "tools.strict")
                    assert request.sampling.grammar is None
                elif key is KEY:
                    assert answer.status_code == 400 and "tools.strict" in json.dumps(answer.json())
                else:
                    assert answer.status_code == 200 and request.sampling.grammar is not None

    run_virtual(main())


def test_a_tool_that_is_not_strict_is_called_freely() -> None:
    async def main() -> None:
        async with offered(Wanderer(), limits=ALL) as it:
            tool = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": False}}
            answer = await it.http.post("/v1/chat/completions", json={"model": "policy", "messages": HI, "tools": [tool]})
            assert it.generator.requests[0].sampling.grammar is None and "x-midflight-ignored" not in answer.headers

    run_virtual(main())
