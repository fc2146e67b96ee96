"""What the routes under `/midflight/v1` share: who may, what the body is, and one shape for every error."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from midflight.errors import RequestRejected, Unauthorized
from midflight.gateway.dialects.faults import fault_of, log_unexpected
from midflight.gateway.http.wire import ClientGone, bearer, read_body

PREFIX = "/midflight/v1"
PACKED = "application/octet-stream"
JSON = "application/json"

Verb = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A body: its fields are all there are, so that a misspelt one is refused and not ignored."""


def control_route(path: str, verb: Verb, *, token: str, method: str = "POST") -> BaseRoute:
    """A route for whoever holds the control token."""

    async def guarded(request: Request) -> Response:
        if not holds(request, token):
            raise Unauthorized("this route needs the control token: send it as `Authorization: Bearer <token>`.")
        return await verb(request)

    return open_route(path, guarded, method=method)


def open_route(path: str, verb: Verb, *, method: str = "POST") -> BaseRoute:
    """A route that checks for itself who may. Whatever it raises becomes an answer."""

    async def answered(request: Request) -> Response:
        try:
            return await verb(request)
        except ClientGone:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:  # the edge: every error becomes an answer
            log_unexpected(error)
            fault = fault_of(error)
            headers = {name.decode(): value.decode() for name, value in fault.headers}
            return Response(msgspec.json.encode(fault.body), fault.status, headers=headers, media_type=JSON)

    return Route(PREFIX + path, answered, methods=[method])


def holds(request: Request, token: str) -> bool:
    """Whether the request carries this token."""
    return hmac.compare_digest(bearer_of(request).encode("utf-8", "replace"), token.encode())


def bearer_of(request: Request) -> str:
    return bearer(request.scope) or ""


async def body_of(request: Request, kind: type[T]) -> T:
    """Waits for the body; no body is an empty object. `RequestRejected` says what of it is wrong."""
    data = await read_body(request.receive)
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRejected(
            f"the body is not what {request.url.path} takes: {error}. Send the JSON object that its page documents."
        ) from error


def wants(request: Request, kinds: Sequence[str]) -> str:
    """Which of these media types the client asks for; the first when it says nothing about them."""
    accepted = [part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "").split(",")]
    return next((kind for kind in accepted if kind in kinds), kinds[0])


def json_answer(value: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def origin(request: Request) -> str:
    """How the client reached this process: addresses given to it work for it, also through a name or a forwarded port."""
    return str(request.base_url).rstrip("/")
