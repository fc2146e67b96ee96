"""Bytes in, bytes out: the few pieces of ASGI that the endpoints share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import NoReturn, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from midflight.errors import RequestRejected
from midflight.gateway.faults import Fault
from midflight.types import Json

T = TypeVar("T")

MAX_BODY_BYTES = 64 * 2**20
"""A request body; a million token ids as JSON are about 7 MB."""

CANCELS_WITH_CLIENT = "midflight.cancels_with_client"
"""ASGI extension: the server cancels the application when the client goes, so nobody need watch for it."""

_encode = msgspec.json.encode


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class BodyTooLarge(RequestRejected):
    status = 413
    code = "body_too_large"


def bearer(scope: Scope) -> str | None:
    """The token in the `Authorization` header."""
    value = header(scope, b"authorization")
    if value is None:
        return None
    kind, _, key = value.partition(" ")
    return key.strip() if kind.lower() == "bearer" else None


def api_key(scope: Scope) -> str | None:
    """The session's token, from whichever header the client's SDK sends its key in."""
    return header(scope, b"x-midflight-session") or header(scope, b"x-api-key") or bearer(scope)


def header(scope: Scope, name: bytes) -> str | None:
    """The first value of a header; `name` in lower case."""
    return next((value.decode("latin-1") for known, value in scope["headers"] if known == name), None)


async def read_body(receive: Receive) -> bytes:
    """Waits for the whole body; ended by the client, who sends it or goes (`ClientGone`)."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes: send less at once.")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def with_client(scope: Scope, receive: Receive, work: Awaitable[T]) -> T:
    """Waits for `work`, as long as the client waits for it: when he goes the work is cancelled and `ClientGone` raised."""
    if CANCELS_WITH_CLIENT in scope.get("extensions", {}):
        return await work
    try:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(_until_gone(receive), name="watch for the client's disconnect")
            result = await work
            watch.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return result


async def _until_gone(receive: Receive) -> NoReturn:
    """Waits for the client to go; cancelled when the work is done."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone


def sse(value: Json, *, named: bool = False) -> bytes:
    """One server-sent event; `named` by its `type`."""
    data = b"data: " + _encode(value) + b"\n\n"
    return b"event: " + str(value["type"]).encode() + b"\n" + data if named and isinstance(value, dict) else data


async def send_json(send: Send, value: Json, *, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    await send_bytes(send, _encode(value), status=status, content_type=b"application/json", headers=headers)


async def send_fault(send: Send, fault: Fault) -> None:
    await send_json(send, fault.body, status=fault.status, headers=fault.headers)


async def send_bytes(
    send: Send, body: bytes, *, status: int = 200, content_type: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    fixed = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})


async def start_stream(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_more(send: Send, body: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})
