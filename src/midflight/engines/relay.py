"""An engine's end of the multiplexed wire. All tokens that a client's requests get in one moment
are one frame.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `_WireClient.serve` (one each client) | frames of the client | the next | the client; its leaving ends it |
| `Outbox.drain` | frames to the client | the next | the engine's steps; the engine's end ends it |
| `_ChunkClient._read` (one each request) | chunks of any engine | the next | the engine; an abort, which cancels it |
| `_StepClient._compile` (one each request with a grammar) | nothing | the grammar | the thread that compiles it; an abort, which cancels it |
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from midflight.engines import wire
from midflight.engines.streams import Outlet, StepOutput
from midflight.errors import (
    EngineError,
    EngineUnavailable,
    MidflightError,
    Overloaded,
    RequestRejected,
)
from midflight.ports import Engine
from midflight.text.tokenizer import Tokenizer
from midflight.types import Chunk, EngineHealth, GenerateRequest
from midflight.wire import edge

_MAX_FRAMES = 16_384
"""The number of steps that a client may lag behind. A client that lags more is cut off, so that its
frames do not fill the memory.
"""


class ServedEngine(Engine, Protocol):
    """The port of an engine, and the further methods that it needs to be served over the wire."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Generates as the port says. The iterator must be closable, because clients leave."""
        ...

    def reading(self) -> EngineHealth:
        """The present numbers, at once, also of an engine that has ended."""
        ...


class SteppedEngine(ServedEngine, Protocol):
    """An engine that gives out whole steps to outlets; see `EmbeddedEngine`."""

    def open_outlet(self, outlet: Outlet) -> int: ...
    def close_outlet(self, number: int, handles: frozenset[int]) -> None: ...
    async def submit(self, request: GenerateRequest, *, outlet: int) -> int: ...
    def abort_handles(self, handles: frozenset[int]) -> None: ...


def ignore_work() -> None:
    """Does nothing: no caller wants to hear that an engine works."""


async def relay(
    engine: ServedEngine, socket: WebSocket, *, worked: Callable[[], None] = ignore_work
) -> None:
    """Serves one client of any engine, until the client leaves or lags too far behind. Then the
    streams of its requests are closed. `worked` is called before tokens are sent.
    """
    await _ChunkClient(engine, worked).serve(socket)


async def relay_steps(
    engine: SteppedEngine, socket: WebSocket, *, worked: Callable[[], None] = ignore_work
) -> None:
    """The same for an engine of whole steps. Each step is one frame. It also ends when the engine
    does.
    """
    client = _StepClient(engine, worked)
    try:
        await client.serve(socket)
    finally:
        client.close()


class Outbox:
    """Frames on their way to one client of the wire."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def send(self, frame: wire.EngineFrame) -> None:
        """Sends a frame later. A frame that finds no room is not sent, and no frame after it: the
        client is cut off after the frames before it.
        """
        if self._error is not None:
            return
        if len(self._frames) >= _MAX_FRAMES:
            self.fail(
                EngineUnavailable(
                    f"the client reads too slowly: {_MAX_FRAMES} frames wait. Attach again."
                )
            )
            return
        self._frames.append(wire.encode(frame))
        self._changed.set()

    def reject(self, handle: int, error: Exception) -> None:
        """Ends one request, by the client's number. A fault of ours is logged and costs no other
        request.
        """
        edge.log_unexpected(error)
        if not isinstance(error, MidflightError):
            error = EngineError(f"generating: {edge.FAILED_HERE}")
        param = error.param if isinstance(error, RequestRejected) else None
        retry_after = error.retry_after_seconds if isinstance(error, Overloaded) else None
        self.send(wire.Rejected(handle, error.code, str(error), param, retry_after))

    def fail(self, error: Exception) -> None:
        """Tells the client that the engine has ended, after the frames before that."""
        self._error = error
        self._changed.set()

    async def drain(self, socket: WebSocket) -> None:
        """Waits for frames. It ends with the engine, whose end closes the socket, or with the
        connection.
        """
        # Starlette raises RuntimeError when it sends on a socket that is closed already.
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            while self._frames or self._error is None:
                while self._frames:
                    await socket.send_bytes(self._frames.popleft())
                self._changed.clear()
                if self._error is None:
                    await self._changed.wait()
            await socket.close(code=1011, reason=str(self._error)[:100])


class _WireClient:
    """The connection to one client, which numbers its requests."""

    def __init__(self, engine: ServedEngine, worked: Callable[[], None]) -> None:
        """`worked` is called before tokens are sent."""
        self.worked = worked
        self.outbox = Outbox()
        self.outbox.send(wire.Hello(engine.name, engine.capabilities))
        self.tasks: dict[int, asyncio.Task[None]] = {}
        """The tasks of requests for which something is awaited here, by the client's number."""

    async def serve(self, socket: WebSocket) -> None:
        """Waits for the client's frames, until the client leaves or lags too far behind, or the
        engine ends.
        """
        await socket.accept()
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(self.outbox.drain(socket))
            # Losses end the task group without an error: an error in it could hide a cancellation
            # that comes at the same time.
            with contextlib.suppress(WebSocketDisconnect, EngineUnavailable, msgspec.DecodeError):
                while True:
                    for raw in wire.decode_client_frames(await socket.receive_bytes()):
                        await self._hear(wire.client_frame(raw), tasks)
            sending.cancel()
            for task in self.tasks.values():
                task.cancel()

    async def _hear(
        self, frame: wire.ClientFrame | wire.Rejected, tasks: asyncio.TaskGroup
    ) -> None:
        if isinstance(frame, wire.Submit):
            await self.start(frame.handle, frame.request, tasks)
        elif isinstance(frame, wire.Rejected):
            self.outbox.send(frame)
        elif frame.handle in self.tasks:
            self.tasks[frame.handle].cancel()
        else:
            self.abort(frame)

    async def start(self, number: int, request: GenerateRequest, tasks: asyncio.TaskGroup) -> None:
        """Starts a request. An error of the request is answered and never raised."""
        raise NotImplementedError

    def abort(self, frame: wire.Abort) -> None:
        """Aborts a request for which nothing is awaited here. Such a request has ended, unless the
        engine has it.
        """


class _ChunkClient(_WireClient):
    """A client of any engine. Each request is read by a task of its own, and the chunks of all
    gather until the event loop has been round once.
    """

    def __init__(self, engine: ServedEngine, worked: Callable[[], None]) -> None:
        super().__init__(engine, worked)
        self._engine = engine
        self._gathered: list[tuple[int, Chunk]] = []
        """Chunks of one version with the numbers of their requests, in order of arrival."""
        self._since = 0.0
        """The start of the work on the tokens of the next frame. It is the time of the last frame,
        or of the first request after a rest.
        """

    async def start(self, number: int, request: GenerateRequest, tasks: asyncio.TaskGroup) -> None:
        if not self.tasks:
            self._since = asyncio.get_running_loop().time()
        task = tasks.create_task(self._read(number, request))
        self.tasks[number] = task
        task.add_done_callback(lambda _: self.tasks.pop(number, None))

    async def _read(self, number: int, request: GenerateRequest) -> None:
        """Waits for the engine's chunks. It ends with the last of them, an error, the client's
        abort, or its disconnection.
        """
        try:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    self._gather(number, chunk)
                    if chunk.finish is not None:
                        return
            raise EngineUnavailable(
                "reading an engine's stream: it ended without a finish. Check the engine and its "
                "adapter."
            )
        except Exception as error:  # the edge: every error ends its request
            self._flush()
            self.outbox.reject(number, error)

    def _gather(self, number: int, chunk: Chunk) -> None:
        if not wire.can_carry(chunk):
            raise EngineUnavailable(
                f"reading a chunk of {len(chunk.token_ids)} tokens: it is malformed. Check the "
                "engine and its adapter."
            )
        if self._gathered and self._gathered[0][1].version != chunk.version:
            self._flush()
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._flush)
        self._gathered.append((number, chunk))

    def _flush(self) -> None:
        gathered = self._gathered
        self._gathered = []
        if not gathered:
            return
        self.worked()
        started = self._since
        ended = asyncio.get_running_loop().time()
        self._since = ended
        frame = wire.pack_chunks(
            gathered, started=started, ended=ended, num_running=len(self.tasks)
        )
        self.outbox.send(frame)


class _StepClient(_WireClient):
    """A client of an engine that gives whole steps, as one of its outlets. The engine has the
    requests. Towards the client they have the client's numbers, towards the engine handles.
    """

    def __init__(self, engine: SteppedEngine, worked: Callable[[], None]) -> None:
        super().__init__(engine, worked)
        self._engine = engine
        self._outlet = engine.open_outlet(self)
        self._numbers: dict[int, int] = {}
        """The client's number of each live handle."""

    def put(self, step: StepOutput) -> None:
        if step.handles.size:
            self.worked()
        self.outbox.send(wire.pack_step(step, self._numbers))
        for handle, _, _ in step.finishes:
            self._numbers.pop(handle, None)
        for handle, _, error in step.failures:
            self.outbox.reject(self._numbers.pop(handle), error)

    def fail(self, error: Exception) -> None:
        self.outbox.fail(error)

    def close(self) -> None:
        self._engine.close_outlet(self._outlet, frozenset(self._numbers))

    async def start(self, number: int, request: GenerateRequest, tasks: asyncio.TaskGroup) -> None:
        """Submits a request at once. Only a request with a grammar waits for it, in a task of its
        own.
        """
        if request.sampling.grammar is None:
            await self._submit(number, request)
            return
        task = tasks.create_task(self._compile(number, request))
        self.tasks[number] = task
        task.add_done_callback(lambda _: self.tasks.pop(number, None))

    def abort(self, frame: wire.Abort) -> None:
        handles = [handle for handle, number in self._numbers.items() if number == frame.handle]
        self._engine.abort_handles(frozenset(handles))

    async def _compile(self, number: int, request: GenerateRequest) -> None:
        """Waits for the grammar. The client's abort or disconnection ends the wait. `Outbox.drain`
        tells the client when the engine has ended.
        """
        with contextlib.suppress(EngineUnavailable):
            await self._submit(number, request)

    async def _submit(self, number: int, request: GenerateRequest) -> None:
        """Waits as long as the engine's `submit` does. An error is sent to the client, except for
        the engine's end (`EngineUnavailable`), which is raised.
        """
        try:
            handle = await self._engine.submit(request, outlet=self._outlet)
        except EngineUnavailable:
            raise
        except Exception as error:  # the edge: every other error ends its request
            self.outbox.reject(number, error)
        else:
            self._numbers[handle] = number
