"""The routes of what a session keeps by id: responses, and conversations with their items."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.errors import RequestRejected, UnknownResponse
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.dialects.fields import Body, parse
from midflight.gateway.dialects.responses import repeated
from midflight.gateway.dialects.responses_input import (
    ResponsesBody,
    conversation,
    conversation_items,
    input_items,
    responses_call,
)
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.sessions.responses import Conversation, KeptResponses
from midflight.gateway.sessions.session import Session
from midflight.text import Message
from midflight.types import Json
from midflight.wire import edge
from midflight.wire.routes import json_answer, route

_Object = dict[str, Json]
_ITEM = "/v1/conversations/{name}/items/{item}"
_ITEMS = "/v1/conversations/{name}/items"
MAX_ITEMS = 20
"""The most items that are added to a conversation at once, as many as OpenAI's endpoint takes."""


MAX_KEPT_ITEMS = 10_000
"""The most items of a conversation to which others may be added."""


class BeginBody(Body):
    """The body of a request that begins a conversation."""

    items: list[dict[str, JsonValue]] | None = None
    metadata: dict[str, JsonValue] | None = None


class LabelsBody(Body):
    """The body of a request that labels a conversation."""

    metadata: dict[str, JsonValue] | None = None


class ItemsBody(Body):
    """The body of a request that adds items to a conversation."""

    items: list[dict[str, JsonValue]]


class CountBody(ResponsesBody):
    """The body of a request that asks how long the input of a response would be."""

    model: str | None = None  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]


class KeptRoutes:
    """Each route also answers under the path of a session. A session records no turn and no failed
    request for them.
    """

    def __init__(self, gateway: Gateway, *, now: Callable[[], float]) -> None:
        self._gateway = gateway
        self._now = now

    def routes(self) -> Sequence[BaseRoute]:
        verbs = (
            ("GET", "/v1/responses/{name}", self._response),
            ("DELETE", "/v1/responses/{name}", self._forget),
            ("POST", "/v1/responses/input_tokens", self._count),
            ("POST", "/v1/responses/{name}/cancel", self._cancel),
            ("GET", "/v1/responses/{name}/input_items", self._input),
            ("POST", "/v1/conversations", self._begin),
            ("GET", "/v1/conversations/{name}", self._conversation),
            ("POST", "/v1/conversations/{name}", self._label),
            ("DELETE", "/v1/conversations/{name}", self._end),
            ("GET", _ITEMS, self._items),
            ("POST", _ITEMS, self._add),
            ("GET", _ITEM, self._item),
            ("DELETE", _ITEM, self._remove),
        )
        return [
            route(prefix + path, verb, method=method)
            for prefix in ("/s/{token}", "")
            for method, path, verb in verbs
        ]

    def _session(self, request: Request) -> Session:
        return self._gateway.session_for(
            path_token=request.path_params.get("token"), api_key=_key(request)
        )

    def _kept(self, request: Request) -> KeptResponses:
        return self._gateway.kept_for(self._session(request), _key(request))

    # --- Responses --------------------------------------------------------------------------------

    async def _response(self, request: Request) -> Response:
        """A kept response. With `stream` it is told again, in the events that it came in."""
        kept = self._kept(request)
        name = request.path_params["name"]
        response = kept.response(name)
        asked = request.query_params
        if not _is_true(asked, "stream"):
            return json_answer(response)
        after = _number(asked, "starting_after", default=-1)
        events = repeated(cast("_Object", response), kept.deltas(name), after=after)
        body = b"".join([edge.sse(event, named=True) for event in events])
        return Response(body, media_type="text/event-stream")

    async def _forget(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not self._kept(request).forget(name):
            raise UnknownResponse(
                f"there is no response {name[:80]!r} here: it may be deleted already."
            )
        return json_answer({"id": name, "object": "response", "deleted": True})

    async def _cancel(self, request: Request) -> Response:
        """Refuses: a response is kept when it is complete."""
        name = request.path_params["name"]
        self._kept(request).response(name)
        raise RequestRejected(
            f"POST {request.url.path[-80:]}: the response is complete, and none is made in the "
            "background; to end one that is under way, close its connection.",
            param="response_id",
        )

    async def _input(self, request: Request) -> Response:
        """A page of the input of a response, the newest item first. The input is the whole
        conversation before the response, without the instructions.
        """
        kept = self._kept(request)
        name = request.path_params["name"]
        response = cast("_Object", kept.response(name))
        before = kept.said(name, "response_id").whole[:-1]
        return json_answer(_page(input_items(response, before), request.query_params))

    async def _count(self, request: Request) -> Response:
        """Counts the tokens that a response would read. Waits for the body."""
        session = self._session(request)
        sent = await edge.read_body(request.receive)
        unread = UnreadFields()
        body = parse(CountBody, sent, unread=unread)
        call, _ = responses_call(body, unread, self._gateway.kept_for(session, _key(request)))
        if call.model is not None:
            self._gateway.check_model(call.model)
        self._gateway.pass_over(unread, path="/v1/responses/input_tokens")
        await self._gateway.check_lengths(call, num_bytes=len(sent))
        number = self._gateway.count(session, call.sources[0])
        answer = json_answer({"object": "response.input_tokens", "input_tokens": number})
        answer.headers.update({name.decode(): value.decode() for name, value in unread.headers()})
        return answer

    # --- Conversations ----------------------------------------------------------------------------

    async def _begin(self, request: Request) -> Response:
        """Begins a conversation. Waits for the body."""
        kept = self._kept(request)
        unread = UnreadFields()
        body = parse(BeginBody, await edge.read_body(request.receive), unread=unread)
        messages: tuple[Message, ...] = ()
        if body.items:
            messages = _read(body.items, before=(), unread=unread, kept=kept)
        self._gateway.pass_over(unread, path="/v1/conversations")
        begun = kept.begin(messages, created=int(self._now()), metadata=body.metadata or {})
        return json_answer(_as_told(begun))

    def _found(self, request: Request) -> Conversation:
        return self._kept(request).conversation(request.path_params["name"])

    async def _conversation(self, request: Request) -> Response:
        return json_answer(_as_told(self._found(request)))

    async def _label(self, request: Request) -> Response:
        """Sets the labels of a conversation. Waits for the body."""
        found = self._found(request)
        unread = UnreadFields()
        body = parse(LabelsBody, await edge.read_body(request.receive), unread=unread)
        self._gateway.pass_over(unread, path="/v1/conversations")
        found.metadata = body.metadata or {}
        return json_answer(_as_told(found))

    async def _end(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._kept(request).end(name)
        return json_answer({"id": name, "object": "conversation.deleted", "deleted": True})

    async def _items(self, request: Request) -> Response:
        """A page of the items of a conversation, the newest first."""
        items, _ = conversation_items(self._found(request))
        return json_answer(_page(items, request.query_params))

    async def _item(self, request: Request) -> Response:
        items, _ = conversation_items(self._found(request))
        return json_answer(items[_place(items, request)])

    async def _add(self, request: Request) -> Response:
        """Adds items to a conversation. Waits for the body."""
        kept = self._kept(request)
        found = self._found(request)
        unread = UnreadFields()
        body = parse(ItemsBody, await edge.read_body(request.receive), unread=unread)
        if not 1 <= len(body.items) <= MAX_ITEMS:
            raise RequestRejected(
                f"items has {len(body.items)} items: send 1 to {MAX_ITEMS}.", param="items"
            )
        number = len(conversation_items(found)[0])
        if number > MAX_KEPT_ITEMS:
            raise RequestRejected(
                f"the conversation has {number} items, and no more than {MAX_KEPT_ITEMS} are kept: "
                "begin another one.",
                param="items",
            )
        said = _read(body.items, before=found.messages, unread=unread, kept=kept)
        self._gateway.pass_over(unread, path="/v1/conversations")
        found.put(said)
        items, _ = conversation_items(found)
        return json_answer(_listed(items[number:], has_more=False))

    async def _remove(self, request: Request) -> Response:
        """Removes an item from a conversation; the others stay as they are."""
        kept = self._kept(request)
        found = self._found(request)
        items, places = conversation_items(found)
        removed = _place(items, request)
        at = places[removed]
        left = [
            cast("dict[str, JsonValue]", item)
            for number, item in enumerate(items)
            if places[number] == at and number != removed
        ]
        said = list(found.messages)
        said[at : at + 1] = _read(left, before=(), unread=UnreadFields(), kept=kept) if left else ()
        del found.item_ids[removed]
        found.put(said)
        return json_answer(_as_told(found))


def _key(request: Request) -> str | None:
    return edge.key_of(request.scope)


def _read(
    items: list[dict[str, JsonValue]],
    *,
    before: Sequence[Message],
    unread: UnreadFields,
    kept: KeptResponses,
) -> tuple[Message, ...]:
    given = cast("list[JsonValue]", items)
    return conversation(given, before=before, unread=unread, kept=kept, param="items")


def _as_told(found: Conversation) -> Json:
    return {
        "id": found.name,
        "object": "conversation",
        "created_at": found.created,
        "metadata": found.metadata,
    }


def _place(items: Sequence[Json], request: Request) -> int:
    """The place of the item that the path names."""
    name = request.path_params["item"]
    for place, item in enumerate(items):
        if cast("_Object", item)["id"] == name:
            return place
    raise UnknownResponse(
        f"this conversation has no item {name[:80]!r}: list its items for their ids."
    )


def _is_true(asked: Mapping[str, str], param: str) -> bool:
    value = asked.get(param, "false").lower()
    if value not in ("true", "false"):
        raise RequestRejected(f"{param} is {value[:80]!r}: send true or false.", param=param)
    return value == "true"


def _number(asked: Mapping[str, str], param: str, *, default: int) -> int:
    value = asked.get(param)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) <= 9):
        raise RequestRejected(
            f"{param} is {value[:80]!r}: send the sequence number of an event.", param=param
        )
    return int(value)


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
    return _listed(page, has_more=start + len(page) < len(items))


def _listed(page: list[Json], *, has_more: bool) -> Json:
    ids = [cast("_Object", item)["id"] for item in page]
    return {
        "object": "list",
        "data": page,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }
