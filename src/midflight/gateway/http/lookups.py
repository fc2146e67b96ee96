"""What a client looks up beside its answers: the models, the length of a prompt, and the routes as
an OpenAPI document.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import cast

from pydantic import BaseModel, JsonValue
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.errors import RequestRejected, UnknownModel, UnknownResponse, nearest
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.dialects.chat import ChatBody
from midflight.gateway.dialects.completions import CompletionBody
from midflight.gateway.dialects.fields import Body, parse
from midflight.gateway.dialects.messages import messages_fault
from midflight.gateway.dialects.messages_input import MessagesBody, PromptBody
from midflight.gateway.dialects.native import NativeBody
from midflight.gateway.dialects.policy import Unread
from midflight.gateway.dialects.responses_input import ResponsesBody, conversation, input_items
from midflight.gateway.dialects.tokens import TokensBody
from midflight.gateway.sessions.kept import Conversation, KeptResponses
from midflight.gateway.sessions.session import CompletionCall, Session
from midflight.types import Json
from midflight.version import __version__
from midflight.wire.edge import headers_of, key_in, read_body
from midflight.wire.routes import json_answer, route

_Object = dict[str, Json]


class Lookups:
    """The routes, each under the path of a session too. They leave no trace in it: no turn, no
    failed request.
    """

    def __init__(self, gateway: Gateway, *, now: Callable[[], float]) -> None:
        self._gateway = gateway
        self._created = int(now())
        self._now = now
        self._of_responses = {"GET": self._response, "DELETE": self._forget}
        self._of_conversations = {"GET": self._conversation, "DELETE": self._end}

    def routes(self) -> Sequence[BaseRoute]:
        found: list[BaseRoute] = []
        for prefix in ("/s/{token}", ""):
            found.append(
                route(prefix + "/v1/messages/count_tokens", self._count, fault=messages_fault)
            )
            found += [
                route(prefix + path, self._models, method="GET")
                for path in ("/v1/models", "/v1/models/{model:path}")
            ]
            found += [
                route(f"{prefix}/v1/responses/{{name}}", verb, method=method)
                for method, verb in self._of_responses.items()
            ]
            found.append(
                route(f"{prefix}/v1/responses/{{name}}/input_items", self._input, method="GET")
            )
            found.append(route(f"{prefix}/v1/conversations", self._begin))
            found += [
                route(f"{prefix}/v1/conversations/{{name}}", verb, method=method)
                for method, verb in self._of_conversations.items()
            ]
        return [*found, route("/openapi.json", self._document, method="GET")]

    def _session(self, request: Request) -> Session:
        return self._gateway.session_for(
            path_token=request.path_params.get("token"), api_key=key_in(headers_of(request.scope))
        )

    async def _count(self, request: Request) -> Response:
        """Counts what `/v1/messages` would send. Waits for the body."""
        session = self._session(request)
        sent = await read_body(request.receive)
        unread = Unread()
        body = parse(PromptBody, sent, unread=unread)
        self._check_model(body.model)
        prompt = body.prompt(unread)
        self._gateway.pass_over(unread, path="/v1/messages/count_tokens")
        await self._gateway.check_lengths(
            CompletionCall((prompt,), prompt_param="messages"), num_bytes=len(sent)
        )
        answer = json_answer({"input_tokens": self._gateway.count(session, prompt)})
        answer.headers.update({name.decode(): value.decode() for name, value in unread.headers()})
        return answer

    async def _models(self, request: Request) -> Response:
        """The one model, in an object that OpenAI's clients and Anthropic's both read."""
        self._session(request)
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
        asked = request.path_params.get("model")
        if asked is None:
            return json_answer(
                {
                    "object": "list",
                    "data": [model],
                    "has_more": False,
                    "first_id": name,
                    "last_id": name,
                }
            )
        self._check_model(asked)
        return json_answer(model)

    def _kept(self, request: Request) -> KeptResponses:
        return self._gateway.kept_for(self._session(request), key_in(headers_of(request.scope)))

    async def _response(self, request: Request) -> Response:
        return json_answer(self._kept(request).response(request.path_params["name"]))

    async def _input(self, request: Request) -> Response:
        """What a response answered: all of the conversation before it but the instructions; a page
        of it, the newest first.
        """
        kept = self._kept(request)
        name = request.path_params["name"]
        response = cast("_Object", kept.response(name))
        return json_answer(
            _page(
                input_items(response, kept.said(name, "response_id").whole[:-1]),
                request.query_params,
            )
        )

    async def _forget(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not self._kept(request).forget(name):
            raise UnknownResponse(
                f"there is no response {name[:80]!r} here: it may be deleted already."
            )
        return json_answer({"id": name, "object": "response", "deleted": True})

    async def _begin(self, request: Request) -> Response:
        """Begins a conversation. Waits for the body."""
        kept = self._kept(request)
        unread = Unread()
        body = parse(BeginBody, await read_body(request.receive), unread=unread)
        self._gateway.pass_over(unread, path="/v1/conversations")
        messages = (
            conversation(cast("list[JsonValue]", body.items), before=(), unread=unread, kept=kept)
            if body.items
            else ()
        )
        return json_answer(
            _as_told(kept.begin(messages, created=int(self._now()), metadata=body.metadata or {}))
        )

    async def _conversation(self, request: Request) -> Response:
        return json_answer(_as_told(self._kept(request).conversation(request.path_params["name"])))

    async def _end(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._kept(request).end(name)
        return json_answer({"id": name, "object": "conversation.deleted", "deleted": True})

    async def _document(self, request: Request) -> Response:
        return json_answer(openapi_document(self._gateway.model))

    def _check_model(self, asked: str) -> None:
        if asked != self._gateway.model:
            raise UnknownModel(
                f"the model {asked!r} does not exist.{nearest(asked, [self._gateway.model])}",
                param="model",
            )


def _page(items: list[Json], asked: Mapping[str, str]) -> Json:
    """OpenAI's page of a list: `order`, `after` and `limit`."""
    order = asked.get("order", "desc")
    after = asked.get("after")
    limit = asked.get("limit", "20")
    if order not in ("asc", "desc"):
        raise RequestRejected(f"order is {order[:80]!r}: send asc or desc.", param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= 100):
        raise RequestRejected(
            f"limit is {limit[:80]!r}: send a number from 1 to 100.", param="limit"
        )
    ids = [str(cast("_Object", item)["id"]) for item in items]
    if after is not None and after not in ids:
        raise RequestRejected(
            f"after is {after[:80]!r}, which is none of these items: send the id of one.",
            param="after",
        )
    if order == "desc":
        items = items[::-1]
        ids = ids[::-1]
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + int(limit)]
    names = ids[start : start + int(limit)]
    ends: _Object = {
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }
    return {"object": "list", "data": page, **ends, "has_more": start + len(page) < len(items)}


class BeginBody(Body):
    """Begins a conversation."""

    items: list[dict[str, JsonValue]] | None = None
    metadata: dict[str, JsonValue] | None = None


def _as_told(found: Conversation) -> Json:
    return {
        "id": found.name,
        "object": "conversation",
        "created_at": found.created,
        "metadata": found.metadata,
    }


@dataclass(frozen=True, slots=True)
class Described:
    """A route that takes a body."""

    body: type[BaseModel]
    summary: str
    fault: str = "Fault"
    """The schema of its errors."""
    streams: bool = True


DESCRIBED: Mapping[str, Described] = {
    "/v1/chat/completions": Described(ChatBody, "Chat, as OpenAI's SDK speaks it"),
    "/v1/completions": Described(CompletionBody, "Text completion, as OpenAI's SDK speaks it"),
    "/v1/responses": Described(
        ResponsesBody, "A response, as OpenAI's SDK speaks it; its session keeps it"
    ),
    "/v1/messages": Described(
        MessagesBody, "A message, as Anthropic's SDK speaks it", fault="NamedFault"
    ),
    "/v1/messages/count_tokens": Described(
        PromptBody, "How long a prompt is", fault="NamedFault", streams=False
    ),
    "/generate": Described(
        NativeBody, "Generation from text or token ids, as SGLang's clients speak it"
    ),
    "/inference/v1/generate": Described(
        TokensBody, "Generation from token ids, as vLLM's clients speak it"
    ),
}
"""Every dialect's route, with the body it parses."""

_FAULTS: Mapping[str, str] = {
    "400": "The request is at fault; the error names the field.",
    "401": "No such session, or none was named where one is needed.",
    "404": "No such model.",
    "409": "The request contradicts what is under way.",
    "410": "The session has ended.",
    "413": "The body is too large.",
    "429": "Too much at once: try again later.",
    "503": "No engine took the request: try again later.",
    "504": "No engine finished the request in time.",
}

_TEXT: Json = {"type": "string"}
_ERROR: Json = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "properties": {
        "message": _TEXT,
        "type": _TEXT,
        "param": {"type": ["string", "null"]},
        "code": _TEXT,
    },
}
_MODEL: Json = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": _TEXT,
    },
}
_SCHEMAS: Mapping[str, Json] = {
    "Fault": {"type": "object", "required": ["error"], "properties": {"error": _ERROR}},
    "NamedFault": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _TEXT, "message": _TEXT},
            },
        },
    },
    "Model": _MODEL,
    "Models": {
        "type": "object",
        "required": ["object", "data"],
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
        },
    },
    "Health": {"type": "object", "required": ["status"], "properties": {"status": _TEXT}},
}


@cache
def openapi_document(model: str) -> _Object:
    """The whole document of a gateway that serves this model. Every request may name its session by
    address or by key; plain serving may need neither.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Midflight gateway",
            "version": __version__,
            "description": (
                "Fields that a schema does not name have no effect, and the head of "
                "the "
                "answer says so; those that would change the text are refused by name."
            ),
        },
        "servers": [
            {"url": "/"},
            {
                "url": "/s/{token}",
                "variables": {"token": {"default": "", "description": "The session's secret."}},
            },
        ],
        "security": [{}, {"bearer": []}, {"apiKey": []}, {"session": []}],
        "paths": {
            **{path: {"post": _post(path, described)} for path, described in DESCRIBED.items()},
            **_plain_paths(),
        },
        "components": {"schemas": {**_bodies(model), **_SCHEMAS}, "securitySchemes": _security()},
    }


def _bodies(model: str) -> _Object:
    """Schemas of all bodies, and of what they are made of. Only one model is served."""
    bodies = [(described.body, "validation") for described in DESCRIBED.values()]
    _, definitions = models_json_schema(
        cast("Sequence[tuple[type[BaseModel], str]]", bodies),  # pyright: ignore[reportArgumentType]
        ref_template="#/components/schemas/{model}",
    )
    schemas = cast("dict[str, dict[str, _Object]]", definitions["$defs"])
    for schema in schemas.values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": model}
    return cast(_Object, schemas)


def _post(path: str, described: Described) -> Json:
    answers: _Object = {
        "application/json": {
            "schema": {"type": ["object", "array"]} if path == "/generate" else {"type": "object"}
        }
    }
    if described.streams:
        answers["text/event-stream"] = {}
    return {
        "summary": described.summary,
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": _json(described.body.__name__)},
        "responses": {
            "200": {"description": "The answer, whole or streamed.", "content": answers},
            **_faults(described.fault, _FAULTS),
        },
    }


def _plain_paths() -> _Object:
    name: Json = {"name": "model", "in": "path", "required": True, "schema": _TEXT}
    refused = {status: _FAULTS[status] for status in ("401", "404", "410")}
    healthy: _Object = {"description": "An engine can be reached.", "content": _json("Health")}
    return {
        "/v1/models": {"get": _get("models", "The models served", "Models", refused)},
        "/v1/models/{model}": {
            "parameters": [name],
            "get": _get("model", "One model", "Model", refused),
        },
        "/health": {
            "get": {
                "summary": "Whether requests can be answered",
                "operationId": "health",
                "responses": {
                    "200": healthy,
                    "503": {**healthy, "description": "No engine can be reached."},
                },
            }
        },
    }


def _get(operation: str, summary: str, schema: str, refused: Mapping[str, str]) -> Json:
    found: Json = {"description": summary, "content": _json(schema)}
    return {
        "summary": summary,
        "operationId": operation,
        "responses": {"200": found, **_faults("Fault", refused)},
    }


def _faults(schema: str, described: Mapping[str, str]) -> _Object:
    return {
        status: {"description": text, "content": _json(schema)}
        for status, text in described.items()
    }


def _json(schema: str) -> _Object:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _security() -> Json:
    """A session's secret is read from any of these; the same secret may stand in the address
    instead.
    """
    return {
        "bearer": {"type": "http", "scheme": "bearer"},
        "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        "session": {"type": "apiKey", "in": "header", "name": "x-midflight-session"},
    }
