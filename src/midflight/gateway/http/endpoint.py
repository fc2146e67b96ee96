"""The endpoint of one dialect: it reads a request, starts its generation and sends the answer."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Self, cast
from weakref import WeakKeyDictionary

from starlette.types import Receive, Scope, Send

from midflight.errors import RequestRejected, first_error
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.readers import Ongoing, Reader, Requests, RetryTicket, retry_ticket
from midflight.gateway.dialects import resent
from midflight.gateway.dialects.exchange import Dialect, Exchange, Reply, ResumableExchange
from midflight.gateway.dialects.resent import KnownBodies, SentMessages
from midflight.gateway.http.answer_stream import AnswerStream, WholeAnswer
from midflight.gateway.sessions.request_clock import OpenRequest
from midflight.gateway.sessions.seams import Seam
from midflight.gateway.sessions.session import Session
from midflight.wire import edge

WATCH_AFTER_SECONDS = 0.02
"""An answer within this time is sent without checking whether the client is still connected,
because the check costs more.
"""


class CompletionEndpoint:
    """The route of one dialect."""

    def __init__(self, gateway: Gateway, dialect: Dialect, *, now: Callable[[], float]) -> None:
        self._gateway = gateway
        self._requests: Requests = gateway.requests
        self._dialect = dialect
        self._now = now
        self._known: WeakKeyDictionary[Session, KnownBodies] = WeakKeyDictionary()
        """The last bodies of the sessions whose agents send the whole conversation again."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits for the body, then for the answer. The client's disconnection ends these waits. The
        visit of the first client lasts until the generation ends, even if the client has left (see
        `Ongoing`).
        """
        session: Session | None = None
        request: OpenRequest | None = None
        try:
            headers = edge.headers_of(scope)
            key = edge.key_of(scope)
            session = self._gateway.session_for(
                path_token=scope["path_params"].get("token"), api_key=key
            )
            request = session.clock.begin()
            body = await edge.read_body(receive, declared=headers.get(b"content-length"))
            exchange = self._exchange(scope, body, session, key=key)
            if exchange.unread.fields or exchange.unread.refusal is not None:
                self._gateway.pass_over(exchange.unread, path=self._dialect.path)
            await self._gateway.check_lengths(exchange.call, num_bytes=_num_new(exchange, body))
            session_id = session.known_as if session.key is not None else None
            asked = retry_ticket(
                headers, session_id=session_id, api_key=key, path=self._dialect.path, body=body
            )
            original = self._requests.find(asked, now=_loop_time())
            ongoing = original or self._begin(session, exchange, asked, body)
            await self._visit(
                ongoing,
                exchange,
                ongoing.join(request),
                generates=original is None,
                receive=receive,
                send=send,
            )
        except edge.ClientGone:
            return
        except Exception as error:  # the edge: every error becomes an answer
            self._failed(session, error)
            await edge.send_fault(send, self._dialect.fault(error))
        finally:
            if request is not None:
                request.end()

    def _exchange(
        self, scope: Scope, body: bytes, session: Session, *, key: str | None
    ) -> Exchange:
        """Parses the request, as its dialect does. Raises `RequestRejected`."""
        dialect = self._dialect
        if dialect.keeping is not None:
            return dialect.keeping(body, self._gateway.kept_for(session, key))
        if dialect.addressed is not None:
            return dialect.addressed(body, edge.query_of(scope) | scope["path_params"])
        return self._resumed(session, body) or dialect.exchange(body)

    def _resumed(self, session: Session, body: bytes) -> Exchange | None:
        """The request of a body that begins as an earlier one of its session did. `None` if all of
        the body must be read.
        """
        resumed = self._dialect.resumed
        known = self._known.get(session) if resumed is not None else None
        found = known.find(body) if known is not None else None
        if resumed is not None and found is not None:
            try:
                return resumed(body, found)
            except RequestRejected:
                return None  # the whole body says what is wrong with it, and where
        return None

    def _failed(self, session: Session | None, error: Exception) -> None:
        edge.log_unexpected(error)
        self._gateway.failed(session, error)

    def _begin(
        self, session: Session, exchange: Exchange, asked: RetryTicket | None, body: bytes
    ) -> Ongoing:
        self._requests.check_room()
        resumable = self._dialect.resumed is not None and session.key is not None
        resumable = resumable and len(body) >= resent.LEAST_BYTES
        if resumable:
            session.keep_seams()
        job = self._gateway.prepare(session, exchange.call)
        seam = job.answers[0].prompt.seam
        if resumable and isinstance(seam, Seam):
            known = self._known.setdefault(session, KnownBodies())
            known.keep(body, cast(ResumableExchange, exchange).sent, seam)
        if job.loose:
            self._gateway.pass_over(exchange.unread.also("tools.strict"), path=self._dialect.path)
        ongoing = Ongoing(
            job,
            created=int(self._now()),
            orphan_seconds=self._requests.orphan_seconds if asked is not None else 0.0,
        )
        self._requests.begin(ongoing, asked)
        return ongoing

    async def _visit(
        self,
        ongoing: Ongoing,
        exchange: Exchange,
        reader: Reader,
        *,
        generates: bool,
        receive: Receive,
        send: Send,
    ) -> None:
        """Waits until the client has received the answer or disconnected, and for the generation if
        this visit `generates`. An error before the first byte is raised; a later one is the
        stream's last event.
        """
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if exchange.unread.fields or ongoing.job.headers:
            headers = (*exchange.unread.headers(), *ongoing.job.headers)
        reply = Reply(
            ongoing.job, self._gateway.model, ongoing.created, self._gateway.tokenizer, headers
        )
        streams = exchange.call.stream
        telling: AnswerStream | WholeAnswer
        if streams:
            telling = self._stream(reader, exchange, reply)
        else:
            telling = WholeAnswer(reader, exchange, reply)
        try:
            async with asyncio.TaskGroup() as tasks:
                with DisconnectWatch(tasks, receive, reader) as watch:
                    told: asyncio.Task[None] | None = None
                    if generates and streams:
                        told = tasks.create_task(telling.tell(send), name="tell")
                        await tasks.create_task(self._gateway.run(ongoing), name="generate")
                    elif generates:
                        await self._gateway.run(ongoing)
                    if ongoing.error is not None:
                        await watch.look()
                    await (told or telling.tell(send))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            ongoing.leave(reader)
            self._requests.settle(ongoing, now=_loop_time())
        if ongoing.error is not None and not telling.started and not reader.gone:
            raise ongoing.error

    def _stream(self, reader: Reader, exchange: Exchange, reply: Reply) -> AnswerStream:
        return AnswerStream(
            reader,
            exchange,
            reply,
            dialect=self._dialect,
            failed=partial(self._failed, reply.job.session),
        )


class DisconnectWatch:
    """Tells a reader when its client disconnects. A context manager. Most answers come before its
    task begins, so they cost no task.
    """

    def __init__(self, tasks: asyncio.TaskGroup, receive: Receive, reader: Reader) -> None:
        self._tasks = tasks
        self._receive = receive
        self._reader = reader
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_SECONDS, self._begin)

    async def look(self) -> None:
        """Notices a client that has disconnected already. After that, errors are not reported to
        the client. Waits for one turn of the event loop."""
        self._end()  # two may not read the client's messages at once
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await self._run()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _end(self) -> None:
        """Stops watching, because the client has received the answer or will not get one."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = self._tasks.create_task(self._run(), name="watch for the client's disconnect")

    async def _run(self) -> None:
        """Waits for the client's disconnection; cancelled when it has received the answer."""
        await edge.until_gone(self._receive)
        self._reader.go()


def _num_new(exchange: Exchange, body: bytes) -> int:
    """The bytes of a body that were read. The prompt of what was read before has been counted."""
    sent: SentMessages | None = getattr(exchange, "sent", None)
    if sent is None or sent.resent is None:
        return len(body)
    return len(sent.resent.short)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
