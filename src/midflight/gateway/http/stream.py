"""How a reader is told an answer: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Send

from midflight.gateway.answers.answer import Event
from midflight.gateway.answers.readers import Reader
from midflight.gateway.dialects.exchange import Dialect, Exchange, Reply
from midflight.types import Json
from midflight.wire.edge import send_json, send_more, sse, start_stream

KEEP_ALIVE_SECONDS = 10.0
"""Silence after which a comment is sent: proxies and clients cut connections that say nothing, often after 30 s."""

_COMMENT = b": waiting\n\n"
_DONE = b"data: [DONE]\n\n"


class WholeAnswer:
    """The answer as one body, after its end."""

    def __init__(self, reader: Reader, exchange: Exchange, reply: Reply) -> None:
        self._reader, self._exchange, self._reply = reader, exchange, reply
        self.started = False
        """Whether something was sent: an error can no longer have a status of its own."""

    async def tell(self, send: Send) -> None:
        """Waits for the end of the answer and sends it; ended by that, or by the client's disconnection. An error is left to the caller."""
        await self._reader.wait_for_end()
        ongoing = self._reader.ongoing
        if ongoing.error is None and not self._reader.gone:
            body = self._exchange.whole(self._reply, ongoing.job.answers)
            self.started = True
            await send_json(send, body)
            self._reader.told_all()


class AnswerStream:
    """The answer as it comes. Nothing is sent before the first event, so that an early error still gets its own status."""

    def __init__(self, reader: Reader, exchange: Exchange, reply: Reply, *, dialect: Dialect, failed: Callable[[Exception], None]) -> None:
        """`failed` is called with an error before the client is told."""
        self._reader, self._exchange, self._reply = reader, exchange, reply
        self._dialect, self._failed = dialect, failed
        self.started = False
        """As in `WholeAnswer`."""

    async def tell(self, send: Send) -> None:
        """Waits for news and sends them; ended by the end of the answer, or by the client's disconnection. An error before the start is
        left to the caller; a later one is the last event."""
        reader, ongoing = self._reader, self._reader.ongoing
        loop, silence = asyncio.get_running_loop(), Silence(reader)
        try:
            while not reader.gone:
                await reader.news()
                events, ended = reader.take(), ongoing.ended
                if ended:
                    break
                frames = self._frames(events)
                if frames or (events and not self.started):
                    await self._send(send, frames)
                    silence.since = loop.time()
                elif silence.is_long:
                    await self._send(send, _COMMENT)
                    silence.since = loop.time()
            else:
                return
        finally:
            silence.stop()
        if ongoing.error is None:
            await self._send(send, self._frames(events) + self._closing(), last=True)
        elif self.started and not reader.gone:
            self._failed(ongoing.error)
            await self._send(send, self._frames(events) + self._broken(ongoing.error), last=True)
        else:
            return
        reader.told_all()

    async def _send(self, send: Send, frames: bytes, *, last: bool = False) -> None:
        if not self.started:
            self.started = True
            await start_stream(send)
            frames = b"".join(self._sse(frame) for frame in self._exchange.opening(self._reply)) + frames
        if frames or last:
            await send_more(send, frames, last=last)

    def _frames(self, events: list[Event]) -> bytes:
        named, exchange, reply = self._dialect.named_events, self._exchange, self._reply
        frames: list[bytes] = []
        for event in events:
            for frame in exchange.frames(reply, event):
                frames.append(sse(frame, named=named))
        return b"".join(frames)

    def _closing(self) -> bytes:
        closing = b"".join(self._sse(frame) for frame in self._exchange.closing(self._reply, self._reader.ongoing.job.answers))
        return closing if self._dialect.named_events else closing + _DONE

    def _broken(self, error: Exception) -> bytes:
        return self._sse(self._dialect.broken(self._exchange, self._dialect.fault(error)))

    def _sse(self, frame: Json) -> bytes:
        return sse(frame, named=self._dialect.named_events)


class Silence:
    """Wakes a reader after every `KEEP_ALIVE_SECONDS` in which nothing was sent. Its timer is set anew only when it rings."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._loop = asyncio.get_running_loop()
        self.since = self._loop.time()
        """When something was sent last."""
        self._timer = self._loop.call_at(self.since + KEEP_ALIVE_SECONDS, self._ring)

    @property
    def is_long(self) -> bool:
        return self._loop.time() >= self.since + KEEP_ALIVE_SECONDS

    def stop(self) -> None:
        self._timer.cancel()

    def _ring(self) -> None:
        is_long = self.is_long
        if is_long:
            self._reader.wake()
        due = (self._loop.time() if is_long else self.since) + KEEP_ALIVE_SECONDS
        self._timer = self._loop.call_at(due, self._ring)
