"""The gateway's ASGI application: all routes of agents and of the operator."""

import time
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.dialects.chat import ChatExchange
from midflight.gateway.dialects.completions import CompletionExchange
from midflight.gateway.dialects.contents import (
    ContentsExchange,
    StreamedContentsExchange,
    contents_fault,
    told_bare,
)
from midflight.gateway.dialects.exchange import Dialect, ParsedBodyCache
from midflight.gateway.dialects.messages import MessagesExchange, messages_fault
from midflight.gateway.dialects.native import NativeExchange
from midflight.gateway.dialects.responses import ResponsesExchange, broken
from midflight.gateway.dialects.tokens import TokensExchange
from midflight.gateway.http.control import Control
from midflight.gateway.http.control_routes import ControlRoutes
from midflight.gateway.http.endpoint import CompletionEndpoint
from midflight.gateway.http.kept_routes import KeptRoutes
from midflight.gateway.http.lookups import Lookups
from midflight.gateway.http.not_offered import refusal
from midflight.gateway.http.server_routes import ServerRoutes
from midflight.wire import edge
from midflight.wire.routes import fault_answer, json_answer, metrics_route, route


def _of_google(verb: str, exchange: type[ContentsExchange]) -> Dialect:
    """Google's SDKs read no comments of a stream, so a silent one gets empty lines."""
    return Dialect(
        f"/v1beta/models/{{model}}:{verb}",
        exchange,
        also=(f"/v1/models/{{model}}:{verb}",),
        addressed=exchange,
        fault=contents_fault,
        broken=told_bare,
        done=b"",
        waiting=b"\n\n",
    )


DIALECTS = (
    Dialect("/v1/chat/completions", ParsedBodyCache(ChatExchange), resumed=ChatExchange),
    Dialect("/v1/completions", CompletionExchange),
    Dialect(
        "/v1/messages",
        MessagesExchange,
        resumed=MessagesExchange,
        fault=messages_fault,
        named_events=True,
        done=b"",
    ),
    Dialect(
        "/v1/responses",
        ResponsesExchange,
        keeping=ResponsesExchange,
        broken=broken,
        named_events=True,
        done=b"",
    ),
    _of_google("generateContent", ContentsExchange),
    _of_google("streamGenerateContent", StreamedContentsExchange),
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
    """The ASGI application. `ready` returns True if an engine is routable. `control_token` guards
    pause, continue and abort; `metrics_token` guards the metrics.

    `now` gives Unix seconds for the `created` field and is used for nothing else.
    """
    endpoints: dict[str, ASGIApp] = {}
    for dialect in DIALECTS:
        endpoint = CompletionEndpoint(gateway, dialect, now=now)
        endpoints |= dict.fromkeys((dialect.path, *dialect.also), endpoint)
    routes: list[BaseRoute] = []
    for prefix in ("/s/{token}", ""):
        for path, endpoint in endpoints.items():
            found = path.replace("{model}", "{model:path}")
            routes.append(Route(prefix + found, endpoint, methods=["POST"]))
    routes += Lookups(gateway, now=now).routes()
    routes += KeptRoutes(gateway, now=now).routes()
    routes += ControlRoutes(control, token=control_token).routes()
    servers = ServerRoutes(gateway, control, ready=ready, token=control_token)
    routes.append(_health_route(ready))
    routes += servers.routes()
    routes += extra_routes
    routes += servers.not_here()
    routes.append(WebSocketRoute("/{path:path}", _refuse_socket))
    if metrics is not None:
        routes.append(metrics_route(metrics, token=metrics_token))
    plain = {path: endpoint for path, endpoint in endpoints.items() if "{" not in path}
    return AgentRouter(
        plain, Starlette(routes=routes, exception_handlers={HTTPException: _http_exception})
    )


class AgentRouter:
    """Finds the routes that agents call in one step. Every other request goes to `rest`, which
    knows these routes too.
    """

    def __init__(self, endpoints: Mapping[str, ASGIApp], rest: ASGIApp) -> None:
        """`endpoints` holds the endpoints for POST by path. Each also answers under
        `/s/<token>`.
        """
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


def _health_route(ready: Callable[[], bool]) -> BaseRoute:
    async def health(request: Request) -> Response:
        if ready():
            return json_answer({"status": "ok"})
        return json_answer({"status": "no engine is routable"}, status=503)

    return route("/health", health, method="GET")


async def _refuse_socket(socket: WebSocket) -> None:
    """Refuses a WebSocket that has no route. A server that can answer it as HTTP says why."""
    refused = refusal("WebSocket", socket.url.path, edge.headers_of(socket.scope))
    if refused is not None and "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(fault_answer(refused))
    else:
        await socket.close(1008)


async def _http_exception(request: Request, error: Exception) -> Response:
    """Answers unknown paths and wrong methods in the shape that clients read."""
    assert isinstance(error, HTTPException)
    if request.method == "OPTIONS" and error.status_code == 405:
        return Response(status_code=204, headers=error.headers)
    refused = refusal(request.method, request.url.path, edge.headers_of(request.scope))
    if refused is not None and error.status_code in (404, 405):
        return fault_answer(refused)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    fault = edge.plain_fault(
        error.status_code, f"{request.method}: {error.detail}. Look up the route.", code
    )
    answer = fault_answer(fault)
    answer.headers.update(error.headers or {})
    return answer
