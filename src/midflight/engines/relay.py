"""The end of the multiplexed wire of an engine that is known by its port alone: what its requests get in one moment is one frame."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from midflight.engines.outbox import Outbox
from midflight.engines.served import ServedEngine
from midflight.engines.wire import Abort, Hello, Submit, can_carry, decode_client_frames, pack_chunks
from midflight.errors import EngineUnavailable, MidflightError
from midflight.types import Chunk, GenerateRequest


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
