"""The embedded engine's end of the multiplexed wire: each decode step is one frame."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.relay import Outbox
from midflight.engines.streams import StepOutput
from midflight.engines.wire import Abort, Hello, Submit, decode_client_frames, pack_step
from midflight.errors import EngineUnavailable, RequestRejected
from midflight.types import GenerateRequest


class StreamOutlet:
    """An outlet that packs each step into one frame. Requests carry the client's numbers outside, the engine's handles inside."""

    def __init__(self) -> None:
        self.frames = Outbox()
        self.numbers: dict[int, int] = {}
        """The client's number of each live handle."""
        self.compiling: dict[int, asyncio.Task[None]] = {}
        """By the client's number, requests whose grammar is being compiled."""

    def put(self, step: StepOutput) -> None:
        self.frames.send(pack_step(step, self.numbers))
        for handle, _, _ in step.finishes:
            self.numbers.pop(handle, None)
        for handle, _, error in step.failures:
            self.frames.reject(self.numbers.pop(handle), error)

    def fail(self, error: Exception) -> None:
        self.frames.fail(error)


async def serve_stream(engine: EmbeddedEngine, socket: WebSocket) -> None:
    """Until the client leaves, which aborts its requests, or the engine ends."""
    await socket.accept()
    outlet = StreamOutlet()
    number = engine.open_outlet(outlet)
    outlet.frames.send(Hello(engine.name, engine.capabilities))
    try:
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(outlet.frames.drain(socket))
            # Losses end the task group without an error: an error in it could hide a cancellation that comes at the same time.
            with contextlib.suppress(WebSocketDisconnect, EngineUnavailable, msgspec.DecodeError):
                await _receive_all(engine, outlet, number, socket, tasks)
            for task in (sending, *outlet.compiling.values()):
                task.cancel()
    finally:
        engine.close_outlet(number, frozenset(outlet.numbers))


async def _receive_all(engine: EmbeddedEngine, outlet: StreamOutlet, number: int, socket: WebSocket, tasks: asyncio.TaskGroup) -> None:
    """Waits for the client's frames; ended by `WebSocketDisconnect`. What waits for its grammar does so in a task of `tasks`."""
    while True:
        for frame in decode_client_frames(await socket.receive_bytes()):
            match frame:
                case Submit(handle=handle, request=request) if request.sampling.grammar is None:
                    await _submit(engine, outlet, number, handle, request)
                case Submit(handle=handle, request=request):
                    task = outlet.compiling[handle] = tasks.create_task(_compile(engine, outlet, number, handle, request))
                    task.add_done_callback(lambda _, done=handle: outlet.compiling.pop(done, None))
                case Abort(handle=handle) if handle in outlet.compiling:
                    outlet.compiling[handle].cancel()
                case Abort(handle=handle):
                    engine.abort_handles(frozenset(inner for inner, outer in outlet.numbers.items() if outer == handle))


async def _compile(engine: EmbeddedEngine, outlet: StreamOutlet, number: int, handle: int, request: GenerateRequest) -> None:
    """Waits for the grammar; ended by the client's abort or its disconnection. What an ended engine means is for the sender to say."""
    with contextlib.suppress(EngineUnavailable):
        await _submit(engine, outlet, number, handle, request)


async def _submit(engine: EmbeddedEngine, outlet: StreamOutlet, number: int, handle: int, request: GenerateRequest) -> None:
    """Waits for what `prepared` waits for. A refusal is an answer."""
    try:
        submission = await engine.prepared(request, outlet=number)
        engine.submit(submission)
        outlet.numbers[submission.handle] = handle
    except RequestRejected as error:
        outlet.frames.reject(handle, error)
