"""A client of one server. However an answer fails to come, the caller gets one error of its own."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import aiohttp

LOSSES = (aiohttp.ClientError, OSError)
"""Ways in which a connection fails. A time-out is one of them. A caller's own deadline is not,
because it is a cancellation.
"""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A whole answer."""

    status: int
    content: bytes


class HttpClient:
    """Connections to one server, open within `async with`. Redirects are not followed, because they
    would take the token elsewhere.
    """

    def __init__(
        self,
        url: str,
        *,
        lost: Callable[[str], Exception],
        token: str | None = None,
        connect_seconds: float | None = 5.0,
        line_bytes: int = 2**16,
    ) -> None:
        """`lost` makes the error from a sentence about the failure, such as "did not answer
        /health: ...". `connect_seconds` bound connecting if a call has no bound of its own; the
        caller may try again. None leaves it to the kernel, which says at once that nobody listens,
        and after minutes that a machine is gone: for a caller that may itself get no processor for
        seconds, and would take its own delay for the server's. `line_bytes` is the longest line of
        a streamed answer.
        """
        self._url = url
        self._lost = lost
        self._line_bytes = line_bytes
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # The server decides how many it admits: a request waits there and not here.
        connections = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            self._url,
            headers=self._headers,
            connector=connections,
            timeout=self._timeout,
            read_bufsize=self._line_bytes,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        session = self._session
        self._session = None
        if session is not None:
            await session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpAnswer:
        """Waits for the whole answer, whatever its status: for ever, or for `seconds`."""
        async with self.open(method, path, body, seconds=seconds, headers=headers) as answer:
            return HttpAnswer(answer.status, await answer.read())

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """An answer that is read in the block. Losses there are `lost` too. `seconds` bound the
        block.
        """
        timeout = self._timeout if seconds is None else aiohttp.ClientTimeout(total=seconds)
        deed = "did not answer"
        try:
            async with self._open_session().request(
                method, path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                deed = "broke off its answer to"
                yield answer
        except LOSSES as error:
            raise self._lost(f"{deed} {path}: {error!r}") from error

    @asynccontextmanager
    async def socket(
        self, path: str, *, heartbeat_seconds: float
    ) -> AsyncGenerator[aiohttp.ClientWebSocketResponse]:
        """A WebSocket. Losses are left as they are (`LOSSES`), because its two directions see the
        same one.
        """
        async with self._open_session().ws_connect(
            path, heartbeat=heartbeat_seconds, max_msg_size=0
        ) as socket:
            yield socket

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise self._lost("is not attached")
        return self._session
