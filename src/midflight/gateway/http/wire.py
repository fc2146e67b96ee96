"""Bytes in, bytes out: the few pieces of ASGI that the endpoints share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import NoReturn, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from midflight.errors import Overloaded, RequestRejected
from midflight.gateway.dialects.faults import Fault
from midflight.types import Json

T = TypeVar("T")

MAX_BODY_BYTES = 64 * 2**20
"""A request body; a million token ids as JSON are about 7 MB."""

MAX_INCOMING_BYTES = 2**30
"""All bodies that are not whole yet: sixteen of the largest, and far more than all that usual ones ever need at once."""

BODY_SECONDS = 60.0
"""For a client to send its body: the largest one takes that at 1 MB/s. Who is slower would hold its place for ever."""

_STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))

_encode = msgspec.json.encode


class _Incoming:
    """The bytes of all bodies that are not whole yet."""

    num_bytes = 0


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class BodyTooLarge(RequestRejected):
    status = 413
    code = "body_too_large"


class BodyTooSlow(RequestRejected):
    status = 408
    code = "body_too_slow"


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """By name in lower case; the first value of each."""
    return dict(reversed(scope["headers"]))


def bearer(scope: Scope) -> str | None:
    """The token in the `Authorization` header."""
    return _bearer(headers_of(scope))


def api_key(scope: Scope) -> str | None:
    """The session's token, from whichever header the client's SDK sends its key in."""
    return key_in(headers_of(scope))


def key_in(headers: Mapping[bytes, bytes]) -> str | None:
    """As `api_key`."""
    own = headers.get(b"x-midflight-session") or headers.get(b"x-api-key")
    return own.decode("latin-1") if own else _bearer(headers)


def _bearer(headers: Mapping[bytes, bytes]) -> str | None:
    kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return key.strip() if kind.lower() == "bearer" else None


async def read_body(receive: Receive, *, declared: bytes | None = None) -> bytes:
    """Waits for the whole body, `BODY_SECONDS` at most; ended by the client, who sends it or goes (`ClientGone`).

    `declared`: the `Content-Length`; a body that is too large by it is refused before it is read. `Overloaded` when too much is
    on its way from all clients together.
    """
    if declared is not None:
        _check_room(_num_bytes(declared))
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _whole_body(receive)
    except TimeoutError:
        raise BodyTooSlow(f"the body was not whole after {BODY_SECONDS:g} s: send it faster, or send less at once.") from None


def _num_bytes(declared: bytes) -> int:
    """What is no number is the server's to refuse. Digits are bounded: 20 are more than any length."""
    return int(declared[:20]) if declared.isdigit() else 0


async def _whole_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            _Incoming.num_bytes += len(part)
            _check_room(size)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)
    finally:
        _Incoming.num_bytes -= size


def _check_room(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes: send less at once.")
    if _Incoming.num_bytes > MAX_INCOMING_BYTES:
        raise Overloaded(f"more than {MAX_INCOMING_BYTES} bytes of bodies are on their way, the most allowed: send yours again later.")


async def with_client(receive: Receive, work: Awaitable[T]) -> T:
    """Waits for `work`, as long as the client waits for it: when he goes the work is cancelled and `ClientGone` raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(_raise_when_gone(receive), name="watch for the client's disconnect")
            result = await work
            watch.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return result


async def until_gone(receive: Receive) -> None:
    """Waits for the client to go; cancelled by who has answered him."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _raise_when_gone(receive: Receive) -> NoReturn:
    await until_gone(receive)
    raise ClientGone


def sse(value: Json, *, named: bool = False) -> bytes:
    """One server-sent event; `named` by its `type`."""
    data = b"data: " + _encode(value) + b"\n\n"
    return b"event: " + str(value["type"]).encode() + b"\n" + data if named and isinstance(value, dict) else data


async def send_json(send: Send, value: Json, *, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    await send_bytes(send, _encode(value), status=status, content_type=b"application/json", headers=headers)


async def send_fault(send: Send, fault: Fault) -> None:
    """After a body that did not come in time the connection is of no use: what comes on it later is still that body."""
    closing = ((b"connection", b"close"),) if fault.status == BodyTooSlow.status else ()
    await send_json(send, fault.body, status=fault.status, headers=(*fault.headers, *closing))


async def send_bytes(
    send: Send, body: bytes, *, status: int = 200, content_type: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    fixed = ((b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers)
    await send({"type": "http.response.start", "status": status, "headers": fixed})
    await send({"type": "http.response.body", "body": body})


async def start_stream(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})


async def send_more(send: Send, body: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})
