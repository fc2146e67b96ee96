"""Routes for whatever is not called for every answer: Starlette's requests, behind a token, with errors as answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from midflight.errors import Unauthorized
from midflight.wire import edge

PACKED = "application/octet-stream"
JSON = "application/json"

Verb = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class StrictBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A body whose fields are all there are, so that a misspelt one is refused and not ignored."""


def route(
    path: str, verb: Verb, *, token: str | None = None, method: str = "POST", fault: Callable[[Exception], edge.Fault] = edge.fault_of
) -> BaseRoute:
    """A route whose errors become answers, in the shape that `fault` gives them. With `token`, only for whoever sends that."""

    async def answered(request: Request) -> Response:
        try:
            if token is not None and not holds(request, token):
                raise Unauthorized(f"{path} needs a token: send it as `Authorization: Bearer <token>`.")
            return await verb(request)
        except edge.ClientGone:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:  # the edge: every error becomes an answer
            edge.log_unexpected(error)
            return fault_answer(fault(error))

    return Route(path, answered, methods=[method])


def holds(request: Request, token: str) -> bool:
    """Whether the request carries this token."""
    return edge.same_token(bearer_of(request), token)


def bearer_of(request: Request) -> str:
    return edge.bearer_in(edge.headers_of(request.scope)) or ""


async def body_of(request: Request, kind: type[T]) -> T:
    """Waits for the body, as `read_body` does; see `decode_body`."""
    return edge.decode_body(await edge.read_body(request.receive), kind)


def wants(request: Request, kinds: Sequence[str]) -> str:
    """Which of these media types the client asks for; the first when it says nothing about them."""
    accepted = [part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "").split(",")]
    return next((kind for kind in accepted if kind in kinds), kinds[0])


def json_answer(value: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def fault_answer(fault: edge.Fault) -> Response:
    """As `send_fault`."""
    closing = {"connection": "close"} if fault.status == edge.BodyTooSlow.status else {}
    headers = {name.decode(): value.decode() for name, value in fault.headers} | closing
    return Response(msgspec.json.encode(fault.body), fault.status, headers=headers, media_type=JSON)


def metrics_route(registry: CollectorRegistry, *, token: str | None = None) -> BaseRoute:
    """`GET /metrics`, as Prometheus reads it."""

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return route("/metrics", metrics, token=token, method="GET")


def origin(request: Request) -> str:
    """How the client reached this process: addresses given to it work for it, also through a name or a forwarded port."""
    return str(request.base_url).rstrip("/")
