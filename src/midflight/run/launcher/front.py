"""A proxy that gives a run with several gateways one address. It forwards each request, as it is,
to the gateway whose session the request names.

It has no state: the id of a session begins with its gateway (`mf-s1-...`). So a restarted front, or
a second one, forwards requests just as well.
"""

import re
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Self

import msgspec
from starlette.types import Receive, Scope, Send

from midflight.errors import ConfigError, EngineUnavailable
from midflight.run.api.service import PREFIX
from midflight.run.endpoint import NAME, Endpoint
from midflight.run.parts import PartLost
from midflight.trajectories.pairs import shard_stores
from midflight.wire.client import HttpClient
from midflight.wire.edge import (
    ClientGone,
    fault_of,
    headers_of,
    key_of,
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
"""A session may be opened at any gateway. Its id then names the gateway that holds it."""


class Routes:
    """Chooses the gateway of a request. It is synchronous."""

    def __init__(self, num_gateways: int) -> None:
        self._num_gateways = num_gateways
        self._opened = count()

    def shard_of(self, scope: Scope) -> int:
        """Chooses by the session in the path, else by that of the key. New sessions go to each
        gateway in turn. A request that names no session goes to the first gateway, and so does one
        for a gateway that this run does not have: the session is unknown there too.
        """
        path: str = scope["path"]
        if scope["method"] == "POST" and path == OPENS:
            return next(self._opened) % self._num_gateways
        found = _SHARD.search(path) or _SHARD.match(key_of(scope) or "")
        shard = int(found[1]) if found else 0
        return shard if shard < self._num_gateways else 0


class Front:
    """An ASGI application. It sees the path, head and whole body of a request, and each piece of an
    answer as it arrives.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        """`urls` are those of the gateways, in their order."""
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
        """Answers requests until it is cancelled."""
        async with self:
            await serve_app(
                guarded(self, host=listener.getsockname()[0], names=names), listener, ready=ready
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits for the client's body and for the gateway, as long as the client does. An answer
        that the gateway breaks off is broken off here too.
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
            away = EngineUnavailable(
                "the session's gateway is away: it is started again; ask again in a moment."
            )
            await send_fault(send, fault_of(away))
        except Exception as error:  # the edge: every error becomes an answer
            if begun:
                raise
            await send_fault(send, fault_of(error))

    async def _forward(
        self, scope: Scope, body: bytes, send: Send, begin: Callable[[bool], None]
    ) -> None:
        gateway = self._gateways[self._routes.shard_of(scope)]
        query = scope["query_string"].decode("latin-1")
        path = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in _end_to_end(scope["headers"])
        }
        headers["accept-encoding"] = "identity"
        async with gateway.open(scope["method"], path, body, headers=headers) as answer:
            head = _end_to_end(answer.raw_headers)
            begin(True)
            await send({"type": "http.response.start", "status": answer.status, "headers": head})
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that are forwarded."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_HOP]


def gateways_of(run: Path) -> list[str]:
    """The addresses of a run's gateways, as the `endpoint.json` of each says. Raises `ConfigError`
    if the run does not go on.
    """
    shards = [store.parent for store in shard_stores(run)]
    shards.sort(key=lambda folder: int(folder.name))
    try:
        return [
            msgspec.json.decode((folder / NAME).read_bytes(), type=Endpoint).url
            for folder in [run, *shards]
        ]
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"reading where the gateways of {run} are: {error}. Give the folder of a run that goes "
            "on."
        ) from error
