"""Running the engine's application under uvicorn, inside an event loop and process that belong to somebody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator

import uvicorn

from midflight.engines.embedded.app import build_app
from midflight.engines.embedded.engine import EmbeddedEngine

__all__ = ["build_app", "serve"]


async def serve(engine: EmbeddedEngine, *, host: str, port: int, token: str | None, ready: Callable[[int], None]) -> None:
    """Serves until cancelled; port 0 takes a free one. `ready` gets the real port once connections are accepted.

    The engine's `run` must run beside it, in the same task group. Signals stay the process owner's.
    """
    with _listening(host, port) as listener:
        config = uvicorn.Config(
            build_app(engine, token=token),
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="websockets-sansio",
            ws_per_message_deflate=False,
            ws_max_size=2**30,
            timeout_graceful_shutdown=1,
        )
        server = _Server(config, lambda: ready(listener.getsockname()[1]))
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
        """Stops listening and closes every connection, which ends its request; nothing is waited for."""
        for listening in getattr(self, "servers", ()):
            listening.close()
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if isinstance(transport, asyncio.BaseTransport):
                transport.close()


@contextlib.contextmanager
def _listening(host: str, port: int) -> Generator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        yield listener
