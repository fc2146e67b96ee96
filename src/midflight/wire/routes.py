"""Starlette's routes, behind a token and with errors as answers. They are for requests outside the
hot path. A request for an answer goes without Starlette's objects (`edge`).
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from midflight.errors import Unauthorized
from midflight.wire.edge import (
    ClientGone,
    Fault,
    bearer_in,
    decode_body,
    fault_of,
    headers_of,
    log_unexpected,
    read_body,
    same_token,
)

T = TypeVar("T")

PACKED = "application/octet-stream"
JSON = "application/json"

Verb = Callable[[Request], Awaitable[Response]]


class StrictBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A body that may have no further fields, so that a misspelt one is refused and not ignored."""


def route(
    path: str,
    verb: Verb,
    *,
    token: str | None = None,
    method: str = "POST",
    fault: Callable[[Exception], Fault] = fault_of,
) -> BaseRoute:
    """A route whose errors become answers, in the shape that `fault` gives them. With `token`, it
    serves only requests that carry it.
    """

    async def answered(request: Request) -> Response:
        try:
            if token is not None and not holds(request, token):
                raise Unauthorized(
                    f"{path} needs a token: send it as `Authorization: Bearer <token>`."
                )
            return await verb(request)
        except ClientGone:
            return Response(status_code=499)  # it is not read
        except Exception as error:  # the edge: every error becomes an answer
            log_unexpected(error)
            return fault_answer(fault(error))

    return Route(path, answered, methods=[method])


def holds(request: Request, token: str) -> bool:
    """True if the request carries this token."""
    return same_token(bearer_of(request), token)


def bearer_of(request: Request) -> str:
    """The request's bearer token. Empty if it has none."""
    return bearer_in(headers_of(request.scope)) or ""


async def body_of(request: Request, kind: type[T]) -> T:
    """The request's body; see `decode_body`. Waits as `read_body` does."""
    return decode_body(await read_body(request.receive), kind)


def wants(request: Request, kinds: Sequence[str]) -> str:
    """The media type among these that the client asks for. It is the first of them if the client
    names none.
    """
    for part in request.headers.get("accept", "").split(","):
        accepted = part.partition(";")[0].strip().lower()
        if accepted in kinds:
            return accepted
    return kinds[0]


def json_answer(value: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def fault_answer(fault: Fault) -> Response:
    """The answer that `send_fault` sends, as a `Response`."""
    headers = {name.decode(): value.decode() for name, value in fault.headers}
    return Response(msgspec.json.encode(fault.body), fault.status, headers=headers, media_type=JSON)


def metrics_route(registry: CollectorRegistry, *, token: str | None = None) -> BaseRoute:
    """`GET /metrics`, as Prometheus reads it."""

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return route("/metrics", metrics, token=token, method="GET")


def local_address(request: Request) -> str:
    """The address of this server that the client's connection leads to, by the socket. A header
    could name any place, and lead others there.
    """
    host, port = request.scope["server"]
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"
