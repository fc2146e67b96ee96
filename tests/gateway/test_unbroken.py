"""Agent to engine: both halves of the gateway together, over the scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
import openai
from tests.gateway.offered import KEY

from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.generation import Generator
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.fleet.fleet import Fleet
from midflight.gateway.http.control import Control
from midflight.gateway.http.http import build_app
from midflight.testing.script import scripted_tokenizer
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import Reason, SamplingParams
from midflight.types.facts import record_nothing
from midflight.wire.memory import MemoryTransport

CHAT = [{"role": "user", "content": "hi"}]
DEFAULTS = SamplingParams(max_tokens=30, ignore_eos=True)


@asynccontextmanager
async def served(*engines: ScriptedEngine) -> AsyncIterator[tuple[Gateway, httpx2.AsyncClient]]:
    fleet = Fleet()
    for engine in engines:
        fleet.attach(engine)
    generator = Generator(fleet, request_seconds=60)
    gateway = Gateway(generator, scripted_tokenizer(), record_nothing, model="policy", limits=EngineLimits(4096, 262))
    gateway.address = "http://memory"
    app = build_app(gateway, Control(fleet, generator))
    async with asyncio.TaskGroup() as tasks, httpx2.AsyncClient(transport=MemoryTransport(app, tasks), base_url="http://memory") as http:
        yield gateway, http
        await asyncio.sleep(1)  # the SDK leaves the iterators of a stream to the loop


async def streamed(gateway: Gateway, http: httpx2.AsyncClient, **options: object) -> str:
    """The text of one streamed chat in a session of its own."""
    handle = gateway.open(KEY, sampling=DEFAULTS, tracked=True)
    client = openai.AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key, http_client=http, max_retries=0)
    stream = await client.chat.completions.create(model="policy", messages=CHAT, stream=True, **options)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    record = gateway.close(handle.session_id)
    assert sum(row.num_trainable for row in record.rows) + sum(record.dropped.values()) >= len(text)
    return text


def test_an_agent_cannot_tell_an_interrupted_stream_from_an_unbroken_one() -> None:
    """I5, at the agent's edge: aborts and a death in mid-stream leave the text as it was."""

    async def main() -> None:
        async with served(ScriptedEngine("calm")) as (gateway, http):
            expected = await streamed(gateway, http)
        broken = ScriptedEngine("broken")
        for at, how in [(3, "abort"), (9, "abort"), (17, "die")]:
            broken.interrupt(at, how)
        async with served(broken, ScriptedEngine("spare")) as (gateway, http):
            assert await streamed(gateway, http) == expected
        assert len(expected) == 30

    run_virtual(main())


def test_a_pause_holds_streams_and_new_requests_and_loses_neither() -> None:
    async def main() -> None:
        async with served(ScriptedEngine()) as (gateway, http):
            expected = await streamed(gateway, http)
            async with asyncio.TaskGroup() as tasks:
                early = tasks.create_task(streamed(gateway, http))
                await asyncio.sleep(0.1)
                assert (await http.post("/pause_generation", json={"mode": "in_place"})).status_code == 200
                late = tasks.create_task(streamed(gateway, http))
                await asyncio.sleep(25)
                assert not early.done() and not late.done()
                assert (await http.post("/continue_generation")).status_code == 200
            assert early.result() == late.result() == expected

    run_virtual(main())


def test_tokens_past_a_stop_string_are_counted_and_never_shown() -> None:
    """I3: dropped(overshoot), when an engine's chunk goes on after the stop."""

    async def main() -> None:
        engine = ScriptedEngine(capabilities=replace(CAPABLE, stops_on_strings=False), chunk_tokens=8)
        async with served(engine) as (gateway, http):
            whole = await streamed(gateway, http)
            stop = whole[11:13]
            handle = gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            body = {"model": "policy", "messages": CHAT, "stop": stop}
            answer = (await http.post(f"{handle.base_url}/chat/completions", json=body)).json()
            cut = whole[: whole.index(stop)]
            assert answer["choices"][0]["message"]["content"] == cut
            record = gateway.close(handle.session_id)
            assert sum(row.num_trainable for row in record.rows) == len(cut) + 2
            assert record.dropped[Reason.OVERSHOOT] == 16 - len(cut) - 2

    run_virtual(main())


def test_an_operators_abort_ends_native_requests_and_no_others() -> None:
    async def main() -> None:
        async with served(ScriptedEngine()) as (gateway, http):
            expected = await streamed(gateway, http)
            async with asyncio.TaskGroup() as tasks:
                chat = tasks.create_task(streamed(gateway, http))
                body = {"input_ids": [1, 2], "rid": "job", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
                native = tasks.create_task(http.post("/generate", json=body))
                await asyncio.sleep(0.105)
                assert (await http.post("/abort_request", json={"abort_all": True})).json()["num_aborted"] == 2
            answer = native.result().json()
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert 0 < len(answer["output_ids"]) < 50
            assert chat.result() == expected

    run_virtual(main())
