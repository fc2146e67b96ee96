"""The gateway's routes as an OpenAPI document."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from midflight.gateway.dialects.chat import ChatBody
from midflight.gateway.dialects.completions import CompletionBody
from midflight.gateway.dialects.contents_input import ContentsBody, CountContentsBody
from midflight.gateway.dialects.messages_input import MessagesBody, PromptBody
from midflight.gateway.dialects.native import NativeBody
from midflight.gateway.dialects.responses_input import ResponsesBody
from midflight.gateway.dialects.tokens import TokensBody
from midflight.types import Json
from midflight.version import __version__

_Object = dict[str, Json]


@dataclass(frozen=True, slots=True)
class RouteDescription:
    """A route that takes a body."""

    body: type[BaseModel]
    summary: str
    fault: str = "Fault"
    """The schema of its errors."""
    streams: bool = True
    whole: bool = True


DESCRIBED: Mapping[str, RouteDescription] = {
    "/v1/chat/completions": RouteDescription(ChatBody, "Chat, as OpenAI's SDK speaks it"),
    "/v1/completions": RouteDescription(
        CompletionBody, "Text completion, as OpenAI's SDK speaks it"
    ),
    "/v1/responses": RouteDescription(
        ResponsesBody, "A response, as OpenAI's SDK speaks it; its session keeps it"
    ),
    "/v1/messages": RouteDescription(
        MessagesBody, "A message, as Anthropic's SDK speaks it", fault="NamedFault"
    ),
    "/v1/messages/count_tokens": RouteDescription(
        PromptBody, "How long a prompt is", fault="NamedFault", streams=False
    ),
    "/v1beta/models/{model}:generateContent": RouteDescription(
        ContentsBody, "A content, as Google's SDK speaks it", fault="GooglesFault", streams=False
    ),
    "/v1beta/models/{model}:streamGenerateContent": RouteDescription(
        ContentsBody,
        "A streamed content, as Google's SDK speaks it",
        fault="GooglesFault",
        whole=False,
    ),
    "/v1beta/models/{model}:countTokens": RouteDescription(
        CountContentsBody, "How long contents are", fault="GooglesFault", streams=False
    ),
    "/generate": RouteDescription(
        NativeBody, "Generation from text or token ids, as SGLang's clients speak it"
    ),
    "/inference/v1/generate": RouteDescription(
        TokensBody, "Generation from token ids, as vLLM's clients speak it"
    ),
}
"""The route of every dialect, with the body that it parses."""

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
    "GooglesFault": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message", "status"],
                "properties": {"code": {"type": "integer"}, "message": _TEXT, "status": _TEXT},
            }
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
    """The whole document of a gateway that serves this model. A request may name its session by
    address or by key. Plain serving may need neither.
    """
    paths: _Object = {path: {"post": _post(path, it)} for path, it in DESCRIBED.items()}
    paths |= _plain_paths()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Midflight gateway",
            "version": __version__,
            "description": (
                "Fields that a schema does not name have no effect, and the head of the answer "
                "says so; those that would change the text are refused by name."
            ),
        },
        "servers": [
            {"url": "/"},
            {
                "url": "/s/{token}",
                "variables": {"token": {"default": "", "description": "The session's secret."}},
            },
        ],
        "security": [{}, {"bearer": []}, {"apiKey": []}, {"googleKey": []}, {"session": []}],
        "paths": paths,
        "components": {"schemas": {**_bodies(model), **_SCHEMAS}, "securitySchemes": _security()},
    }


def _bodies(model: str) -> _Object:
    """The schemas of all bodies and of their parts. Only one model is served."""
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


def _post(path: str, described: RouteDescription) -> Json:
    # A batch of the native dialect is answered by a list.
    kinds: Json = ["object", "array"] if path == "/generate" else "object"
    answers: _Object = {}
    if described.whole:
        answers["application/json"] = {"schema": {"type": kinds}}
    if described.streams:
        answers["text/event-stream"] = {}
    return {
        "summary": described.summary,
        "operationId": re.sub(r"\W+", "_", path).strip("_"),
        **_parameters(path, described),
        "requestBody": {"required": True, "content": _json(described.body.__name__)},
        "responses": {
            "200": {"description": "The answer, whole or streamed.", "content": answers},
            **_faults(described.fault, _FAULTS),
        },
    }


def _parameters(path: str, described: RouteDescription) -> _Object:
    """The parameters that stand in the path of a route."""
    found: list[Json] = []
    if "{model}" in path:
        found.append({"name": "model", "in": "path", "required": True, "schema": _TEXT})
    if not described.whole:
        found.append({"name": "alt", "in": "query", "required": True, "schema": {"const": "sse"}})
    return {"parameters": found} if found else {}


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
    """A session's secret is read from any of these; the same secret may be in the
    address instead.
    """
    return {
        "bearer": {"type": "http", "scheme": "bearer"},
        "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        "googleKey": {"type": "apiKey", "in": "header", "name": "x-goog-api-key"},
        "session": {"type": "apiKey", "in": "header", "name": "x-midflight-session"},
    }
