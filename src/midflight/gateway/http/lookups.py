"""The lookups that a client makes beside its answers: the models, the length of a prompt, and kept
responses and conversations.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import cast

from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.errors import RequestRejected, UnknownModel, UnknownResponse, nearest
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.dialects.fields import Body, parse
from midflight.gateway.dialects.messages import messages_fault
from midflight.gateway.dialects.messages_input import PromptBody
from midflight.gateway.dialects.responses_input import conversation, input_items
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.http.openapi import openapi_document
from midflight.gateway.sessions.request import CompletionCall
from midflight.gateway.sessions.responses import Conversation, KeptResponses
from midflight.gateway.sessions.session import Session
from midflight.text import Message
from midflight.types import Json
from midflight.wire.edge import headers_of, key_in, read_body
from midflight.wire.routes import json_answer, route

_Object = dict[str, Json]


class Lookups:
    """The routes of the lookups. Each also answers under the path of a session. A session records
    no turn and no failed request for them.
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
        """Counts the tokens that `/v1/messages` would send. Waits for the body."""
        session = self._session(request)
        sent = await read_body(request.receive)
        unread = UnreadFields()
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
        """The one model, as an object that the clients of OpenAI and of Anthropic both read."""
        self._session(request)
        name = self._gateway.model
        limits = self._gateway.limits
        model: Json = {
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
        """A page of the input of a response, the newest item first. The input is the whole
        conversation before the response, without the instructions.
        """
        kept = self._kept(request)
        name = request.path_params["name"]
        response = cast("_Object", kept.response(name))
        before = kept.said(name, "response_id").whole[:-1]
        return json_answer(_page(input_items(response, before), request.query_params))

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
        unread = UnreadFields()
        body = parse(BeginBody, await read_body(request.receive), unread=unread)
        self._gateway.pass_over(unread, path="/v1/conversations")
        messages: tuple[Message, ...] = ()
        if body.items:
            items = cast("list[JsonValue]", body.items)
            messages = conversation(items, before=(), unread=unread, kept=kept)
        begun = kept.begin(messages, created=int(self._now()), metadata=body.metadata or {})
        return json_answer(_as_told(begun))

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
    """A page of a list, as OpenAI's `order`, `after` and `limit` select it."""
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
    """The body of a request that begins a conversation."""

    items: list[dict[str, JsonValue]] | None = None
    metadata: dict[str, JsonValue] | None = None


def _as_told(found: Conversation) -> Json:
    return {
        "id": found.name,
        "object": "conversation",
        "created_at": found.created,
        "metadata": found.metadata,
    }
