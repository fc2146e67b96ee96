"""A transport for the OpenAI SDK's HTTP client that calls the application in this process: no socket, no server, streaming.

Agents in the rollout process use it: the SDK stays unmodified, and so does the application. Under virtual time it is the
only wire there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Scope

from midflight.gateway.wire import CANCELS_WITH_CLIENT

if TYPE_CHECKING:
    import httpx2 as httpx
else:
    try:
        import httpx2 as httpx  # the SDK's client library
    except ImportError:
        import httpx  # the one it used before; the same transport interface

_MAX_PARTS = 64
"""Parts of a body that may wait for a reader; then the application waits in `send`, as it would for a socket."""


class MemoryTransport(httpx.AsyncBaseTransport):
    """Calls `app` for each request, in a task of `tasks`: the owner's group ends them all."""

    def __init__(self, app: ASGIApp, tasks: asyncio.TaskGroup) -> None:
        self._app = app
        self._tasks = tasks

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Waits for the response to start; ended by the application. Cancelled, it cancels the application too."""
        body = await request.aread()
        exchange = _Exchange(body)
        exchange.task = self._tasks.create_task(exchange.run(self._app, _scope(request)), name=f"{request.method} in memory")
        try:
            await exchange.started
        except BaseException:
            exchange.cancel()
            raise
        return httpx.Response(exchange.status, headers=exchange.headers, stream=exchange)


class _Exchange(httpx.AsyncByteStream):
    """One request and its response. Reading it waits for parts of the body; closing it cancels the application."""

    def __init__(self, body: bytes) -> None:
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self._request: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._read = False
        self._whole = False
        """Whether the application sent the end of the body."""
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_PARTS)

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Waits for the application. An error of it is the client's connection error, never the task group's."""
        try:
            await app(scope, self._receive, self._send)
            error = httpx.RemoteProtocolError("the application ended without a whole response")
        except Exception as failure:  # the edge: what a server would log and answer by cutting the connection
            error = httpx.RemoteProtocolError(f"the application failed: {failure!r}")
        finally:
            self._cut()
        if not self.started.done():
            self.started.set_exception(error)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """Waits for the application's next part of the body; ended by the last one."""
        part = None if self._read else await self._parts.get()
        if part is not None:
            return part
        self._read = True
        if not self._whole:
            raise httpx.RemoteProtocolError("the response ended before its body did")
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.cancel()

    async def _receive(self) -> Message:
        """The body once; then waits for ever, because the client's going cancels the application (`CANCELS_WITH_CLIENT`)."""
        if self._request is not None:
            message, self._request = self._request, None
            return message
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody resolves this wait")

    async def _send(self, message: Message) -> None:
        """Waits while the reader is far behind; ended by his reading or his going."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
            if not self.started.done():
                self.started.set_result(None)
            return
        if body := message.get("body", b""):
            await self._parts.put(body)
        if not message.get("more_body", False):
            self._whole = True
            await self._parts.put(None)

    def _cut(self) -> None:
        """The application has ended: a reader must not wait for more. After a whole body he knows."""
        if not self._whole:
            if self._parts.full():
                self._parts.get_nowait()
            self._parts.put_nowait(None)


def _scope(request: httpx.Request) -> Scope:
    raw_path, _, query = request.url.raw_path.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": ("memory", 0),
        "server": (request.url.host, request.url.port or 80),
        "extensions": {CANCELS_WITH_CLIENT: {}},
    }
