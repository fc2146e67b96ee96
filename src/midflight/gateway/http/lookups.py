"""The lookups that a client makes beside its answers: the models, and the length of a prompt."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.dialects.contents import contents_fault
from midflight.gateway.dialects.contents_input import CountContentsBody
from midflight.gateway.dialects.fields import parse
from midflight.gateway.dialects.messages import messages_fault
from midflight.gateway.dialects.messages_input import PromptBody
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.http.openapi import openapi_document
from midflight.gateway.sessions.request import CompletionCall
from midflight.gateway.sessions.session import Session
from midflight.types import Json
from midflight.wire.edge import key_of, read_body
from midflight.wire.routes import json_answer, route

COUNT = "/models/{model:path}:countTokens"
"""Google's path behind its version."""


class Lookups:
    """The routes of the lookups. Each also answers under the path of a session. A session records
    no turn and no failed request for them.
    """

    def __init__(self, gateway: Gateway, *, now: Callable[[], float]) -> None:
        self._gateway = gateway
        self._created = int(now())

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
                route(prefix + version + COUNT, self._count_contents, fault=contents_fault)
                for version in ("/v1beta", "/v1")
            ]
            found += [
                route(prefix + path, self._googles_models, method="GET", fault=contents_fault)
                for path in ("/v1beta/models", "/v1beta/models/{model:path}")
            ]
        return [*found, route("/openapi.json", self._document, method="GET")]

    def _session(self, request: Request) -> Session:
        return self._gateway.session_for(
            path_token=request.path_params.get("token"), api_key=key_of(request.scope)
        )

    async def _count(self, request: Request) -> Response:
        """Counts the tokens that `/v1/messages` would send. Waits for the body."""
        session = self._session(request)
        sent = await read_body(request.receive)
        unread = UnreadFields()
        body = parse(PromptBody, sent, unread=unread)
        self._gateway.check_model(body.model)
        prompt = body.prompt(unread)
        self._gateway.pass_over(unread, path="/v1/messages/count_tokens")
        await self._gateway.check_lengths(
            CompletionCall((prompt,), prompt_param="messages"), num_bytes=len(sent)
        )
        answer = json_answer({"input_tokens": self._gateway.count(session, prompt)})
        answer.headers.update({name.decode(): value.decode() for name, value in unread.headers()})
        return answer

    async def _count_contents(self, request: Request) -> Response:
        """Counts the tokens that `:generateContent` would send. Waits for the body."""
        session = self._session(request)
        sent = await read_body(request.receive)
        unread = UnreadFields()
        body = parse(CountContentsBody, sent, unread=unread)
        self._gateway.check_model(request.path_params["model"])
        prompt = body.prompt(unread)
        self._gateway.pass_over(unread, path="/v1beta/models/{model}:countTokens")
        await self._gateway.check_lengths(
            CompletionCall((prompt,), prompt_param="contents"), num_bytes=len(sent)
        )
        number = self._gateway.count(session, prompt)
        details: Json = [{"modality": "TEXT", "tokenCount": number}]
        answer = json_answer({"totalTokens": number, "promptTokensDetails": details})
        answer.headers.update({name.decode(): value.decode() for name, value in unread.headers()})
        return answer

    async def _googles_models(self, request: Request) -> Response:
        """The one model, as Google's clients read it."""
        self._session(request)
        model = self._as_googles()
        asked = request.path_params.get("model")
        if asked is None:
            return json_answer({"models": [model]})
        self._gateway.check_model(asked)
        return json_answer(model)

    def _as_googles(self) -> dict[str, Json]:
        name = self._gateway.model
        most = self._gateway.limits.max_context
        return {
            "name": f"models/{name}",
            "baseModelId": name,
            "version": "1",
            "displayName": name,
            "inputTokenLimit": most,
            "outputTokenLimit": most,
            "supportedGenerationMethods": ["generateContent", "countTokens"],
        }

    async def _models(self, request: Request) -> Response:
        """The one model, as an object that the clients of OpenAI, Anthropic and Google all read."""
        self._session(request)
        name = self._gateway.model
        limits = self._gateway.limits
        googles = self._as_googles()
        model: Json = {
            **googles,
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "midflight",
            "max_model_len": limits.max_context,
            # Anthropic's names for the same.
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
                    "models": [googles],
                    "has_more": False,
                    "first_id": name,
                    "last_id": name,
                }
            )
        self._gateway.check_model(asked)
        return json_answer(model)

    async def _document(self, request: Request) -> Response:
        return json_answer(openapi_document(self._gateway.model))
