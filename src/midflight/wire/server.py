"""An ASGI application under uvicorn, on a given socket, in an event loop and process that do more than serve it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Generator

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from midflight.errors import RunFailed
from midflight.wire.edge import plain_fault

UNREAD_SECONDS = 120.0
"""A client that takes nothing of its answer for so long is cut off: it would hold its place for ever."""


async def serve_app(app: ASGIApp, listener: socket.socket, *, ready: Callable[[], None]) -> None:
    """Serves until cancelled, then drops every connection. `ready` is called once connections are accepted.

    There is no access log: paths hold the secrets of sessions. Signals are left to the process.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        http=_ClientConnection,
        access_log=False,
        log_level="warning",  # below it, headers and addresses of WebSockets are written out
        proxy_headers=False,
        server_header=False,
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        ws_max_size=2**30,
        timeout_graceful_shutdown=1,
    )
    logging.getLogger("uvicorn.error").addFilter(_failed)
    server = _OneServer(config, ready)
    try:
        await server.serve(sockets=[listener])
    finally:
        server.drop_all()


def _failed(record: logging.LogRecord) -> bool:
    """A request that is dropped has not failed, though uvicorn logs the cancellation of its task as an error."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class _ClientConnection(HttpToolsProtocol):
    """Cuts off a client that reads nothing, and refuses what is not HTTP in the shape of any other error.

    A client that ends its side counts as gone, since nothing tells it from one that has closed the connection.
    """

    _stalled: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        body = msgspec.json.encode(plain_fault(400, f"{msg} Send HTTP/1.1.", "invalid_http").body)
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % len(body) + body)
        self.transport.close()

    def _reading(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class _OneServer(uvicorn.Server):
    """Installs no signal handlers, tells when it listens, and can be dropped at once."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = started

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_start()

    def drop_all(self) -> None:
        """Stops listening and closes every connection without waiting for its request."""
        for listening in getattr(self, "servers", ()):
            listening.close()
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if isinstance(transport, asyncio.BaseTransport):
                transport.close()
        for task in list(self.server_state.tasks):
            task.cancel()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, inherited by the part that serves it: the address is known before the part is, and outlives it."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. Else an answer in two writes waits 40 ms for the client to acknowledge the first.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise RunFailed(
            f"listening on {host}:{port}: {error.strerror}; choose another port (gateway.port, --port), or 0 for a free one"
        ) from error
    made.listen(1024)
    made.setblocking(False)
    return made
