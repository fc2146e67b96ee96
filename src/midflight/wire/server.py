"""An ASGI application under uvicorn, on a given socket, in an event loop and process that do more
than serve it.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Generator

import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from midflight.errors import ConfigError, Stopping
from midflight.wire.edge import Fault, fault_of, plain_fault, send_fault

HEAD_SECONDS = 30.0
"""The time that a client may take to send the head of a request, once it has connected or begun. A
slower one would hold its place for ever.
"""
BODY_BYTES = 4096
BODY_SECONDS = 60.0
"""After the head, at least `BODY_BYTES` of the body must come in each `BODY_SECONDS`, unless the
application has yet to take what is there. A body may take any time while it moves, but a client
that sends next to nothing would hold its place for ever.
"""
IDLE_SECONDS = 75
"""A connection is kept this long without a request. Clients drop theirs sooner (usual: 5 to 60 s),
so that none asks on a connection that is being closed.
"""
LAST_WORDS_SECONDS = 0.3
"""The time to wait for the answers of requests that were told to end, and again for those that were
cancelled. It is parts of a second, because a run stops within five.
"""
UNREAD_SECONDS = 120.0
"""A client that takes nothing of its answer for so long is cut off, because it would hold its place
for ever.
"""


async def serve_app(
    app: ASGIApp,
    listener: socket.socket,
    *,
    ready: Callable[[], None],
    stopping: Callable[[], None] | None = None,
) -> None:
    """Serves until cancelled, then drops every connection. `ready` is called once connections are
    accepted. `stopping` is called first when serving ends, and the requests that it ends are
    answered. All other requests under way are answered 503, unless their answer has begun.

    There is no access log, because paths hold the secrets of sessions. Signals are left to the
    process.
    """
    config = uvicorn.Config(
        _CancelSafeApp(app),
        lifespan="off",
        log_config=None,
        http=_ClientConnection,
        access_log=False,
        log_level="warning",  # below it, headers and addresses of WebSockets are written out
        proxy_headers=False,
        server_header=False,
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        ws_max_size=2**30,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=1,
    )
    logging.getLogger("uvicorn.error").addFilter(_failed)
    server = _OneServer(config, ready)
    try:
        await server.serve(sockets=[listener])
    finally:
        try:
            if stopping is not None:
                stopping()
                await server.last_words()
            server.cancel_all()
            await server.last_words()
        finally:
            server.drop_all()


def _failed(record: logging.LogRecord) -> bool:
    """A request that is dropped has not failed, though uvicorn logs the cancellation of its task as
    an error.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class _CancelSafeApp:
    """The application, with an answer for requests that are cancelled before theirs has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sending = _TrackedSend(send)
        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            if not sending.begun:
                stopping = Stopping("the server is stopping: try again when it is back.")
                await send_fault(send, fault_of(stopping))
            raise


class _TrackedSend:
    """The server's `send`, which also sends more of an answer from outside the task that
    answers.
    """

    __slots__ = ("_cycle", "_send", "begun")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        cycle = getattr(send, "__self__", None)
        self._cycle = cycle if isinstance(cycle, RequestResponseCycle) else None

    async def __call__(self, message: Message) -> None:
        self.begun = True
        await self._send(message)

    def whole(self, status: int, head: bytes, body: bytes) -> bool:
        """Sends all of an answer in one write, if the client keeps up and its connection goes on.
        Returns whether it was sent; otherwise it must go by `send`. `head` is trusted to be right,
        length included.
        """
        cycle = self._cycle
        if cycle is None or cycle.response_started or cycle.disconnected:
            return False
        if cycle.flow.write_paused or not cycle.keep_alive:
            return False
        if cycle.scope["method"] == "HEAD":
            return False
        self.begun = True
        cycle.response_started = True
        cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        own = b"".join([b"%b: %b\r\n" % header for header in cycle.default_headers])
        cycle.transport.write(b"%b%b%b\r\n%b" % (STATUS_LINE[status], own, head, body))
        cycle.message_event.set()
        cycle.on_response()
        return True

    def push(self, body: bytes) -> bool:
        """Sends more of an answer whose length is not known, while no task is in `send`. Returns
        whether the client keeps up; otherwise the next part must go by `send`, which waits. Without
        bytes nothing is sent.
        """
        cycle = self._cycle
        if cycle is None or not cycle.chunked_encoding:
            return False
        if body and not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return not cycle.flow.write_paused


class _ClientConnection(HttpToolsProtocol):
    """Cuts off a client that reads nothing or does not finish its request. Refuses bytes that are
    not HTTP, in the shape of any other error.

    A client that ends its side counts as gone, since it looks the same as one that has closed the
    connection.
    """

    _stalled: asyncio.TimerHandle | None = None
    _late: asyncio.TimerHandle | None = None
    """Runs until a request is whole, so that a wait for its body needs no deadline of its own."""
    _has_begun = False
    """True if anything has come on the connection."""
    _has_head = False
    """True if the head of the request that is coming in is whole."""
    _has_waited = False
    """True if the body of that request has had its time once."""
    _num_come = 0
    """The bytes of the body that have come since its time began."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._await_request()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        self._has_head = False
        self._has_waited = False
        self._num_come = 0
        self._await_request()

    def on_headers_complete(self) -> None:
        self._has_head = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_come += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_whole()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._is_whole()
        super().handle_websocket_upgrade()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading()
        self._is_whole()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", plain_fault(400, f"{msg} Send HTTP/1.1.", "invalid_http"))

    def _refuse(self, status: bytes, fault: Fault) -> None:
        body = msgspec.json.encode(fault.body)
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()

    def _await_request(self, seconds: float | None = None) -> None:
        if self._late is None:
            delay = HEAD_SECONDS if seconds is None else seconds
            self._late = self.loop.call_later(delay, self._cut_off)

    def _is_whole(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _cut_off(self) -> None:
        """Ends a connection that is too slow. A connection on which nothing has come is closed
        without an answer. A connection whose answer is under way has time until that ends.
        """
        self._late = None
        answered = getattr(self.cycle, "response_complete", True)
        if not self._has_begun:
            self.transport.close()
        elif self.pipeline or not (self._has_head or answered):
            self._await_request()
        elif not self._has_head:
            message = (
                f"the head of the request was not whole after {HEAD_SECONDS:g} s: send it at once."
            )
            self._refuse(b"408 Request Timeout", plain_fault(408, message, "head_too_slow"))
        elif not self._has_waited or self._num_come >= BODY_BYTES or self.flow.read_paused:
            self._has_waited = True
            self._num_come = 0
            self._await_request(BODY_SECONDS)
        elif answered:
            self.transport.close()
        else:
            message = (
                f"less than {BODY_BYTES} bytes of the body came in {BODY_SECONDS:g} s: send "
                "it faster."
            )
            self._refuse(b"408 Request Timeout", plain_fault(408, message, "body_too_slow"))

    def _reading(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class _OneServer(uvicorn.Server):
    """A server that installs no signal handlers, reports when it listens, and can be dropped at
    once.
    """

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = started

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_start()

    async def last_words(self) -> None:
        """Waits for the requests under way, `LAST_WORDS_SECONDS` at most."""
        if self.server_state.tasks:
            await asyncio.wait(set(self.server_state.tasks), timeout=LAST_WORDS_SECONDS)

    def cancel_all(self) -> None:
        """Cancels the requests under way. The server listens no more."""
        for listening in getattr(self, "servers", ()):
            listening.close()
        for task in list(self.server_state.tasks):
            task.cancel()

    def drop_all(self) -> None:
        """Closes every connection without waiting for its request."""
        self.cancel_all()
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if isinstance(transport, asyncio.BaseTransport):
                transport.close()


def listen(
    host: str,
    port: int,
    *,
    host_option: str = "gateway.host, --host",
    port_option: str = "gateway.port, --port",
) -> socket.socket:
    """A listening socket. The part that serves it inherits it, so that the address is known before
    the part starts, and outlives it. The names of the options are for the error.
    """
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit this option. Without it an answer in two writes waits 40 ms for the
        # client to acknowledge the first.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        remedy = f"choose another port ({port_option}), or 0 for a free one"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            remedy = (
                f"{host!r} is no address of this machine: give one that it has ({host_option}), "
                "such as 127.0.0.1"
            )
        raise ConfigError(f"listening on {host}:{port}: {error.strerror}; {remedy}") from error
    made.listen(1024)
    made.setblocking(False)
    return made
