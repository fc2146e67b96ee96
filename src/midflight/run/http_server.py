"""An ASGI application under uvicorn, on a given socket, inside an event loop and process that belong to somebody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator

import uvicorn
from starlette.types import ASGIApp


async def serve_app(app: ASGIApp, listener: socket.socket, *, ready: Callable[[], None]) -> None:
    """Serves until cancelled, then drops every connection. `ready` is called once connections are accepted.

    There is no access log: paths hold the secrets of sessions. Signals stay the process owner's.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
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
