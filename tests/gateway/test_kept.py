"""Responses, items and conversations that a session keeps: later requests that name them go on from the recorded tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from tests.gateway.offered import DEFAULTS, KEY, Offered, ScriptedGenerator, offered

from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.sessions import responses as kept_module
from midflight.gateway.sessions.responses import KeptResponses
from midflight.testing.virtual_time import run_virtual
from midflight.types import Feature, GroupKey, RolloutKey, SessionRecord

ALL = EngineLimits(max_context=2048, vocab_size=262, features=frozenset(Feature))
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALLING = 'so\n<tool_call>\n{"name": "add",  "arguments": {"a":1}}\n</tool_call><|end|>'
"""Spaced as no template would write it, so that ids reused are seen to be those of the answer."""
ASK: dict[str, Any] = {"model": "policy", "tools": [TOOL]}
USER = {"role": "user", "content": "hi"}


def in_session(use: Callable[[openai.AsyncOpenAI, Offered], Awaitable[None]], *texts: str) -> SessionRecord:
    """Runs `use` in a session whose model says these texts; what it became."""
    records: list[SessionRecord] = []

    async def main() -> None:
        async with offered(ScriptedGenerator(texts=list(texts)), limits=ALL) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS.changed(max_tokens=200), tracked=True)
            await use(it.sdk(base_url=handle.base_url), it)
            records.append(it.gateway.close(handle.session_id))

    run_virtual(main())
    return records[0]


@pytest.mark.parametrize("way", ["previous", "reference", "bare reference", "conversation", "whole"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_is_one_row_however_the_client_names_what_was_said(way: str, stream: bool) -> None:
    async def use(sdk: openai.AsyncOpenAI, it: Offered) -> None:
        async def ask(**fields: Any) -> Any:
            if not stream:
                return await sdk.responses.create(**ASK, **fields)
            return [event async for event in await sdk.responses.create(**ASK, **fields, stream=True)][-1].response

        named = {"conversation": (await sdk.conversations.create()).id} if way == "conversation" else {}
        first = await ask(input=[USER], **named)
        assert first.store is True
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "3"}
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        bare = [{"id": item.id} for item in first.output]
        following: dict[str, dict[str, Any]] = {
            "previous": {"input": [result], "previous_response_id": first.id},
            "reference": {"input": [USER, *references, result]},
            "bare reference": {"input": [USER, *bare, result]},
            "conversation": {"input": [result], **named},
            "whole": {"input": [USER, *first.output, result]},
        }
        second = await ask(**following[way])
        assert second.output_text == "three" and second.previous_response_id == following[way].get("previous_response_id")
        kept = await sdk.responses.retrieve(second.id)
        assert kept.model_dump(exclude={"usage"}) == second.model_dump(exclude={"usage"}) and kept.output_text == "three"

    record = in_session(use, CALLING, "three<|end|>")
    assert (record.num_turns, len(record.rows), record.num_rewritten, record.num_branches) == (2, 1, 0, 0)


def test_the_items_that_a_response_answered_are_told_by_pages_and_can_be_sent_as_they_are() -> None:
    """All of the conversation before it, without the instructions. Sent whole, they are found again token by token."""
    patch = {"type": "custom", "name": "patch"}
    inside = {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}]}
    calling = "".join(
        f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in [("add", '{"a":1}'), ("patch", '{"input": "x"}'), ("ns__look", "{}")]
    )

    async def use(sdk: openai.AsyncOpenAI, it: Offered) -> None:
        asked = {"model": "policy", "tools": [TOOL, patch, inside], "instructions": "brief"}
        first = await sdk.responses.create(**asked, input=[{"role": "developer", "content": "d"}, USER])
        said, add, custom, look = first.output
        results = [{"type": f"{each.type}_output", "call_id": each.call_id, "output": f"of {each.name}"} for each in (add, custom, look)]
        second = await sdk.responses.create(**asked, input=results, previous_response_id=first.id)
        items = [item async for item in sdk.responses.input_items.list(second.id, order="asc", limit=3)]
        assert [(item.type, getattr(item, "call_id", None)) for item in items] == [
            ("message", None),
            ("message", None),
            ("message", None),
            ("function_call", add.call_id),
            ("custom_tool_call", custom.call_id),
            ("function_call", look.call_id),
            ("function_call_output", add.call_id),
            ("custom_tool_call_output", custom.call_id),
            ("function_call_output", look.call_id),
        ]
        assert (items[0].role, items[0].content[0].text, items[2].content[0].text) == ("system", "d", said.content[0].text)
        assert (items[3].arguments, items[4].input, items[5].name, items[5].model_dump()["namespace"]) == ('{"a":1}', "x", "look", "ns")
        newest = await sdk.responses.input_items.list(second.id)
        assert [item.id for item in newest.data] == [item.id for item in reversed(items)] and newest.has_more is False
        assert (await sdk.responses.input_items.list(first.id, limit=1)).has_more is True
        for wrong in ({"order": "up"}, {"limit": 0}, {"limit": 101}, {"after": "nothing"}):
            with pytest.raises(openai.BadRequestError) as caught:
                await sdk.responses.input_items.list(second.id, **wrong)
            assert caught.value.param in wrong
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.input_items.list("resp_unknown")
        back = [item.model_dump(exclude_none=True) for item in [*items, *second.output]]
        await sdk.responses.create(**asked, input=[*back, USER])

    record = in_session(use, f"so{calling}<|end|>", "b<|end|>", "c<|end|>")
    assert (record.num_turns, len(record.rows), record.num_rewritten, record.num_branches) == (3, 1, 0, 0)


def test_instructions_hold_for_one_response_and_a_conversation_may_begin_with_items() -> None:
    prompts: list[str] = []

    async def use(sdk: openai.AsyncOpenAI, it: Offered) -> None:
        talk = await sdk.conversations.create(items=[{"type": "message", "role": "user", "content": "early"}], metadata={"a": "b"})
        assert (await sdk.conversations.retrieve(talk.id)).metadata == {"a": "b"}
        await sdk.responses.create(model="policy", input="one", instructions="brief", conversation={"id": talk.id})
        await sdk.responses.create(model="policy", input="two", conversation=talk.id)
        prompts.extend(it.gateway.tokenizer.decode(request.input_ids) for request in it.generator.requests)
        assert (await sdk.conversations.delete(talk.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.create(model="policy", input="x", conversation=talk.id)

    in_session(use, "a<|end|>", "b<|end|>")
    assert prompts == [
        "<|system|>brief<|end|><|user|>early<|end|><|user|>one<|end|><|assistant|>",
        "<|user|>early<|end|><|user|>one<|end|><|assistant|>a<|end|><|user|>two<|end|><|assistant|>",
    ]


def test_what_is_not_kept_is_404_and_never_found_across_sessions() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["a<|end|>"] * 5), limits=ALL) as it:
            other = RolloutKey(GroupKey(epoch=0, index=4, attempt=0), sample=0)
            mine, theirs = (it.sdk(base_url=it.gateway.open(key, sampling=DEFAULTS, tracked=True).base_url) for key in (KEY, other))
            kept = await mine.responses.create(model="policy", input="hi")
            unkept = await mine.responses.create(model="policy", input="hi", store=False)
            assert unkept.store is False
            for sdk, response in ((theirs, kept), (it.sdk(), kept), (mine, unkept)):
                with pytest.raises(openai.NotFoundError):
                    await sdk.responses.retrieve(response.id)
                with pytest.raises(openai.NotFoundError):
                    await sdk.responses.create(model="policy", input="x", previous_response_id=response.id)
                with pytest.raises(openai.NotFoundError):
                    await sdk.responses.create(model="policy", input=[{"type": "item_reference", "id": response.output[0].id}])
            await mine.responses.delete(kept.id)
            with pytest.raises(openai.NotFoundError):
                await mine.responses.delete(kept.id)

    run_virtual(main())


def test_outside_sessions_a_client_finds_what_was_said_with_its_key() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["a<|end|>", "b<|end|>"]), limits=ALL) as it:
            first = await it.sdk(api_key="one").responses.create(model="policy", input="hi")
            assert (
                await it.sdk(api_key="one").responses.create(model="policy", input="x", previous_response_id=first.id)
            ).output_text == "b"
            with pytest.raises(openai.NotFoundError):
                await it.sdk(api_key="two").responses.retrieve(first.id)

    run_virtual(main())


def test_an_agent_that_begins_again_finds_nothing_of_the_one_before() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["a<|end|>"]), limits=ALL) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            first = await it.sdk(base_url=handle.base_url).responses.create(model="policy", input="hi")
            again = it.sdk(base_url=it.gateway.reopen(handle.session_id).base_url)
            with pytest.raises(openai.NotFoundError):
                await again.responses.retrieve(first.id)

    run_virtual(main())


def response(name: str, text: str = "x") -> dict[str, Any]:
    return {"id": name, "output": [{"id": f"msg_{name}", "content": text}]}


def test_the_oldest_are_forgotten_and_a_conversation_that_is_sent_whole_costs_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "MAX_RESPONSES", 3)
    kept, said = KeptResponses(), list[dict[str, Any]]()
    for k in range(5):
        said += [{"role": "user", "content": f"u{k}"}, {"role": "assistant", "content": f"a{k}"}]
        kept.keep(response(f"r{k}"), said, conversation=None)
    assert len(kept) == 3
    assert kept.said("r4", "p").whole == tuple(said) and len(kept.said("r4", "p").messages) == 2
    assert kept.item("msg_r4", "p")["content"] == "x"
    for name in ("r0", "r1"):
        with pytest.raises(kept_module.UnknownResponse):
            kept.said(name, "p")
        with pytest.raises(kept_module.UnknownResponse):
            kept.item(f"msg_{name}", "p")
    assert len(kept._items) == len(kept._responses) == len(kept._said) == 3


def test_bytes_are_bounded_and_conversations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "MAX_BYTES", 10_000)
    kept = KeptResponses()
    for k in range(20):
        kept.keep(response(f"r{k}", "x" * 3000), [{"role": "user", "content": str(k)}], conversation=None)
    assert len(kept) == 3 and kept._num_bytes <= 10_000
    for _ in range(kept_module.MAX_CONVERSATIONS):
        kept.begin([], created=0, metadata={})
    with pytest.raises(kept_module.Overloaded):
        kept.begin([], created=0, metadata={})
