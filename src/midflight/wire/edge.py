"""The edge of every server in plain ASGI, without Starlette's objects: tokens, bodies, errors as
answers, and clients that disconnect.
"""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from midflight.errors import (
    Blame,
    MidflightError,
    Overloaded,
    RequestRejected,
    Unauthorized,
    first_error,
)
from midflight.types import Json

T = TypeVar("T")

MAX_BODY_BYTES = 64 * 2**20
"""The limit of a request body. A million token ids as JSON are about 7 MB."""

MAX_INCOMING_BYTES = 2**30
"""The limit of all bodies together that are not whole yet. It is sixteen of the largest, and far
more than usual bodies ever need at once.
"""

RETRY_AFTER_SECONDS = 1
"""The wait that a retryable refusal advises. Clients back off from there."""

FAILED_HERE = "this request failed inside the server; its log has the traceback."

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

_log = logging.getLogger(__name__)
_encode = msgspec.json.encode


class ClientGone(Exception):
    """The client has disconnected, and the answer is not read."""


class BodyTooLarge(RequestRejected):
    status = 413
    code = "body_too_large"


# --- Errors ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """One error on the wire."""

    status: int
    body: Json
    headers: tuple[tuple[bytes, bytes], ...] = ()


def fault_of(error: BaseException) -> Fault:
    """An error as OpenAI's clients read it: `{"error": {message, type, param, code}}`, with the
    status of `errors`.

    An error that is not ours says nothing about the inside of the server. Its text is for the log.
    """
    if not isinstance(error, MidflightError):
        return Fault(500, _error_body(FAILED_HERE, "internal_error", None, "internal_error"))
    param = error.param if isinstance(error, RequestRejected) else None
    body = _error_body(str(error), _kind(error), param, error.code)
    return Fault(error.status, body, retry_headers(error))


def plain_fault(status: int, message: str, code: str) -> Fault:
    """An error of a request that never reaches a handler: an unknown path, a wrong method, bytes
    that are no HTTP.
    """
    return Fault(status, _error_body(message, "invalid_request_error", None, code))


def retry_seconds(error: BaseException) -> int | None:
    """The seconds after which to try again. `None` if trying again is no use."""
    if isinstance(error, Overloaded):
        return error.retry_after_seconds
    if isinstance(error, MidflightError) and error.retryable:
        return RETRY_AFTER_SECONDS
    return None


def retry_headers(error: BaseException) -> tuple[tuple[bytes, bytes], ...]:
    """The headers that say when to try again. For a conflict they say not to, because SDKs retry
    conflicts, and a conflict stays one.
    """
    seconds = retry_seconds(error)
    if seconds is not None:
        return ((b"retry-after", b"%d" % seconds),)
    if isinstance(error, MidflightError) and error.status == 409:
        return ((b"x-should-retry", b"false"),)
    return ()


def log_unexpected(error: BaseException) -> None:
    """Logs the traceback of an error that is not ours. Our errors say all in their message."""
    if not isinstance(error, MidflightError):
        _log.error("a request failed", exc_info=error)


def _kind(error: MidflightError) -> str:
    if error.status == 429:
        return "rate_limit_error"
    if error.blame is Blame.REQUEST or error.status < 500:
        return "invalid_request_error"
    return "internal_error" if error.status == 500 else "service_unavailable"


def _error_body(message: str, kind: str, param: str | None, code: str) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


# --- Tokens ---------------------------------------------------------------------------------------


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """The headers by name in lower case, with the first value of each."""
    return dict(reversed(scope["headers"]))


def bearer_in(headers: Mapping[bytes, bytes]) -> str | None:
    """The token in the `Authorization` header."""
    kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return key.strip() if kind.lower() == "bearer" else None


def key_of(scope: Scope) -> str | None:
    """The session's token, from wherever the client's SDK puts its key: one of some headers, or the
    `key` of the query.
    """
    headers = headers_of(scope)
    for name in _KEYS:
        own = headers.get(name)
        if own:
            return own.decode("latin-1")
    return bearer_in(headers) or query_of(scope).get("key")


_KEYS = (b"x-midflight-session", b"x-api-key", b"x-goog-api-key")


def query_of(scope: Scope) -> dict[str, str]:
    """The query of the address, with the last value of each name."""
    query: bytes = scope.get("query_string", b"")
    return dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True)) if query else {}


def same_token(given: str | None, expected: str) -> bool:
    """Compares in constant time, so that the time reveals nothing about the secret."""
    return hmac.compare_digest((given or "").encode("utf-8", "replace"), expected.encode())


class RequireToken:
    """An application behind a bearer token, WebSockets too. Only `/health` is open.

    The application does not see the header, and may take keys of its own there.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/health":
            await self._app(scope, receive, send)
        elif same_token(bearer_in(headers_of(scope)), self._token):
            headers = [pair for pair in scope["headers"] if pair[0] != b"authorization"]
            await self._app({**scope, "headers": headers}, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = Unauthorized(
                "a token is needed here: send it as `Authorization: Bearer <token>`."
            )
            await send_fault(send, fault_of(error))


# --- Bodies ---------------------------------------------------------------------------------------


class _BodyBytes:
    """The bytes of all bodies that are not whole yet."""

    num_bytes = 0


async def read_body(receive: Receive, *, declared: bytes | None = None) -> bytes:
    """Waits for the whole body. The client ends the wait, by sending the body or by disconnecting
    (`ClientGone`), or the server, which cuts off a client that is too slow.

    `declared` is the `Content-Length`. A body that is too large by it is refused before it is read.
    Raises `Overloaded` if too much is on its way from all clients together.
    """
    if declared is not None:
        _check_room(_num_bytes(declared))
    parts: list[bytes] = []
    size = 0
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            _BodyBytes.num_bytes += len(part)
            _check_room(size)
            is_last = not message.get("more_body", False)
            if is_last and not parts:
                return part
            parts.append(part)
            if is_last:
                return b"".join(parts)
    finally:
        _BodyBytes.num_bytes -= size


def decode_body(body: bytes, kind: type[T]) -> T:
    """The JSON object that a route takes. An empty body counts as an empty object. Raises
    `RequestRejected` with the fault if the body is not such an object.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _, _, place = str(error).partition(" - at `$.")
        raise RequestRejected(
            (
                f"reading the body: {error}. Send the JSON object that the page of this route "
                "documents."
            ),
            param=place.strip("`") or None,
        ) from error


def _num_bytes(declared: bytes) -> int:
    """The declared number of bytes. It is 0 if the header is no number, which the server refuses.
    Digits are bounded: 20 are more than any length.
    """
    return int(declared[:20]) if declared.isdigit() else 0


def _check_room(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes: send less at once.")
    if _BodyBytes.num_bytes > MAX_INCOMING_BYTES:
        raise Overloaded(
            f"more than {MAX_INCOMING_BYTES} bytes of bodies are on their way, the most allowed: "
            "send yours again later."
        )


# --- Clients that disconnect ----------------------------------------------------------------------


async def with_client(receive: Receive, work: Awaitable[T]) -> T:
    """Waits for `work`, as long as the client waits for it. When the client disconnects, the work
    is cancelled and `ClientGone` raised.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(
                _raise_when_gone(receive), name="watch for the client's disconnect"
            )
            result = await work
            watch.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return result


async def until_gone(receive: Receive) -> None:
    """Waits for the client to disconnect. The task that has answered the client cancels it."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


async def _raise_when_gone(receive: Receive) -> NoReturn:
    await until_gone(receive)
    raise ClientGone


# --- Answers --------------------------------------------------------------------------------------


def sse(value: Json, *, named: bool = False) -> bytes:
    """One server-sent event. With `named` it has a name, which is the value's `type`."""
    data = b"data: " + _encode(value) + b"\n\n"
    if named and isinstance(value, dict):
        return b"event: " + str(value["type"]).encode() + b"\n" + data
    return data


async def send_json(
    send: Send, value: Json, *, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    await send_bytes(
        send, _encode(value), status=status, content_type=b"application/json", headers=headers
    )


async def send_fault(send: Send, fault: Fault) -> None:
    await send_json(send, fault.body, status=fault.status, headers=fault.headers)


async def send_bytes(
    send: Send,
    body: bytes,
    *,
    status: int = 200,
    content_type: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Sends a whole answer, in one write if the server offers that (`whole`)."""
    whole: Callable[[int, bytes, bytes], bool] | None = getattr(send, "whole", None)
    if whole is not None and not headers:
        head = b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body))
        if whole(status, head, body):
            return
    fixed = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    fixed += headers
    await send({"type": "http.response.start", "status": status, "headers": fixed})
    await send({"type": "http.response.body", "body": body})


async def start_stream(send: Send, *, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Starts an answer of server-sent events."""
    fixed = (*_STREAM_HEADERS, *headers)
    await send({"type": "http.response.start", "status": 200, "headers": fixed})


async def send_more(send: Send, body: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})
