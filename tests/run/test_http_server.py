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
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket
from tests.engines.test_contract import listening

from midflight.wire import edge, server
from midflight.wire.hosts import guarded


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
            answer = await thinking
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "stopping")
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


class Counted:
    """A transport that keeps what is written."""

    def __init__(self, transport: asyncio.Transport, written: list[bytes]) -> None:
        self._transport, self._written = transport, written

    def write(self, data: bytes) -> None:
        self._written.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)


async def says_one(scope: Scope, receive: Receive, send: Send) -> None:
    await edge.send_json(send, {"a": 1}, headers=((b"x-more", b"1"),) if scope["path"] == "/more" else ())


def test_a_whole_answer_is_one_write_and_as_the_server_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    made = server._ClientConnection.connection_made
    monkeypatch.setattr(server._ClientConnection, "connection_made", lambda self, transport: made(self, Counted(transport, written)))  # type: ignore[arg-type]

    async def main() -> None:
        async with listening(says_one) as url, aiohttp.ClientSession() as client:
            for method, path, body, num_writes in (("POST", "/", '{"a":1}', 1), ("POST", "/more", '{"a":1}', 2), ("HEAD", "/", "", 1)):
                written.clear()
                async with client.request(method, url + path) as answer:
                    assert await answer.text() == body and answer.status == 200
                    assert {"Content-Type", "Content-Length", "Date"} <= answer.headers.keys()
                    assert answer.headers["Content-Length"] == "7"
                assert len([data for data in written if data]) == num_writes, (method, path)
            async with client.post(url, headers={"Connection": "close"}) as answer:
                assert await answer.text() == '{"a":1}' and answer.headers["Connection"] == "close"

    asyncio.run(main())


async def said_to(url: str, *parts: bytes, seconds: float) -> bytes:
    """What the server sends until it closes the connection, to a client that says these parts, a tenth of a second apart."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    try:
        async with asyncio.timeout(seconds):
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.1)
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("parts", [(b"GET /he",), (b"GET /health HTTP/1.1\r\nHost: loc", b"alhost\r\nX-Slow: ", b"1")])
def test_a_head_that_does_not_end_is_answered_and_cut_off(parts: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.4)

    async def main() -> None:
        async with listening(APP) as url:
            said = await said_to(url, *parts, seconds=5)
            assert said.startswith(b"HTTP/1.1 408 ") and b'"code":"head_too_slow"' in said
            assert await said_to(url, seconds=5) == b"", "a connection on which nothing was said"
            assert (await said_to(url, b"GET /none HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", seconds=5)).startswith(
                b"HTTP/1.1 404"
            )

    asyncio.run(main())


def test_a_connection_at_rest_is_kept_longer_than_a_head_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)

    async def main() -> None:
        ask = b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n"
        async with listening(APP) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
            for _ in range(2):
                writer.write(ask)
                assert (await reader.readline()).startswith(b"HTTP/1.1 404")
                await reader.read(1000)
                await asyncio.sleep(0.5)
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:80", 404),
        ("localhost", 404),
        ("[::1]:8000", 404),
        ("Proxy.example", 404),
        ("evil.example:8000", 421),
        ("127.0.0.1.evil.example", 421),
    ],
)
def test_on_loopback_the_names_of_loopback_are_answered_and_those_that_were_given(host: str, status: int) -> None:
    async def main() -> None:
        app = guarded(APP, host="127.0.0.1", names=("proxy.example",))
        async with listening(app) as url, aiohttp.ClientSession() as client:
            async with client.get(url + "/none", headers={"Host": host}) as answer:
                assert answer.status == status
                if status == 421:
                    assert "gateway.public_url" in (await answer.json())["error"]["message"]
            if status == 421:
                with pytest.raises(aiohttp.WSServerHandshakeError):
                    await client.ws_connect(url + "/talk", headers={"Host": host})

    asyncio.run(main())
    assert guarded(APP, host="0.0.0.0", names=()) is APP
