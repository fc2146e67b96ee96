from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx2
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from midflight.testing.virtual_time import run_virtual
from midflight.wire.memory import MemoryTransport


def through(app: ASGIApp, use: Callable[[httpx2.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks, httpx2.AsyncClient(transport=MemoryTransport(app, tasks), timeout=None) as client:
            await use(client)

    run_virtual(main())


async def start(send: Send, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"x-made", b"here")]})


def test_request_and_response_arrive_whole() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        await start(send, 201)
        await send(
            {"type": "http.response.body", "body": f"{scope['method']} {scope['path']}?{scope['query_string'].decode()} ".encode() + body}
        )

    async def use(client: httpx2.AsyncClient) -> None:
        answer = await client.post("http://any/a%20b?c=1", content=b"hello")
        assert (answer.status_code, answer.headers["x-made"], answer.text) == (201, "here", "POST /a b?c=1 hello")

    through(app, use)


def test_parts_arrive_when_they_are_sent_and_a_slow_reader_holds_the_writer() -> None:
    sent: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await start(send)
        for k in range(200):
            await send({"type": "http.response.body", "body": b"x", "more_body": k < 199})
            sent.append(k)

    async def use(client: httpx2.AsyncClient) -> None:
        async with client.stream("GET", "http://any/") as answer:
            await asyncio.sleep(1)
            assert len(sent) == 64
            assert len(await answer.aread()) == 200

    through(app, use)


@pytest.mark.parametrize("started", [False, True])
def test_an_application_that_fails_breaks_the_connection_and_nothing_else(started: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if started:
            await start(send)
        raise ZeroDivisionError("inside")

    async def use(client: httpx2.AsyncClient) -> None:
        with pytest.raises(httpx2.RemoteProtocolError, match="ended before its body did" if started else "inside"):
            await client.get("http://any/")

    through(app, use)


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("started", [True, False])
def test_a_client_who_goes_is_told_to_the_application_which_ends_when_it_wants(close: bool, started: bool) -> None:
    told: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if started:
            await start(send)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        told.append((await receive())["type"])
        await asyncio.sleep(1)
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"nobody waits for it", "more_body": True})
        told.append("ended")

    async def use(client: httpx2.AsyncClient) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), client.stream("GET", "http://any/") as answer:
                if not close:
                    await answer.aread()
                raise TimeoutError
        await asyncio.sleep(0.01)
        assert told == ["http.disconnect"]
        await asyncio.sleep(1)
        assert told == ["http.disconnect", "ended"]

    through(app, use)


def test_a_writer_who_waits_for_a_reader_is_freed_by_his_going() -> None:
    ended: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await start(send)
        for _ in range(200):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        ended.append((await receive())["type"])
        ended.append((await receive())["type"])

    async def use(client: httpx2.AsyncClient) -> None:
        async with client.stream("GET", "http://any/"):
            await asyncio.sleep(1)
            assert ended == []
        await asyncio.sleep(0.01)
        assert ended == ["http.request", "http.disconnect"]

    through(app, use)


def test_the_end_of_the_task_group_ends_what_runs_on_without_a_client() -> None:
    ended: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("cancelled")

    async def main() -> None:
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks, httpx2.AsyncClient(transport=MemoryTransport(app, tasks)) as client:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1):
                        await client.get("http://any/")
                assert ended == []
                raise ZeroDivisionError
        assert ended == ["cancelled"]

    run_virtual(main())


def test_a_head_request_has_no_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await start(send)
        await send({"type": "http.response.body", "body": b"x"})

    async def use(client: httpx2.AsyncClient) -> None:
        answer = await client.head("http://any/")
        assert (answer.headers["x-made"], answer.content) == ("here", b"")

    through(app, use)
