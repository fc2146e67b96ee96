"""An ASGI application under uvicorn, on a given socket, inside an event loop and process that belong to somebody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

PROBE_SECONDS = 0.2
"""Between two probes of a client who has ended his side: the first finds nobody there, the second learns of it. A round trip."""
UNREAD_SECONDS = 120.0
"""A client who takes nothing of his answer for so long is cut off: he would hold its place for ever."""

_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


async def serve_app(app: ASGIApp, listener: socket.socket, *, ready: Callable[[], None]) -> None:
    """Serves until cancelled, then drops every connection. `ready` is called once connections are accepted.

    There is no access log: paths hold the secrets of sessions. Signals stay the process owner's.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        http=_Connection,
        access_log=False,
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        ws_max_size=2**30,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config, ready)
    try:
        await server.serve(sockets=[listener])
    finally:
        server.drop_all()


class _Connection(HttpToolsProtocol):
    """Tells a client who has ended his side and waits for the answer from one who has gone.

    Both look alike until something is sent. Before the response that is an interim one, which clients skip (RFC 9110, 15.2);
    after its start the response itself. A refusal of what is not HTTP has the shape of any other error.
    """

    _stalled: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]  (asyncio reads the result)
        """Whether to stay for the answer: the request is whole, and its client can be asked whether he waits."""
        cycle = self.cycle
        asked = cycle is not None  # pyright: ignore[reportUnnecessaryComparison]  (before the first request it is None)
        if not asked or cycle.response_complete or cycle.more_body or self.scope["http_version"] != "1.1":
            return False
        cycle.keep_alive = False
        self._probe()
        self.loop.call_later(PROBE_SECONDS, self._probe)
        return True

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
        body = msgspec.json.encode(
            {"error": {"message": f"{msg} Send HTTP/1.1.", "type": "invalid_request_error", "param": None, "code": "invalid_http"}}
        )
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % len(body) + body)
        self.transport.close()

    def _probe(self) -> None:
        if not (self.cycle.response_started or self.transport.is_closing()):
            self.transport.write(_PROBE)

    def _reading(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class _Server(uvicorn.Server):
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
