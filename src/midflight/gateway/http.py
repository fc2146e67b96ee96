"""The gateway on HTTP: routes, tokens, statuses. All meaning is in `Gateway`, `Control` and the dialects."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from midflight.errors import MidflightError, UnknownModel, nearest
from midflight.gateway.count import CountEndpoint
from midflight.gateway.dialects.chat import ChatExchange
from midflight.gateway.dialects.completions import CompletionExchange
from midflight.gateway.dialects.exchange import Dialect, Reply
from midflight.gateway.dialects.messages import MessagesExchange, messages_fault
from midflight.gateway.dialects.native import NativeExchange
from midflight.gateway.faults import Fault, fault_of, log_unexpected, plain_fault
from midflight.gateway.gateway import Gateway
from midflight.gateway.operator import Control, operator_routes
from midflight.gateway.session import Session
from midflight.gateway.stream import AnswerStream
from midflight.gateway.wire import ClientGone, api_key, read_body, send_bytes, send_fault, send_json, with_client
from midflight.types import Json

DIALECTS = (
    Dialect("/v1/chat/completions", ChatExchange),
    Dialect("/v1/completions", CompletionExchange),
    Dialect("/v1/messages", MessagesExchange, fault=messages_fault, named_events=True),
    Dialect("/generate", NativeExchange),
)


def build_app(
    gateway: Gateway,
    control: Control,
    *,
    control_token: str | None = None,
    ready: Callable[[], bool] = lambda: True,
    metrics: CollectorRegistry | None = None,
    now: Callable[[], float] = time.time,
    extra_routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """The ASGI application. `ready`: whether an engine is routable. `control_token` guards pause, continue and abort.

    `now` gives Unix seconds for the `created` field, and nothing else.
    """
    endpoints = {dialect.path: CompletionEndpoint(gateway, dialect, now=now) for dialect in DIALECTS}
    models = ModelsEndpoint(gateway, now=now)
    routes: list[BaseRoute] = []
    for prefix in ("/s/{token}", ""):
        routes += [Route(prefix + path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
        routes.append(Route(prefix + "/v1/messages/count_tokens", CountEndpoint(gateway), methods=["POST"]))
        routes += [Route(prefix + path, models, methods=["GET"]) for path in ("/v1/models", "/v1/models/{model:path}")]
    routes += operator_routes(control, control_token=control_token)
    routes += [Route("/health", HealthEndpoint(ready), methods=["GET"]), *extra_routes]
    if metrics is not None:
        routes.append(Route("/metrics", MetricsEndpoint(metrics), methods=["GET"]))
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_exception})


class CompletionEndpoint:
    """One dialect's route."""

    def __init__(self, gateway: Gateway, dialect: Dialect, *, now: Callable[[], float]) -> None:
        self._gateway = gateway
        self._dialect = dialect
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits for the body, then for the answer; ended by them, or by the client who goes."""
        session: Session | None = None
        try:
            session = self._gateway.session_for(path_token=scope["path_params"].get("token"), api_key=api_key(scope))
            exchange = self._dialect.exchange(await read_body(receive))
            job = self._gateway.prepare(session, exchange.call)
            reply = Reply(job, self._gateway.model, int(self._now()), self._gateway.tokenizer)
            if exchange.call.stream:
                await with_client(scope, receive, AnswerStream(self._gateway, self._dialect, exchange, reply).run(send))
            else:
                answers = await with_client(scope, receive, self._gateway.answers(job))
                await send_json(send, exchange.whole(reply, answers))
        except ClientGone:
            return
        except Exception as error:  # the edge: every error becomes an answer
            log_unexpected(error)
            self._gateway.failed(session, error)
            await send_fault(send, self._dialect.fault(error))


class ModelsEndpoint:
    """The one model, in an object that OpenAI's clients and Anthropic's both read."""

    def __init__(self, gateway: Gateway, *, now: Callable[[], float]) -> None:
        self._gateway = gateway
        self._created = int(now())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._gateway.session_for(path_token=scope["path_params"].get("token"), api_key=api_key(scope))
            await send_json(send, self._body(scope["path_params"].get("model")))
        except MidflightError as error:
            await send_fault(send, fault_of(error))

    def _body(self, asked: str | None) -> Json:
        name = self._gateway.model
        limits = self._gateway.limits
        model: Json = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "midflight",
            "max_model_len": limits.max_context,
            # The same in Anthropic's words.
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": limits.max_context,
        }
        if asked is None:
            return {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}
        if asked != name:
            raise UnknownModel(f"the model {asked!r} does not exist.{nearest(asked, [name])}", param="model")
        return model


class HealthEndpoint:
    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._ready():
            await send_json(send, {"status": "ok"})
        else:
            await send_fault(send, Fault(503, {"status": "no engine is routable"}))


class MetricsEndpoint:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, generate_latest(self._registry), content_type=CONTENT_TYPE_LATEST.encode())


async def _http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, in the shape that clients read."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    fault = plain_fault(error.status_code, f"{request.method}: {error.detail}. Look up the route.", code)
    return Response(msgspec.json.encode(fault.body), error.status_code, headers=error.headers, media_type="application/json")
