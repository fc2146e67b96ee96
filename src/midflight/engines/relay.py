"""The engine's end of the multiplexed wire: what its requests get in one moment is one frame."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from midflight.engines.wire import Abort, EngineFrame, Hello, Rejected, Submit, can_carry, decode_client_frames, encode, pack_chunks
from midflight.errors import EngineUnavailable, MidflightError, Overloaded, RequestRejected
from midflight.ports import Engine
from midflight.text.tokenizer import Tokenizer
from midflight.types import Chunk, EngineHealth, GenerateRequest


class ServedEngine(Engine, Protocol):
    @property
    def tokenizer(self) -> Tokenizer: ...
    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """As the port has it; it must be closable, because clients leave."""
        ...

    def reading(self) -> EngineHealth:
        """The present numbers, at once, also of an engine that has ended."""
        ...


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


async def relay(engine: ServedEngine, socket: WebSocket) -> None:
    """Until the client leaves or lags too far behind, which closes the streams of its requests."""
    await socket.accept()
    client = _Client(engine)
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(client.outbox.drain(socket))
        # Losses end the task group without an error: an error in it could hide a cancellation that comes at the same time.
        with contextlib.suppress(WebSocketDisconnect, msgspec.DecodeError):
            await client.receive_all(socket, tasks)
        sending.cancel()
        client.abort_all()


class _Client:
    """One client's requests, each read by a task of its own; their chunks gather until the event loop has been round once."""

    def __init__(self, engine: ServedEngine) -> None:
        self.outbox = Outbox()
        self.outbox.send(Hello(engine.name, engine.capabilities))
        self._engine = engine
        self._running: dict[int, asyncio.Task[None]] = {}
        """By the client's number."""
        self._gathered: list[tuple[int, Chunk]] = []
        """Of one version, in order of arrival."""
        self._since = 0.0
        """When the work began whose tokens the next frame brings: at the last frame, or at the first request after a rest."""

    async def receive_all(self, socket: WebSocket, tasks: asyncio.TaskGroup) -> None:
        """Waits for the client's frames; ended by `WebSocketDisconnect`."""
        while True:
            for frame in decode_client_frames(await socket.receive_bytes()):
                match frame:
                    case Submit(handle=handle, request=request):
                        self._start(handle, request, tasks)
                    case Abort(handle=handle) if handle in self._running:
                        self._running[handle].cancel()
                    case Abort():
                        pass

    def abort_all(self) -> None:
        for task in self._running.values():
            task.cancel()

    def _start(self, handle: int, request: GenerateRequest, tasks: asyncio.TaskGroup) -> None:
        if not self._running:
            self._since = asyncio.get_running_loop().time()
        task = self._running[handle] = tasks.create_task(self._read(handle, request))
        task.add_done_callback(lambda _: self._running.pop(handle, None))

    async def _read(self, handle: int, request: GenerateRequest) -> None:
        """Waits for the engine's chunks; ended by the last of them, an error, the client's abort or its disconnection."""
        try:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    self._gather(handle, chunk)
                    if chunk.finish is not None:
                        return
            raise EngineUnavailable("reading an engine's stream: it ended without a finish. Check the engine and its adapter.")
        except MidflightError as error:
            self._flush()
            self.outbox.reject(handle, error)

    def _gather(self, handle: int, chunk: Chunk) -> None:
        if not can_carry(chunk):
            raise EngineUnavailable(f"reading a chunk of {len(chunk.token_ids)} tokens: it is malformed. Check the engine and its adapter.")
        if self._gathered and self._gathered[0][1].version != chunk.version:
            self._flush()
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._flush)
        self._gathered.append((handle, chunk))

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered:
            started, self._since = self._since, asyncio.get_running_loop().time()
            self.outbox.send(pack_chunks(gathered, started=started, ended=self._since, num_running=len(self._running)))
