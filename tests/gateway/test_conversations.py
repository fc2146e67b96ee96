"""What a session keeps by id, through the methods of the SDK: streams of kept responses, items of conversations, counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from tests.gateway.offered import DEFAULTS, KEY, Offered, ScriptedGenerator, offered

from midflight.gateway.answers.plan import EngineLimits
from midflight.testing.script import scripted_tokenizer
from midflight.testing.virtual_time import run_virtual
from midflight.text.formats import MessageFormat

TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"type": "custom", "name": "shell"},
]
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CUSTOM = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls -l"}}\n</tool_call>'
EOS = "<|end|>"


@asynccontextmanager
async def agent(*texts: str) -> AsyncIterator[tuple[openai.AsyncOpenAI, Offered]]:
    """The SDK in a session whose model thinks, and says these texts."""
    thinks = MessageFormat(scripted_tokenizer(), reasoning="think")
    limits = EngineLimits(max_context=4096, vocab_size=262)
    async with offered(ScriptedGenerator(texts=[text + EOS for text in texts]), message_format=thinks, limits=limits) as it:
        session = it.gateway.open(KEY, sampling=DEFAULTS.changed(max_tokens=160), tracked=True)
        yield it.sdk(base_url=f"http://memory/s/{session.api_key}/v1"), it


def plain(events: list[Any]) -> list[Any]:
    return [event.to_dict() for event in events]


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("hello you", None),
        ("<think>\nso\n</think>\n\nWell." + CALLED + "\n" + CUSTOM, None),
        ("Well." + CALLED, 50),
        ("", None),
    ],
)
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_kept_response_is_streamed_again_in_the_events_that_it_came_in(text: str, limit: int | None, logprobs: bool) -> None:
    async def main() -> None:
        async with agent(text) as (ai, _):
            more: dict[str, Any] = {"include": ["message.output_text.logprobs"]} if logprobs else {}
            if limit is not None:
                more["max_output_tokens"] = limit
            stream = await ai.responses.create(
                model="policy", input="hi", tools=TOOLS, stream=True, extra_body={"return_token_ids": True}, **more
            )
            first = plain([event async for event in stream])
            name = first[0]["response"]["id"]
            again = plain([event async for event in await ai.responses.retrieve(name, stream=True)])
            if logprobs:  # they come with the first text, and not with each
                assert [event["type"] for event in again] == [event["type"] for event in first] and again[-1] == first[-1]
                return
            assert again == first
            rest = plain([event async for event in await ai.responses.retrieve(name, stream=True, starting_after=3)])
            assert rest == first[4:]
            assert (await ai.responses.retrieve(name)).to_dict() == first[-1]["response"]

    run_virtual(main())


def test_a_response_that_was_sent_whole_is_streamed_too() -> None:
    async def main() -> None:
        async with agent("Well." + CALLED) as (ai, _):
            whole = await ai.responses.create(model="policy", input="hi", tools=TOOLS)
            events = plain([event async for event in await ai.responses.retrieve(whole.id, stream=True)])
            assert events[-1]["response"] == whole.to_dict()
            assert [event["delta"] for event in events if event["type"].endswith(".delta")] == ["Well.", '{"city": "Rome"}']

    run_virtual(main())


@pytest.mark.parametrize(
    "asked", [{"stream": "yes"}, {"stream": "true", "starting_after": "-1"}, {"stream": "true", "starting_after": "x"}]
)
def test_a_stream_that_is_asked_for_in_other_words_is_refused(asked: dict[str, str]) -> None:
    async def main() -> None:
        async with agent("hi") as (ai, it):
            whole = await ai.responses.create(model="policy", input="hi")
            answer = await it.http.get(f"{str(ai.base_url).rstrip('/')}/responses/{whole.id}", params=asked)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == list(asked)[-1]

    run_virtual(main())


def test_nothing_is_made_in_the_background_so_nothing_can_be_cancelled() -> None:
    async def main() -> None:
        async with agent("hi") as (ai, _):
            whole = await ai.responses.create(model="policy", input="hi")
            with pytest.raises(openai.BadRequestError, match="the response is complete"):
                await ai.responses.cancel(whole.id)
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                await ai.responses.cancel("resp_none")

    run_virtual(main())


def test_the_tokens_of_a_response_are_counted_as_it_would_read_them() -> None:
    async def main() -> None:
        async with agent("hello", "two", "three") as (ai, it):
            asked: dict[str, Any] = {"instructions": "Be short.", "input": "hi", "tools": TOOLS}
            told = await ai.responses.input_tokens.count(model="policy", **asked)
            first = await ai.responses.create(model="policy", **asked)
            assert first.usage is not None and told.input_tokens == first.usage.input_tokens
            told = await ai.responses.input_tokens.count(previous_response_id=first.id, input="and?")
            second = await ai.responses.create(model="policy", previous_response_id=first.id, input="and?")
            assert second.usage is not None and told.input_tokens == second.usage.input_tokens
            assert len(it.generator.requests) == 2
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await ai.responses.input_tokens.count(model="other", input="hi")
            with pytest.raises(openai.BadRequestError, match="input is missing"):
                await ai.responses.input_tokens.count(model="policy")

    run_virtual(main())


def test_a_template_of_the_vendors_is_refused_by_its_own_name() -> None:
    async def main() -> None:
        async with agent() as (ai, _):
            with pytest.raises(openai.BadRequestError, match="no templates are kept here") as caught:
                await ai.responses.create(model="policy", prompt={"id": "pmpt_1"})
            assert caught.value.param == "prompt"
            with pytest.raises(openai.BadRequestError, match="input is missing: send it") as caught:
                await ai.responses.create(model="policy")
            assert caught.value.param == "input"

    run_virtual(main())


def test_items_of_a_conversation_are_listed_added_found_and_removed() -> None:
    async def main() -> None:
        async with agent("<think>\nso\n</think>\n\nWell." + CALLED, "It is sunny.") as (ai, _):
            begun = await ai.conversations.create(items=[{"role": "user", "content": "hi"}], metadata={"a": "1"})
            named = await ai.conversations.update(begun.id, metadata={"b": "2"})
            assert named.metadata == {"b": "2"} and (await ai.conversations.retrieve(begun.id)).metadata == {"b": "2"}

            first = await ai.responses.create(model="policy", conversation=begun.id, input="weather?", tools=TOOLS)
            call = next(item for item in first.output if item.type == "function_call")
            added = await ai.conversations.items.create(
                begun.id, items=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
            )
            assert [item.type for item in added.data] == ["function_call_output"]
            items = [item async for item in ai.conversations.items.list(begun.id, order="asc", limit=2)]
            kinds = ["message", "message", "reasoning", "message", "function_call", "function_call_output"]
            assert [item.type for item in items] == kinds and items[-1].id == added.data[0].id
            assert (await ai.conversations.items.retrieve(items[4].id, conversation_id=begun.id)).to_dict() == items[4].to_dict()

            second = await ai.responses.create(model="policy", conversation=begun.id, tools=TOOLS)
            assert second.output_text == "It is sunny.", "without an input it goes on from the items"
            left = await ai.conversations.items.delete(items[2].id, conversation_id=begun.id)
            assert left.id == begun.id
            after = [item async for item in ai.conversations.items.list(begun.id, order="asc")]
            assert [item.id for item in after][:5] == [item.id for item in items if item.id != items[2].id]
            assert [item.type for item in after] == [*kinds[:2], *kinds[3:], "message"]
            with pytest.raises(openai.NotFoundError, match="has no item"):
                await ai.conversations.items.retrieve(items[2].id, conversation_id=begun.id)

    run_virtual(main())


def test_two_equal_items_are_two() -> None:
    async def main() -> None:
        async with agent() as (ai, _):
            begun = await ai.conversations.create(items=[{"role": "user", "content": "ok"}, {"role": "user", "content": "ok"}])
            one, two = [item async for item in ai.conversations.items.list(begun.id, order="asc")]
            await ai.conversations.items.delete(str(one.id), conversation_id=begun.id)
            await ai.conversations.items.delete(str(two.id), conversation_id=begun.id)
            assert [item async for item in ai.conversations.items.list(begun.id)] == []

    run_virtual(main())


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "items"),
        ([{"role": "user", "content": "x"}] * 21, "items"),
        ([{"type": "picture"}], "items.0"),
        ([{"role": "u", "content": ""}], "items.0.role"),
    ],
)
def test_items_that_cannot_be_added_are_refused_and_change_nothing(items: list[Any], param: str) -> None:
    async def main() -> None:
        async with agent() as (ai, _):
            begun = await ai.conversations.create(items=[{"role": "user", "content": "ok"}])
            with pytest.raises(openai.BadRequestError) as caught:
                await ai.conversations.items.create(begun.id, items=items)
            assert caught.value.param == param
            assert len([item async for item in ai.conversations.items.list(begun.id)]) == 1

    run_virtual(main())


def test_a_conversation_of_another_session_is_not_found() -> None:
    async def main() -> None:
        async with agent() as (ai, it):
            begun = await ai.conversations.create()
            other = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            stranger = it.sdk(base_url=f"http://memory/s/{other.api_key}/v1")
            for asked in (stranger.conversations.items.create(begun.id, items=[]), stranger.conversations.update(begun.id, metadata={})):
                with pytest.raises(openai.NotFoundError, match="has no conversation"):
                    await asked

    run_virtual(main())
