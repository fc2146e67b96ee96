"""An engine in another process, reached over HTTP and one WebSocket."""

import asyncio
import contextlib
import itertools
import json
import logging
import time
from collections.abc import Sequence
from typing import TypeVar

import aiohttp
import msgspec

from midflight import types
from midflight.engines import wire
from midflight.engines.streams import ChunkStream, ChunkStreams
from midflight.errors import EngineError, EngineUnavailable, MidflightError, Stopping
from midflight.sender_clock import SenderClock
from midflight.types.facts import EngineStepped, Record
from midflight.wire.client import LOSSES, HttpAnswer, HttpClient

_log = logging.getLogger(__name__)
R = TypeVar("R")
_FIRST_DELAY = 0.05
_LONGEST_DELAY = 2.0
"""Seconds between attempts to attach. They are short enough not to be noticed after a restart, and
long enough to cost nothing meanwhile.
"""
_HEARTBEAT_SECONDS = 120.0
"""The time between two pings. A peer that has not answered a ping after half of it is gone. No
engine's life depends on it: requests leave a silent engine earlier (`HealthWatch`), a process that
dies closes its connection at once, and a process that is only late answers in time.
"""
_MAX_OUTBOX = 65_536
"""The limit of frames not yet sent. It is more than any gateway has requests, and beyond it the
connection is as good as lost.
"""
_LOSSES = (*LOSSES, msgspec.DecodeError, EngineUnavailable)
"""Ways to lose a connection. Anything else is a fault of ours and ends `run`."""


class RemoteEngine:
    """Implements the engine port over the wire. `run` holds the connection. While there is no
    connection, requests raise `EngineUnavailable`.
    """

    def __init__(self, name: str, url: str, *, token: str | None, record: Record) -> None:
        self._name = name
        self._url = url
        self._record = record
        self._http = HttpClient(url, lost=self._unavailable, token=token)
        self._capabilities: types.Capabilities | None = None
        self._outbox: _SendQueue | None = None
        self._attached = asyncio.Event()
        self._streams = ChunkStreams()
        self._counter = itertools.count(1)
        self._clock = SenderClock()

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> types.Capabilities:
        """The capabilities that the engine stated when it was last attached."""
        if self._capabilities is None:
            raise self._unavailable("has not been attached yet")
        return self._capabilities

    @property
    def is_attached(self) -> bool:
        return self._attached.is_set()

    async def run(self) -> None:
        """Attaches, and attaches again whenever the connection is lost, until cancelled."""
        async with self._http:
            await self._stay_attached()

    async def connect(self, *, seconds: float | None = None) -> None:
        """Waits until `run` has attached. Raises `EngineUnavailable` after `seconds`, if there is
        such a limit.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._attached.wait()
        except TimeoutError as error:
            raise self._unavailable(f"did not answer within {seconds:g} s") from error

    # --- Requests ---------------------------------------------------------------------------------

    def generate(self, request: types.GenerateRequest) -> ChunkStream:
        """Sends the request when it is first iterated, and aborts it when it is closed before its
        end. Each wait is for a step of the engine, or for the loss of the connection, which raises
        `EngineUnavailable`.
        """
        handle = next(self._counter)

        def submit(stream: ChunkStream) -> None:
            self._streams.open(handle, stream)
            self._send(wire.Submit(handle, request))

        def abort() -> None:
            if self._streams.close(handle):
                with contextlib.suppress(EngineUnavailable):
                    self._send(wire.Abort(handle))

        return ChunkStream(eager=request.eager, on_open=submit, on_close=abort)

    async def abort(self, request_id: str | None) -> None:
        body = {"abort_all": True} if request_id is None else {"rid": request_id}
        await self._post("/abort", body)

    async def score(
        self, token_ids: types.Int32, row_offsets: types.Int32, *, temperature: float
    ) -> types.Float32:
        """Implements the port's `Scorer`. Waits until the engine is attached, after a restart if
        need be, and then for its answer. The caller's deadline ends the wait.
        """
        await self._attached.wait()
        body = wire.encode_rows(token_ids, row_offsets, temperature=temperature)
        content = await self._request("POST", "/score", body)
        return wire.decode_scores(content, num_tokens=len(token_ids))

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, top: int
    ) -> Sequence[types.Likely]:
        """Implements the port's `PromptScorer`. Waits for the engine's answer. The caller's
        deadline ends the wait.
        """
        content = await self._post("/prompt_logprobs", {"token_ids": token_ids, "top": top})
        return _decoded(content, list[types.Likely])

    # --- Pauses and weights -----------------------------------------------------------------------

    async def pause(self, mode: types.PauseMode) -> None:
        await self._post("/pause", {"mode": mode.value})

    async def resume(self) -> None:
        await self._post("/resume", {})

    async def sleep(self) -> None:
        """Implements the port's `Sleeper`, for an engine that can."""
        await self._post("/sleep", {})

    async def wake(self, part: types.MemoryPart) -> None:
        await self._post("/wake", {"part": part.value})

    async def stage(self, manifest: types.WeightManifest) -> None:
        await self._post("/stage", manifest)

    async def commit(self, version: types.Version) -> types.Attestation:
        return _decoded(await self._post("/commit", {"version": version}), types.Attestation)

    async def health(self) -> types.EngineHealth:
        return _decoded(await self._request("GET", "/health"), types.EngineHealth)

    async def _post(self, path: str, body: object) -> bytes:
        return await self._request("POST", path, msgspec.json.encode(body))

    async def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Waits for the answer. A lost connection raises `EngineUnavailable`. An error answer
        raises the error that it names.

        Without a connection nothing is asked, because a frozen process still accepts connections
        and would never answer. The heartbeat ends a connection that is dead. The deadline of the
        answer is the caller's.
        """
        if not self._attached.is_set():
            raise self._unavailable("is not attached")
        answer = await self._http.call(method, wire.PREFIX + path, body)
        if answer.status >= 400:
            raise _refusal(self._name, path, answer)
        return answer.content

    # --- The connection ---------------------------------------------------------------------------

    async def _stay_attached(self) -> None:
        delay = _FIRST_DELAY
        while True:
            try:
                async with self._http.socket(
                    wire.STREAM_PATH, heartbeat_seconds=_HEARTBEAT_SECONDS
                ) as socket:
                    delay = _FIRST_DELAY
                    await self._talk(socket)
            except _LOSSES as error:
                _log.debug(
                    "engine %s at %s: %r; attaching again in %g s",
                    self._name,
                    self._url,
                    error,
                    delay,
                )
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY)

    async def _talk(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Sends and receives until the connection ends, which ends every open request at once.

        Losses end the task group without an error: an error in it could hide a cancellation that
        comes at the same time.
        """
        outbox = _SendQueue()
        self._outbox = outbox
        self._clock = SenderClock()  # this life of the engine may be on another machine
        error = self._unavailable("was cut off")
        try:
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(_send_all(outbox, socket))
                # In a task of its own, so that a frame does not pass through all the coroutines
                # that wait for the connection's end.
                receiving = tasks.create_task(self._receive_all(socket))
                receiving.add_done_callback(lambda _: sending.cancel())
            raise error
        finally:
            self._outbox = None
            self._attached.clear()
            self._streams.fail(error)

    async def _receive_all(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Waits for frames of the engine until the connection ends. `_talk` handles its loss."""
        with contextlib.suppress(*_LOSSES):
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    continue
                frame = wire.decode_engine_frame(message.data)
                if isinstance(frame, wire.StepFrame):
                    self._take_step(frame)
                elif isinstance(frame, wire.Rejected):
                    error = wire.error_from(
                        frame.code, frame.message, frame.param, frame.retry_after_seconds
                    )
                    self._streams.reject(frame.handle, error)
                else:
                    self._capabilities = frame.capabilities
                    self._attached.set()

    def _take_step(self, frame: wire.StepFrame) -> None:
        rows = wire.step_rows(frame)
        tops = wire.step_tops(frame) if frame.top_ids else ()
        kept = wire.step_kept(frame) if frame.kept_lengths else ()
        self._streams.take(
            frame.version,
            rows,
            tops,
            kept,
            finishes=frame.finishes,
            attested=frame.attested,
            experts=frame.experts,
            key_runs=frame.key_runs,
        )
        if frame.num_running:
            shift = self._clock.shift(frame.ended, now=time.monotonic())
            started = frame.started + shift
            ended = frame.ended + shift
            self._record(EngineStepped(self._name, started, ended, len(rows), frame.num_running))

    def _send(self, frame: wire.ClientFrame) -> None:
        """Sends a frame later. It is packed at once, so that a frame which cannot be packed costs
        its request alone (`RequestRejected`).
        """
        if self._outbox is None or not self._attached.is_set():
            raise self._unavailable("is not attached")
        packed = wire.pack_client_frame(frame)
        if not self._outbox.put(packed):
            raise self._unavailable("takes no more requests")

    def _unavailable(self, what: str) -> EngineUnavailable:
        return EngineUnavailable(
            f"engine {self._name!r} at {self._url} {what}. Send the request to another engine, or "
            "wait for this one."
        )


class _SendQueue:
    """Frames that wait to be sent. All of them go in one message."""

    def __init__(self) -> None:
        self._frames: list[msgspec.Raw] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, frame: msgspec.Raw) -> bool:
        """Adds a frame. Returns whether there was room."""
        if len(self._frames) >= _MAX_OUTBOX:
            return False
        self._frames.append(frame)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return True

    async def take(self) -> list[msgspec.Raw]:
        """Waits until `put` adds a frame, and returns it."""
        if not self._frames:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        frames = self._frames
        self._frames = []
        return frames


async def _send_all(outbox: _SendQueue, socket: aiohttp.ClientWebSocketResponse) -> None:
    """Waits for frames to send until `_receive_all` has ended, which also notices a lost
    connection.
    """
    with contextlib.suppress(*_LOSSES):
        while True:
            await socket.send_bytes(wire.encode(await outbox.take()))


def _decoded(content: bytes, kind: type[R]) -> R:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise EngineUnavailable(
            f"reading an engine's answer: {content[:80]!r} is not a {kind.__name__} ({error}). "
            "Check its URL."
        ) from error


def _refusal(name: str, path: str, answer: HttpAnswer) -> Exception:
    """The error of an answer in OpenAI's shape."""
    try:
        body = json.loads(answer.content)["error"]
        if body["code"] == Stopping.code:  # the engine is stopping, and not this process
            return EngineUnavailable(
                f"engine {name!r} did not answer {wire.PREFIX + path}: {body['message']}"
            )
        if body["code"] == MidflightError.code:
            return EngineError(f"engine {name!r}: {path}: {body['message']}")
        return wire.error_from(str(body["code"]), str(body["message"]), body.get("param"))
    except (ValueError, KeyError, TypeError):
        return EngineError(
            f"engine {name!r}: {path} answered {answer.status} {answer.content[:200]!r}. Check "
            "that the URL is an engine's."
        )
