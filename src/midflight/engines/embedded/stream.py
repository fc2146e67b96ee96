"""The engine's end of the multiplexed wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.output import StepOutput
from midflight.engines.wire import Abort, EngineFrame, Hello, Rejected, Submit, decode_client_frame, encode, pack_step
from midflight.errors import EngineUnavailable, RequestRejected

_MAX_FRAMES = 16_384
"""Steps a client may lag behind; one that lags more is cut off, so that its frames do not fill the memory."""


class StreamOutlet:
    """An outlet that packs each step into one frame. Requests carry the client's numbers outside, the engine's handles inside."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self.numbers: dict[int, int] = {}
        """The client's number of each live handle."""

    def put(self, step: StepOutput) -> None:
        self.send(pack_step(step, self.numbers))
        for handle, _, _ in step.finishes:
            self.numbers.pop(handle, None)

    def send(self, frame: EngineFrame) -> None:
        if len(self._frames) >= _MAX_FRAMES:
            self.fail(EngineUnavailable(f"the client reads too slowly: {_MAX_FRAMES} frames wait. Attach again."))
            return
        self._frames.append(encode(frame))
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    async def next(self) -> bytes:
        """Waits for a step or the engine's end; ended by the disconnection of the client."""
        while not self._frames:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        return self._frames.popleft()


async def serve_stream(engine: EmbeddedEngine, socket: WebSocket) -> None:
    """Until the client leaves, which aborts its requests, or the engine ends."""
    await socket.accept()
    outlet = StreamOutlet()
    number = engine.open_outlet(outlet)
    outlet.send(Hello(engine.name, engine.capabilities))
    try:
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(_send_all(outlet, socket))
            # Losses end the task group without an error: an error in it could hide a cancellation that comes at the same time.
            with contextlib.suppress(WebSocketDisconnect, EngineUnavailable, msgspec.DecodeError):
                await _receive_all(engine, outlet, number, socket)
            sending.cancel()
    finally:
        engine.close_outlet(number, frozenset(outlet.numbers))


async def _send_all(outlet: StreamOutlet, socket: WebSocket) -> None:
    """Waits for frames; ended by the end of the engine, which closes the socket, or of the connection."""
    # Starlette raises RuntimeError when it sends on a socket that is closed already.
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        try:
            while True:
                await socket.send_bytes(await outlet.next())
        except EngineUnavailable as error:
            await socket.close(code=1011, reason=str(error)[:100])


async def _receive_all(engine: EmbeddedEngine, outlet: StreamOutlet, number: int, socket: WebSocket) -> None:
    """Waits for the client's frames; ended by `WebSocketDisconnect`."""
    while True:
        frame = decode_client_frame(await socket.receive_bytes())
        match frame:
            case Submit(handle=handle, request=request):
                try:
                    outlet.numbers[engine.submit(request, outlet=number)] = handle
                except RequestRejected as error:
                    outlet.send(Rejected(handle, error.code, str(error), error.param))
            case Abort(handle=handle):
                engine.abort_handles(frozenset(inner for inner, outer in outlet.numbers.items() if outer == handle))
