"""The sending of answers, whole or as server-sent events."""

import asyncio
from collections.abc import Callable

from starlette.types import Send

from midflight.gateway.answers.answer import Event
from midflight.gateway.answers.readers import Reader
from midflight.gateway.dialects.exchange import Dialect, Exchange, Reply
from midflight.types import Json
from midflight.wire import edge

KEEP_ALIVE_SECONDS = 10.0
"""The silence after which `Dialect.waiting` is sent. Proxies and clients close silent connections, often
after 30 s.
"""


class WholeAnswer:
    """Sends the answer as one body, after its end."""

    def __init__(self, reader: Reader, exchange: Exchange, reply: Reply) -> None:
        self._reader = reader
        self._exchange = exchange
        self._reply = reply
        self.started = False
        """True if something was sent. Then an error can no longer have a status of its own."""

    async def tell(self, send: Send) -> None:
        """Waits for the end of the answer and sends it. The client's disconnection ends the wait
        too. An error is left to the caller.
        """
        await self._reader.wait_for_end()
        ongoing = self._reader.ongoing
        if ongoing.error is None and not self._reader.gone:
            body = self._exchange.whole(self._reply, ongoing.job.answers)
            self.started = True
            await edge.send_json(send, body, headers=self._reply.headers)
            self._reader.told_all()


class KeepAlive:
    """Wakes a reader after every `KEEP_ALIVE_SECONDS` in which nothing was sent. Its timer is only
    reset when it fires.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._loop = asyncio.get_running_loop()
        self.time = self._loop.time
        self.since = self.time()
        """The time when something was sent last."""
        self._timer = self._loop.call_at(self.since + KEEP_ALIVE_SECONDS, self._ring)

    @property
    def is_long(self) -> bool:
        return self._loop.time() >= self.since + KEEP_ALIVE_SECONDS

    def stop(self) -> None:
        self._timer.cancel()

    def _ring(self) -> None:
        start = self.since
        if self.is_long:
            self._reader.wake()
            start = self._loop.time()
        self._timer = self._loop.call_at(start + KEEP_ALIVE_SECONDS, self._ring)


class AnswerStream:
    """Sends the answer while it is generated. Nothing is sent before the first event, so that an
    early error still gets its own status.
    """

    def __init__(
        self,
        reader: Reader,
        exchange: Exchange,
        reply: Reply,
        *,
        dialect: Dialect,
        failed: Callable[[Exception], None],
    ) -> None:
        """`failed` is called with an error before the error is sent to the client."""
        self._reader = reader
        self._exchange = exchange
        self._reply = reply
        self._dialect = dialect
        self._failed = failed
        self.started = False
        """See `WholeAnswer`."""

    async def tell(self, send: Send) -> None:
        """Waits for news and sends them, until the answer ends or the client disconnects. An error
        before the start is left to the caller; a later one is the last event.
        """
        reader = self._reader
        ongoing = self._reader.ongoing
        silence = KeepAlive(reader)
        try:
            while not reader.gone:
                await reader.news()
                events = reader.take()
                ended = ongoing.ended
                if ended:
                    break
                frames = self._frames(events)
                if frames or (events and not self.started):
                    await self._send(send, frames)
                    silence.since = silence.time()
                    reader.tell = self._at_once(send, silence)
                elif silence.is_long:
                    await self._send(send, self._dialect.waiting)
                    silence.since = silence.time()
            else:
                return
        finally:
            silence.stop()
            reader.tell = None
        if ongoing.error is None:
            await self._send(send, self._frames(events) + self._closing(), last=True)
        elif self.started and not reader.gone:
            self._failed(ongoing.error)
            await self._send(send, self._frames(events) + self._broken(ongoing.error), last=True)
        else:
            return
        reader.told_all()

    def _at_once(self, send: Send, silence: KeepAlive) -> Callable[[], None] | None:
        """A function that sends news while `tell` waits for them, until the client does not keep
        up. `None` if the server cannot send this way.
        """
        push: Callable[[bytes], bool] = getattr(send, "push", bool)
        reader = self._reader

        def tell() -> None:
            frames = self._frames(reader.take())
            if not frames:
                return
            silence.since = silence.time()
            if not push(frames):
                reader.tell = None

        return tell if push(b"") else None

    async def _send(self, send: Send, frames: bytes, *, last: bool = False) -> None:
        if not self.started:
            self.started = True
            await edge.start_stream(send, headers=self._reply.headers)
            opening = b"".join(self._sse(frame) for frame in self._exchange.opening(self._reply))
            frames = opening + frames
        if frames or last:
            await edge.send_more(send, frames, last=last)

    def _frames(self, events: list[Event]) -> bytes:
        named = self._dialect.named_events
        exchange = self._exchange
        reply = self._reply
        frames: list[bytes] = []
        for event in events:
            for frame in exchange.frames(reply, event):
                frames.append(frame if isinstance(frame, bytes) else edge.sse(frame, named=named))
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _closing(self) -> bytes:
        answers = self._reader.ongoing.job.answers
        frames = self._exchange.closing(self._reply, answers)
        return b"".join(self._sse(frame) for frame in frames) + self._dialect.done

    def _broken(self, error: Exception) -> bytes:
        return self._sse(self._dialect.broken(self._exchange, self._dialect.fault(error)))

    def _sse(self, frame: "Json | bytes") -> bytes:
        if isinstance(frame, bytes):
            return frame
        return edge.sse(frame, named=self._dialect.named_events)
