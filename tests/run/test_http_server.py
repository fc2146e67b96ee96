"""The end of a server that still has clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import aiohttp
import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from tests.engines.test_contract import listening


async def talk(socket: WebSocket) -> None:
    await socket.accept()
    await asyncio.Event().wait()


async def think(request: Request) -> Response:
    request.app.state.thinking.set()
    await asyncio.Event().wait()
    raise AssertionError


async def stream(request: Request) -> Response:
    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await asyncio.Event().wait()

    return StreamingResponse(events())


async def fail(request: Request) -> Response:
    raise ValueError("a fault of ours")


APP = Starlette(routes=[WebSocketRoute("/talk", talk), Route("/think", think), Route("/stream", stream), Route("/fail", fail)])


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_requests_that_are_dropped_at_the_end_are_no_errors_in_the_log(loop, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    async def main() -> None:
        APP.state.thinking = asyncio.Event()
        async with aiohttp.ClientSession() as client, asyncio.timeout(10):
            async with listening(APP) as url:
                await client.ws_connect(url + "/talk")
                thinking = asyncio.ensure_future(client.get(url + "/think"))
                await (await client.get(url + "/stream")).content.readany()
                await APP.state.thinking.wait()  # a request still on its way would find nobody, and wait for ever
            with pytest.raises(aiohttp.ClientError):
                (await thinking).raise_for_status()
            await asyncio.sleep(0.05)

    with caplog.at_level(logging.WARNING), asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
    assert not caplog.records


def test_a_fault_is_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with listening(APP) as url, aiohttp.ClientSession() as client, client.get(url + "/fail") as answer:
            assert answer.status == 500

    asyncio.run(main())
    assert "a fault of ours" in caplog.text
