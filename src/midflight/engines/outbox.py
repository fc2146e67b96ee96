"""Frames on their way to one client of the wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from starlette.websockets import WebSocket, WebSocketDisconnect

from midflight.engines.wire import EngineFrame, Rejected, encode
from midflight.errors import EngineUnavailable, MidflightError, Overloaded, RequestRejected

_MAX_FRAMES = 16_384
"""Steps a client may lag behind; one that lags more is cut off, so that its frames do not fill the memory."""


class Outbox:
    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def send(self, frame: EngineFrame) -> None:
        """Nothing follows what was left out: a client that lagged is cut off after the frames before."""
        if self._error is None and len(self._frames) >= _MAX_FRAMES:
            self.fail(EngineUnavailable(f"the client reads too slowly: {_MAX_FRAMES} frames wait. Attach again."))
        if self._error is None:
            self._frames.append(encode(frame))
            self._changed.set()

    def reject(self, handle: int, error: MidflightError) -> None:
        """Ends one request, by the client's number."""
        param = error.param if isinstance(error, RequestRejected) else None
        retry_after = error.retry_after_seconds if isinstance(error, Overloaded) else None
        self.send(Rejected(handle, error.code, str(error), param, retry_after))

    def fail(self, error: Exception) -> None:
        """The engine's end, told after the frames before it."""
        self._error = error
        self._changed.set()

    async def next(self) -> bytes:
        """Waits for a frame or the engine's end; ended by the disconnection of the client."""
        while not self._frames:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        return self._frames.popleft()

    async def drain(self, socket: WebSocket) -> None:
        """Waits for frames; ended by the end of the engine, which closes the socket, or of the connection."""
        # Starlette raises RuntimeError when it sends on a socket that is closed already.
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            try:
                while True:
                    await socket.send_bytes(await self.next())
            except EngineUnavailable as error:
                await socket.close(code=1011, reason=str(error)[:100])
