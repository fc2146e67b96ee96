"""The end of a gateway that still has clients: each is told, in the shape of its own dialect."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from tests.gateway.offered import RecordingControl, ScriptedGenerator, make_gateway

from midflight.gateway.http.http import build_app
from midflight.wire.server import serve_app

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
STREAMED = "/v1beta/models/policy:streamGenerateContent?alt=sse"
STREAMS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "policy", "prompt": "hi", "max_tokens": 200},
    "/v1/messages": CHAT,
    "/v1/responses": {"model": "policy", "input": "hi", "max_output_tokens": 200},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 200}},
    STREAMED: {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 200}},
}


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[aiohttp.ClientSession, asyncio.Task[None]]]:
    """A client of a gateway whose answers take minutes, and the task that serves it."""
    gateway = make_gateway(ScriptedGenerator(texts=["a" * 200] * 9, seconds_per_token=1.0))
    ready = asyncio.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = build_app(gateway, RecordingControl())
    task = asyncio.create_task(serve_app(app, listener, ready=ready.set, stopping=gateway.stop))
    await ready.wait()
    async with asyncio.timeout(10), aiohttp.ClientSession(url) as client:
        try:
            yield client, task
        finally:
            task.cancel()
            await asyncio.wait({task})


def test_what_waits_for_its_answer_is_told_503_in_json_and_so_is_what_comes_meanwhile() -> None:
    async def main() -> None:
        async with serving() as (client, task):
            asked = [asyncio.ensure_future(client.post(path, json=body)) for path, body in STREAMS.items()]
            await asyncio.sleep(0.3)
            task.cancel()
            for answer in await asyncio.gather(*asked):
                assert (answer.status, answer.content_type) == (503, "application/json")
                assert "stopping" in (await answer.json())["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "ends"),
    [
        ("/v1/chat/completions", {"code": "stopping"}),
        ("/v1/completions", {"code": "stopping"}),
        ("/v1/messages", {"type": "error"}),
        ("/v1/responses", {"type": "error"}),
        ("/generate", {"code": "stopping"}),
        (STREAMED, {"code": 503, "status": "UNAVAILABLE"}),
    ],
)
def test_a_stream_ends_with_an_error_of_its_dialect(path: str, ends: dict[str, str]) -> None:
    async def main() -> None:
        async with serving() as (client, task):
            body = STREAMS[path] if path == STREAMED else {**STREAMS[path], "stream": True}
            async with client.post(path, json=body) as answer:
                assert answer.status == 200
                said = await answer.content.readuntil(b"\n\n")
                asyncio.get_running_loop().call_later(1.2, task.cancel)
                said += await answer.content.read()
            lines = [line.removeprefix("data: ") for line in said.decode().splitlines()]
            events = [json.loads(line) for line in lines if line.startswith("{")]
            assert len(events) > 1
            last = events[-1]
            assert ends.items() <= (last["error"] if "code" in ends else last).items(), last
            assert "the gateway is stopping" in json.dumps(last)

    asyncio.run(main())
