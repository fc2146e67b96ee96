"""The gateway on HTTP: routes, and answers whole or as server-sent events. All meaning is in
`Gateway`, `Control` and the dialects.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, cast

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from midflight.errors import first_error
from midflight.gateway.answers.answer import Event
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.readers import Ongoing, Reader, Requests, RetryTicket, retry_ticket
from midflight.gateway.dialects.chat import ChatExchange, conversation
from midflight.gateway.dialects.completions import CompletionExchange
from midflight.gateway.dialects.exchange import Dialect, Exchange, Recent, Reply
from midflight.gateway.dialects.messages import MessagesExchange, messages_fault
from midflight.gateway.dialects.native import NativeExchange
from midflight.gateway.dialects.policy import Unread
from midflight.gateway.dialects.responses import ResponsesExchange, broken
from midflight.gateway.dialects.tokens import TokensExchange
from midflight.gateway.http.control import Control, ControlRoutes
from midflight.gateway.http.lookups import Lookups
from midflight.gateway.http.servers import ServerRoutes
from midflight.gateway.sessions.request_clock import OpenRequest
from midflight.gateway.sessions.session import CompletionCall, Messages, Session
from midflight.text import Message
from midflight.types import Json
from midflight.wire import edge
from midflight.wire.routes import fault_answer, json_answer, metrics_route, route

KEEP_ALIVE_SECONDS = 10.0
"""Silence after which a comment is sent: proxies and clients cut connections that say nothing,
often after 30 s.
"""

_COMMENT = b": waiting\n\n"
_DONE = b"data: [DONE]\n\n"


class WholeAnswer:
    """The answer as one body, after its end."""

    def __init__(self, reader: Reader, exchange: Exchange, reply: Reply) -> None:
        self._reader = reader
        self._exchange = exchange
        self._reply = reply
        self.started = False
        """Whether something was sent: an error can no longer have a status of its own."""

    async def tell(self, send: Send) -> None:
        """Waits for the end of the answer and sends it; ended by that, or by the client's
        disconnection. An error is left to the caller.
        """
        await self._reader.wait_for_end()
        ongoing = self._reader.ongoing
        if ongoing.error is None and not self._reader.gone:
            body = self._exchange.whole(self._reply, ongoing.job.answers)
            self.started = True
            await edge.send_json(send, body, headers=self._reply.headers)
            self._reader.told_all()


class Silence:
    """Wakes a reader after every `KEEP_ALIVE_SECONDS` in which nothing was sent. Its timer is set
    anew only when it rings.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._loop = asyncio.get_running_loop()
        self.time = self._loop.time
        self.since = self.time()
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


class AnswerStream:
    """The answer as it comes. Nothing is sent before the first event, so that an early error still
    gets its own status.
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
        """`failed` is called with an error before the client is told."""
        self._reader = reader
        self._exchange = exchange
        self._reply = reply
        self._dialect = dialect
        self._failed = failed
        self.started = False
        """As in `WholeAnswer`."""

    async def tell(self, send: Send) -> None:
        """Waits for news and sends them; ended by the end of the answer, or by the client's
        disconnection. An error before the start is left to the caller; a later one is the last
        event."""
        reader = self._reader
        ongoing = self._reader.ongoing
        silence = Silence(reader)
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
                    await self._send(send, _COMMENT)
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

    def _at_once(self, send: Send, silence: Silence) -> Callable[[], None] | None:
        """What sends news while `tell` waits for them, until the client does not keep up; `None`
        where the server has no way to.
        """
        push: Callable[[bytes], bool] = getattr(send, "push", bool)
        reader = self._reader

        def tell() -> None:
            if frames := self._frames(reader.take()):
                silence.since = silence.time()
                if not push(frames):
                    reader.tell = None

        return tell if push(b"") else None

    async def _send(self, send: Send, frames: bytes, *, last: bool = False) -> None:
        if not self.started:
            self.started = True
            await edge.start_stream(send, headers=self._reply.headers)
            frames = (
                b"".join(self._sse(frame) for frame in self._exchange.opening(self._reply)) + frames
            )
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
        closing = b"".join(
            self._sse(frame)
            for frame in self._exchange.closing(self._reply, self._reader.ongoing.job.answers)
        )
        return closing if self._dialect.named_events else closing + _DONE

    def _broken(self, error: Exception) -> bytes:
        return self._sse(self._dialect.broken(self._exchange, self._dialect.fault(error)))

    def _sse(self, frame: Json) -> bytes:
        return edge.sse(frame, named=self._dialect.named_events)


WATCH_AFTER_SECONDS = 0.02
"""An answer within this time is sent without a look whether the client is still there: the look
costs more.
"""

DIALECTS = (
    Dialect("/v1/chat/completions", Recent(ChatExchange)),
    Dialect("/v1/completions", CompletionExchange),
    Dialect("/v1/messages", MessagesExchange, fault=messages_fault, named_events=True),
    Dialect(
        "/v1/responses",
        ResponsesExchange,
        keeping=ResponsesExchange,
        broken=broken,
        named_events=True,
    ),
    Dialect("/generate", NativeExchange),
    Dialect("/inference/v1/generate", TokensExchange),
)


def build_app(
    gateway: Gateway,
    control: Control,
    *,
    control_token: str | None = None,
    ready: Callable[[], bool] = lambda: True,
    metrics: CollectorRegistry | None = None,
    metrics_token: str | None = None,
    now: Callable[[], float] = time.time,
    extra_routes: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """The ASGI application. `ready`: whether an engine is routable. `control_token` guards pause,
    continue and abort, `metrics_token` the metrics.

    `now` gives Unix seconds for the `created` field, and nothing else.
    """
    endpoints = {
        dialect.path: CompletionEndpoint(gateway, dialect, now=now) for dialect in DIALECTS
    }
    routes: list[BaseRoute] = []
    for prefix in ("/s/{token}", ""):
        routes += [
            Route(prefix + path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()
        ]
    routes += [
        *Lookups(gateway, now=now).routes(),
        *ControlRoutes(control, token=control_token).routes(),
    ]
    servers = ServerRoutes(gateway, control, ready=ready, token=control_token)
    routes += [_health_route(ready), *servers.routes(), *extra_routes, *servers.not_here()]
    if metrics is not None:
        routes.append(metrics_route(metrics, token=metrics_token))
    return Direct(
        endpoints, Starlette(routes=routes, exception_handlers={HTTPException: _http_exception})
    )


class Direct:
    """The routes that agents call, found in one step; every other request goes to `rest`, which
    knows these routes too.
    """

    def __init__(self, endpoints: Mapping[str, ASGIApp], rest: ASGIApp) -> None:
        """`endpoints`: by path, for POST; each is also there under `/s/<token>`."""
        self._endpoints = endpoints
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            path: str = scope["path"]
            params: dict[str, str] = {}
            if path.startswith("/s/"):
                token, slash, rest = path[3:].partition("/")
                path = slash + rest
                params = {"token": token}
            endpoint = self._endpoints.get(path)
            if endpoint is not None and params.get("token") != "":
                scope["path_params"] = params
                await endpoint(scope, receive, send)
                return
        await self._rest(scope, receive, send)


class CompletionEndpoint:
    """One dialect's route."""

    def __init__(self, gateway: Gateway, dialect: Dialect, *, now: Callable[[], float]) -> None:
        self._gateway = gateway
        self._requests: Requests = gateway.requests
        self._dialect = dialect
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits for the body, then for the answer; ended by them, or by the client's disconnection.
        The visit of the client that asks first lasts until the generation ends, read or not (see
        `Ongoing`)."""
        session: Session | None = None
        request: OpenRequest | None = None
        try:
            headers = edge.headers_of(scope)
            key = edge.key_in(headers)
            session = self._gateway.session_for(
                path_token=scope["path_params"].get("token"), api_key=key
            )
            request = session.clock.begin()
            body = await edge.read_body(receive, declared=headers.get(b"content-length"))
            keeping = self._dialect.keeping
            exchange = (
                self._dialect.exchange(body)
                if keeping is None
                else keeping(body, self._gateway.kept_for(session, key))
            )
            if exchange.unread.fields or exchange.unread.refusal is not None:
                self._gateway.pass_over(exchange.unread, path=self._dialect.path)
            await self._gateway.check_lengths(exchange.call, num_bytes=len(body))
            session_id = session.known_as if session.key is not None else None
            asked = retry_ticket(
                headers, session_id=session_id, api_key=key, path=self._dialect.path, body=body
            )
            original = self._requests.find(asked, now=_loop_time())
            ongoing = original or self._begin(session, exchange, asked)
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

    def _failed(self, session: Session | None, error: Exception) -> None:
        edge.log_unexpected(error)
        self._gateway.failed(session, error)

    def _begin(self, session: Session, exchange: Exchange, asked: RetryTicket | None) -> Ongoing:
        self._requests.check_room()
        job = self._gateway.prepare(session, exchange.call)
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
        """Waits until the client has received the answer or disconnected; and for the generation,
        if this visit `generates`. An error before the first byte is raised; a later one is the
        stream's last event."""
        headers = (
            exchange.unread.headers(ongoing.job.clamped)
            if exchange.unread.fields or ongoing.job.clamped
            else ()
        )
        reply = Reply(
            ongoing.job, self._gateway.model, ongoing.created, self._gateway.tokenizer, headers
        )
        streams = exchange.call.stream
        telling = (
            self._stream(reader, exchange, reply)
            if streams
            else WholeAnswer(reader, exchange, reply)
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                with Watch(tasks, receive, reader) as watch:
                    told = (
                        tasks.create_task(telling.tell(send), name="tell")
                        if generates and streams
                        else None
                    )
                    if generates and streams:
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


class ChatsHere:
    """Implements `ports.Chats`: what `CompletionEndpoint` does with a chat, less the reading and
    writing of JSON.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def reply(self, token: str, messages: Sequence[Message]) -> str:
        """Waits for the whole answer; ended by it, or by the caller's cancellation."""
        gateway = self._gateway
        session = None
        unread = Unread()
        try:
            session = gateway.session_for(path_token=token, api_key=None)
            call = CompletionCall(
                (Messages(conversation(cast(Any, messages), unread)),), prompt_param="messages"
            )
            gateway.pass_over(unread, path=DIALECTS[0].path)
            await gateway.check_lengths(
                call, num_bytes=sum([len(str(message.get("content"))) for message in messages])
            )
            gateway.requests.check_room()
            [answer] = await gateway.answers(gateway.prepare(session, call))
            return answer.message.content
        except Exception as error:  # the edge: every error is counted
            edge.log_unexpected(error)
            gateway.failed(session, error)
            raise


class Watch:
    """Tells a reader when its client disconnects, within `with`. Most answers come before it
    begins, and are spared a task.
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
        """The client has received the answer, or nobody answers it any more."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = self._tasks.create_task(self._run(), name="watch for the client's disconnect")

    async def _run(self) -> None:
        """Waits for the client's disconnection; cancelled when it has received the answer."""
        await edge.until_gone(self._receive)
        self._reader.go()


def _health_route(ready: Callable[[], bool]) -> BaseRoute:
    async def health(request: Request) -> Response:
        return (
            json_answer({"status": "ok"})
            if ready()
            else json_answer({"status": "no engine is routable"}, status=503)
        )

    return route("/health", health, method="GET")


async def _http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, in the shape that clients read."""
    assert isinstance(error, HTTPException)
    if request.method == "OPTIONS" and error.status_code == 405:
        return Response(status_code=204, headers=error.headers)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    fault = edge.plain_fault(
        error.status_code, f"{request.method}: {error.detail}. Look up the route.", code
    )
    answer = fault_answer(fault)
    answer.headers.update(error.headers or {})
    return answer


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
