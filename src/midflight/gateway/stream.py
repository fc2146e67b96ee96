"""An answer as server-sent events."""

from __future__ import annotations

import asyncio

from starlette.types import Send

from midflight.gateway.call import Answer, Event
from midflight.gateway.dialects.exchange import Dialect, Exchange, Reply
from midflight.gateway.faults import log_unexpected
from midflight.gateway.gateway import Gateway
from midflight.gateway.wire import send_more, sse, start_stream
from midflight.types import Json

KEEP_ALIVE_SECONDS = 10.0
"""Silence after which a comment is sent: proxies and clients cut connections that say nothing, often after 30 s."""


class Outbox:
    """Events between generation and client. Bounded by the token budget of the job: a slow client never slows an engine."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._changed = asyncio.Event()
        self.ended = False
        self.error: Exception | None = None

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        self.ended, self.error = True, error
        self._changed.set()

    def take(self) -> list[Event]:
        taken, self._events = self._events, []
        self._changed.clear()
        return taken

    async def wait(self, seconds: float) -> bool:
        """Waits for events or the end, `seconds` at most; says whether there is something."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True


class AnswerStream:
    """Runs one streaming job. Nothing is sent before the first event, so that an early error still gets its own status."""

    def __init__(self, gateway: Gateway, dialect: Dialect, exchange: Exchange, reply: Reply) -> None:
        self._gateway = gateway
        self._dialect = dialect
        self._exchange = exchange
        self._reply = reply
        self._outbox = Outbox()
        self._answers: list[Answer] = []
        self._started = False

    async def run(self, send: Send) -> None:
        """Waits for the generation and writes it; ended by it, or by the caller's cancellation. Raises an error that came
        before the stream began; a later one is its last event, and is reported to the gateway."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._generate(), name=f"generate {self._reply.job.request_id}")
                await self._write(send)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if self._outbox.error is not None and not self._started:
            raise self._outbox.error

    async def _generate(self) -> None:
        try:
            await self._gateway.run(self._reply.job, self._outbox.put)
        except Exception as error:  # told to the client by `_write`
            self._outbox.end(error)
        else:
            self._outbox.end()

    async def _write(self, send: Send) -> None:
        """Waits for events (or their silence) and sends what there is, until the end."""
        while not self._outbox.ended:
            spoken = await self._outbox.wait(KEEP_ALIVE_SECONDS)
            events = self._outbox.take()
            if events or not spoken:
                frames = self._frames(events) if spoken else b": waiting\n\n"
                await self._send(send, frames)
        rest = self._frames(self._outbox.take())
        if self._outbox.error is None:
            await self._send(send, rest + self._closing(), last=True)
        elif self._started:
            log_unexpected(self._outbox.error)
            self._gateway.failed(self._reply.job.session, self._outbox.error)
            await self._send(send, rest + self._sse(self._dialect.fault(self._outbox.error).body), last=True)

    async def _send(self, send: Send, frames: bytes, *, last: bool = False) -> None:
        if not self._started:
            self._started = True
            await start_stream(send)
            frames = b"".join(self._sse(frame) for frame in self._exchange.opening(self._reply)) + frames
        await send_more(send, frames, last=last)

    def _frames(self, events: list[Event]) -> bytes:
        self._answers += [event for event in events if isinstance(event, Answer)]
        return b"".join(self._sse(frame) for event in events for frame in self._exchange.frames(self._reply, event))

    def _closing(self) -> bytes:
        answers = sorted(self._answers, key=lambda answer: answer.choice)
        closing = b"".join(self._sse(frame) for frame in self._exchange.closing(self._reply, answers))
        return closing if self._dialect.named_events else closing + b"data: [DONE]\n\n"

    def _sse(self, frame: Json) -> bytes:
        return sse(frame, named=self._dialect.named_events)
