"""A transport for the OpenAI SDK's HTTP client that calls the application in this process: no
socket, no server, streaming.

Agents in the rollout process use it: the SDK stays unmodified, and so does the application. Under
virtual time it is the only wire there is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Scope

if TYPE_CHECKING:
    import httpx2 as httpx
else:
    try:
        import httpx2 as httpx  # the SDK's client library
    except ImportError:
        import httpx  # the one it used before; the same transport interface

_MAX_PARTS = 64
"""The number of parts of a body that may wait for a reader. Beyond them the application waits in
`send`, as it would for a socket.
"""


class MemoryTransport(httpx.AsyncBaseTransport):
    """Calls `app` for each request, in a task of `tasks`, so that the owner's group ends them all.

    When a client leaves, the application receives `http.disconnect`, as from a server, and ends
    when it chooses.
    """

    def __init__(self, app: ASGIApp, tasks: asyncio.TaskGroup) -> None:
        self._app = app
        self._tasks = tasks

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Waits for the response to start. The application ends the wait, or a cancellation, which
        means that the client has left.
        """
        exchange = _MemoryAnswer(await request.aread(), is_head=request.method == "HEAD")
        running = exchange.run(self._app, _scope(request))
        self._tasks.create_task(running, name=f"{request.method} in memory")
        try:
            await exchange.started
        except BaseException:
            exchange.go()
            raise
        return httpx.Response(exchange.status, headers=exchange.headers, stream=exchange)


class _MemoryAnswer(httpx.AsyncByteStream):
    """One request and its response. Reading it waits for parts of the body. Closing it early means
    that the client has left.
    """

    def __init__(self, body: bytes, *, is_head: bool) -> None:
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = self._loop.create_future()
        self._is_head = is_head
        self._request: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._parts: deque[bytes] = deque()
        self._whole = False
        """True if the application has sent the end of the body."""
        self._ended = False
        """True if the application has ended, so that no more parts will come."""
        self._gone = False
        """True if the client has left."""
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._watcher: asyncio.Future[None] | None = None

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Waits for the application. Its error becomes the client's connection error, and never the
        task group's.
        """
        error = httpx.RemoteProtocolError("the application ended without a whole response")
        try:
            await app(scope, self._receive, _MemorySend(self))
        except Exception as failure:
            # the edge: a server would log the error and answer by cutting the connection
            error = httpx.RemoteProtocolError(f"the application failed: {failure!r}")
        finally:
            self._ended = True
            _resolve(self._reader)
            if not self.started.done():
                self.started.set_exception(error)
                self.started.exception()  # a client that has left does not ask for it

    def go(self) -> None:
        """Takes note that the client leaves. The application is told, and everything that it sends
        from here on is dropped.
        """
        self._gone = True
        self._parts.clear()
        _resolve(self._writer)
        _resolve(self._watcher)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """Waits for the application's next part of the body. The last part ends the iteration."""
        while not (self._parts or self._whole or self._ended):
            self._reader = self._loop.create_future()
            await self._reader
        if self._parts:
            _resolve(self._writer)
            return self._parts.popleft()
        if not self._whole:
            raise httpx.RemoteProtocolError("the response ended before its body did")
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if self._parts or not self._whole:
            self.go()

    async def _receive(self) -> Message:
        """The body at the first call. Later calls wait for the client to leave, or for the end of
        the response, as a server does.
        """
        if self._request is not None:
            message = self._request
            self._request = None
            return message
        if not (self._gone or self._whole):
            self._watcher = self._loop.create_future()
            await self._watcher
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Waits while the reader is far behind. The wait ends when it reads or leaves."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = list(message["headers"])
            _resolve(self.started)
            return
        while len(self._parts) >= _MAX_PARTS and not self._gone:
            self._writer = self._loop.create_future()
            await self._writer
        body = message.get("body", b"")
        if body and not self._gone and not self._is_head:
            self._parts.append(body)
        if not message.get("more_body", False):
            self._whole = True
            _resolve(self._watcher)
        _resolve(self._reader)

    def push(self, body: bytes) -> bool:
        """Sends more of the body from outside the task that answers, as a server's `push` does.
        Returns whether the reader keeps up.
        """
        if body and not self._gone:
            self._parts.append(body)
            _resolve(self._reader)
        return len(self._parts) < _MAX_PARTS


class _MemorySend:
    """The `send` that the application gets."""

    def __init__(self, answer: _MemoryAnswer) -> None:
        self._answer = answer
        self.push = answer.push

    async def __call__(self, message: Message) -> None:
        await self._answer.send(message)


def _resolve(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


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
        "extensions": {},
    }
