"""One address for a run with several gateways: each request goes on to the gateway whose session it
names, as it is.

Stateless: an id begins with its gateway (`mf-s1-...`), so a front that was started again, or a
second one, knows as much.
"""

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Self

import msgspec
from starlette.types import Receive, Scope, Send

from midflight.errors import ConfigError, EngineUnavailable
from midflight.run.api.service import PREFIX
from midflight.run.parts import NAME, Endpoint, PartLost
from midflight.trajectories.pairs import shard_stores
from midflight.wire.client import HttpClient
from midflight.wire.edge import (
    ClientGone,
    fault_of,
    headers_of,
    key_in,
    read_body,
    send_fault,
    with_client,
)
from midflight.wire.hosts import guarded
from midflight.wire.server import serve_app

_SHARD = re.compile(r"mf-s(\d+)-")
_OF_HOP = {
    b"connection",
    b"keep-alive",
    b"transfer-encoding",
    b"upgrade",
    b"te",
    b"trailer",
    b"content-length",
    b"accept-encoding",
}
"""Headers of one connection, which are made anew for the next."""
OPENS = f"{PREFIX}/sessions"
"""A session may be opened at any gateway; what its id says then is where it lives."""


class Routes:
    """Which gateway a request is for. Synchronous."""

    def __init__(self, num_gateways: int) -> None:
        self._num_gateways = num_gateways
        self._opened = count()

    def shard_of(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> int:
        """By the session in the path, else by that of the key. New sessions go to each in turn;
        whatever names none goes to the first, where a session of a gateway that this run does not
        have is unknown, too."""
        if method == "POST" and path == OPENS:
            return next(self._opened) % self._num_gateways
        found = _SHARD.search(path) or _SHARD.match(key_in(headers) or "")
        shard = int(found[1]) if found else 0
        return shard if shard < self._num_gateways else 0


class Front:
    """An ASGI application. Sees of a request its path, head and whole body, and of an answer each
    piece as it comes.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        """Of the gateways, in their order."""
        self._routes = Routes(len(urls))
        self._open = AsyncExitStack()
        self._gateways = [HttpClient(url, lost=PartLost) for url in urls]

    async def __aenter__(self) -> Self:
        for gateway in self._gateways:
            await self._open.enter_async_context(gateway)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._open.aclose()

    async def serve(
        self, listener: socket.socket, *, names: Sequence[str], ready: Callable[[], None]
    ) -> None:
        """Until cancelled."""
        async with self:
            await serve_app(
                guarded(self, host=listener.getsockname()[0], names=names), listener, ready=ready
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits for the client's body and for the gateway, as long as the client does; an answer
        that breaks off there breaks off here.
        """
        if scope["type"] != "http":
            return
        begun: list[bool] = []
        try:
            headers = headers_of(scope)
            body = await read_body(receive, declared=headers.get(b"content-length"))
            await with_client(receive, self._forward(scope, body, send, begun.append))
        except ClientGone:
            return
        except PartLost:
            if begun:
                raise
            await send_fault(
                send,
                fault_of(
                    EngineUnavailable(
                        "the session's gateway is away: it is started again; ask again in a moment."
                    )
                ),
            )
        except Exception as error:  # the edge: every error becomes an answer
            if begun:
                raise
            await send_fault(send, fault_of(error))

    async def _forward(
        self, scope: Scope, body: bytes, send: Send, begin: Callable[[bool], None]
    ) -> None:
        gateway = self._gateways[
            self._routes.shard_of(scope["method"], scope["path"], headers_of(scope))
        ]
        query = scope["query_string"].decode("latin-1")
        path = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        asked = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name.lower() not in _OF_HOP
        }
        async with gateway.open(
            scope["method"], path, body, headers={**asked, "accept-encoding": "identity"}
        ) as answer:
            head = [
                (name, value) for name, value in answer.raw_headers if name.lower() not in _OF_HOP
            ]
            begin(True)
            await send({"type": "http.response.start", "status": answer.status, "headers": head})
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def gateways_of(run: Path) -> list[str]:
    """Their addresses, by the `endpoint.json` of each. `ConfigError` where the run does not go
    on.
    """
    folders = [
        run,
        *sorted((store.parent for store in shard_stores(run)), key=lambda folder: int(folder.name)),
    ]
    try:
        return [
            msgspec.json.decode((folder / NAME).read_bytes(), type=Endpoint).url
            for folder in folders
        ]
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"reading where the gateways of {run} are: {error}. Give the folder of a run that goes "
            "on."
        ) from error
