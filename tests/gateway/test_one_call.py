"""`parallel_tool_calls` off: the answer ends with its first call, so that nothing the model said is hidden from the agent."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest
from tests.gateway.offered import KEY
from tests.gateway.test_unbroken import served
from tests.text.written import CLOCK, CODER, LLAMA, MISTRAL, MISTRAL_NAMED, QWEN, WEATHER, model

from midflight.gateway.answers.answer import Answer, ChatReading
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.sessions.tree import TokenTree
from midflight.testing.script import Replies
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.text import Tokenizer
from midflight.text.formats import MessageFormat
from midflight.types import Chunk, Finish, FinishReason, GenerateRequest, Json, Reason, SamplingParams

HI = {"role": "user", "content": "hi"}
FIRST = '<tool_call>\n{"name": "clock",  "arguments": {"at":1}}\n</tool_call>'
SECOND = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'

ASSISTANT = "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
FORMATS: dict[str, tuple[Tokenizer, str, str]] = {
    "hermes": (model(QWEN), FIRST, SECOND),
    "llama3": (model(LLAMA + ASSISTANT), '{"name": "clock", "parameters": {"at": 1}};', ' {"name": "weather", "parameters": {}}'),
    "mistral": (model(MISTRAL), '[TOOL_CALLS][{"name": "clock", "arguments": {"at": 1}},', ' {"name": "clock", "arguments": {}}]'),
    "mistral_named": (model(MISTRAL_NAMED), '[THINK][/THINK][TOOL_CALLS]clock[ARGS]{"at": 1}', "[TOOL_CALLS]clock[ARGS]{}"),
    "qwen_coder": (model(CODER), "<tool_call>\n<function=clock>\n</function>\n</tool_call>", "\n<tool_call>\n<function=clock>"),
}
"""For each format a tokenizer, the text up to where the first of two calls is known to be one, and what the model said after it."""


def reading(tokenizer: Tokenizer, name: str) -> tuple[TokenTree, Answer]:
    tree = TokenTree(tokenizer)
    prompt = tree.plan_chat([HI], tools=[WEATHER, CLOCK])
    form = MessageFormat(tokenizer, tools=name.removesuffix("_named"))
    request = GenerateRequest("r", prompt.ids, len(prompt.ids), SamplingParams(max_tokens=500))
    parser = form.parser(prompt.text, calls=True, tools=[WEATHER, CLOCK])
    return tree, Answer(request, prompt, tokenizer, chat=ChatReading(parser, form.kept_token_ids, one_call=True))


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_in_every_format_the_turn_is_what_the_agent_was_given_and_its_next_request_goes_on_from_it(name: str, size: int) -> None:
    tokenizer, said, hidden = FORMATS[name]
    tree, answer = reading(tokenizer, name)
    ids = tokenizer.encode(said + hidden)
    for start in range(0, len(ids), size):
        answer.accept(Chunk(part := ids[start : start + size], (-1.0,) * len(part), 0, 0), vocab_size=2**31)
        if answer.finish is not None:
            break
    turn = answer.close()
    assert (tokenizer.decode(turn.output_ids), turn.finish) == (said, Finish(FinishReason.STOP))
    assert turn.num_overshoot == min(len(ids), (len(said) // size + 1) * size) - len(said), "the rest of its chunk"
    assert [call.name for call in answer.message.tool_calls] == ["clock"] and answer.message.content == ""
    tree.record(answer.prompt, turn, reply=answer.text, request=1, message=answer.message)
    call: Json = {"id": "c", "function": {"name": "clock", "arguments": json.loads(answer.message.tool_calls[0].arguments)}}
    second = tree.plan_chat([HI, {"role": "assistant", "content": "", "tool_calls": [call]}, HI], tools=[WEATHER, CLOCK])
    assert second.parent is tree.nodes[0] and not second.rewritten


async def conversation(gateway: Gateway, http: httpx2.AsyncClient, dialect: str, *, stream: bool) -> tuple[Any, Any]:
    """Two requests of one agent, which sends the call back as it was given: what it was given, and the session's record."""
    handle = gateway.open(KEY, sampling=SamplingParams(max_tokens=300), tracked=True)
    sdk = openai.AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key, http_client=http, max_retries=0)
    tool: dict[str, Any] = {"name": "clock", "parameters": {"type": "object"}}
    if dialect == "responses":
        asked: dict[str, Any] = {"model": "policy", "tools": [{"type": "function", **tool}], "parallel_tool_calls": False}
        if stream:
            output = [event async for event in await sdk.responses.create(**asked, input=[HI], stream=True)][-1].response.output
        else:
            output = (await sdk.responses.create(**asked, input=[HI])).output
        given = [(item.name, item.arguments) for item in output]
        back = [HI, *output, {"type": "function_call_output", "call_id": output[0].call_id, "output": "noon"}]
        last = (await sdk.responses.create(**asked, input=back)).output_text
    else:
        asked = {"model": "policy", "tools": [{"type": "function", "function": tool}], "parallel_tool_calls": False}
        if stream:
            async with sdk.chat.completions.stream(**asked, messages=[HI]) as frames:
                message = (await frames.get_final_completion()).choices[0].message
        else:
            message = (await sdk.chat.completions.create(**asked, messages=[HI])).choices[0].message
        given = [(call.function.name, call.function.arguments) for call in message.tool_calls]
        back = [HI, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noon"}]
        last = (await sdk.chat.completions.create(**asked, messages=back)).choices[0].message.content
    assert last == "It is noon."
    return given, gateway.close(handle.session_id)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
@pytest.mark.parametrize("more", ["", SECOND, " and so on"])
def test_interrupted_or_not_one_call_is_given_and_one_branch_is_recorded(dialect: str, stream: bool, more: str) -> None:
    """I3, I5: aborts before, within and just after the call, and a death, change no token; what the model said beyond it is overshoot."""

    async def main() -> None:
        rows = []
        for places in ([], [5, 30, len(FIRST) - 1], [len(FIRST), len(FIRST) + 1]):
            engine = ScriptedEngine(script=Replies({"hi": FIRST + more, "noon": "It is noon."}))
            for at in places:
                engine.interrupt(at, "abort")
            async with served(engine) as (gateway, http):
                given, record = await conversation(gateway, http, dialect, stream=stream)
            assert given == [("clock", '{"at":1}')]
            assert (len(record.rows), record.num_branches, record.num_rewritten) == (1, 0, 0)
            assert (record.dropped.get(Reason.OVERSHOOT, 0) > 0) is bool(more)
            (row,) = record.rows
            rows.append((row.token_ids.tolist(), row.loss_mask.tolist()))
            ends = 2 if not more else 1  # of turn, said by the model itself
            assert row.num_trainable == len(FIRST) + len("It is noon.") + ends
        assert rows[0] == rows[1] == rows[2]

    run_virtual(main())
