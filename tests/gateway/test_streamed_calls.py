"""Arguments of calls, streamed as they are written: over every dialect they add up to those of the whole answer."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from tests.gateway.offered import KEY
from tests.gateway.test_one_call import served

from midflight.gateway.answers.gateway import Gateway
from midflight.testing.script import Replies
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import SamplingParams

ARGUMENTS = ['{"city": "R\\u00f6me", "days": [1, 2.5, null]}', "{}"]
CALLS = "".join(f'\n<tool_call>\n{{"name": "weather", "arguments": {each}}}\n</tool_call>' for each in ARGUMENTS)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
    },
    "/responses": {"input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]},
    "/messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 400,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
    },
}


def heard(path: str, frames: list[Any]) -> list[list[str]]:
    """For each call its arguments in the parts in which they came."""
    calls: list[list[str]] = []
    for frame in frames:
        if path == "/chat/completions":
            for call in (frame["choices"][0]["delta"] if frame["choices"] else {}).get("tool_calls", []):
                calls += [[]] * (call["index"] == len(calls))
                calls[call["index"]] = [*calls[call["index"]], call["function"]["arguments"]]
        elif (frame.get("item") or frame.get("content_block") or {}).get("type") in ("function_call", "tool_use"):
            calls += [[]] * (not frame["type"].endswith("done"))
        elif frame["type"] == "response.function_call_arguments.delta":
            calls[-1].append(frame["delta"])
        elif frame["type"] == "content_block_delta" and frame["delta"]["type"] == "input_json_delta":
            calls[-1].append(frame["delta"]["partial_json"])
        elif frame["type"] == "response.function_call_arguments.done":
            assert "".join(calls[-1]) == frame["arguments"]
    return [[part for part in parts if part] for parts in calls]


def given(path: str, body: Any) -> list[Any]:
    """The arguments of a whole answer, as texts; as objects where the dialect has them so."""
    match path:
        case "/chat/completions":
            return [call["function"]["arguments"] for call in body["choices"][0]["message"]["tool_calls"]]
        case "/responses":
            return [item["arguments"] for item in body["output"] if item["type"] == "function_call"]
        case _:
            return [block["input"] for block in body["content"] if block["type"] == "tool_use"]


async def ask(gateway: Gateway, http: httpx2.AsyncClient, path: str, **fields: Any) -> httpx2.Response:
    handle = gateway.open(KEY, sampling=SamplingParams(max_tokens=400), tracked=True)
    answer = await http.post(f"{handle.base_url}{path}", json={"model": "policy", **BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    gateway.close(handle.session_id)
    return answer


def frames_of(answer: httpx2.Response) -> list[Any]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", BODIES)
def test_arguments_come_letter_by_letter_and_add_up_to_the_whole_whatever_interrupts_them(path: str) -> None:
    async def main() -> None:
        engine = ScriptedEngine(script=Replies({"hi": "Well." + CALLS}))
        for at in (30, 60, 61):
            engine.interrupt(at, "abort")
        async with served(engine) as (gateway, http):
            calls = heard(path, frames_of(await ask(gateway, http, path, stream=True)))
            whole = given(path, (await ask(gateway, http, path)).json())
        assert ["".join(parts) for parts in calls] == ARGUMENTS
        assert [each if isinstance(each, str) else json.dumps(each) for each in whole] == ARGUMENTS
        assert len(calls[0]) > 30

    run_virtual(main())


@pytest.mark.parametrize("path", BODIES)
def test_a_call_that_the_limit_cuts_off_is_told_so(path: str) -> None:
    limit = {"/responses": "max_output_tokens"}.get(path, "max_tokens")

    async def main() -> None:
        async with served(ScriptedEngine(script=Replies({"hi": CALLS}))) as (gateway, http):
            frames = frames_of(await ask(gateway, http, path, stream=True, **{limit: CALLS.index("f6me") + 2}))
        assert heard(path, frames) == [[*'{"city": "R', "\\u00f6"]]
        match path:
            case "/chat/completions":
                assert frames[-1]["choices"][0]["finish_reason"] == "length"
            case "/responses":
                assert frames[-1]["type"] == "response.incomplete"
                assert [item["status"] for item in frames[-1]["response"]["output"]] == ["incomplete"]
            case _:
                assert next(f for f in frames if f["type"] == "message_delta")["delta"]["stop_reason"] == "max_tokens"

    run_virtual(main())


def test_a_call_that_broke_off_may_be_sent_back() -> None:
    """A template that writes it otherwise begins a branch; each token is still trained in one place."""
    reply = '<tool_call>{"name": "weather", "arguments": {"city": oh}'

    async def main() -> None:
        async with served(ScriptedEngine(script=Replies({"hi": reply, "what": "ok"}))) as (gateway, http):
            handle = gateway.open(KEY, sampling=SamplingParams(max_tokens=400), tracked=True)
            asked = {"model": "policy", **BODIES["/chat/completions"]}
            frames = frames_of(await http.post(f"{handle.base_url}/chat/completions", json={**asked, "stream": True}))
            assert heard("/chat/completions", frames) == [list('{"city": ')]
            said = "".join(frame["choices"][0]["delta"].get("content") or "" for frame in frames)
            call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
            back = [*asked["messages"], {"role": "assistant", "content": said, "tool_calls": [call]}]
            answer = await http.post(
                f"{handle.base_url}/chat/completions",
                json={**asked, "messages": [*back, {"role": "tool", "tool_call_id": "c", "content": "what?"}]},
            )
            assert answer.json()["choices"][0]["message"]["content"] == "ok"
            record = gateway.close(handle.session_id)
            assert said == "oh}" and sum(row.num_trainable for row in record.rows) == len(reply) + len("ok") + 2

    run_virtual(main())
