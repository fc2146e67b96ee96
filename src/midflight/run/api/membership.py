"""`/midflight/v1/engines`: how engines join a run, move to another address and leave it.

| request | what it does |
|---|---|
| `GET /midflight/v1/engines` | lists the members, and what an engine must be like to become one |
| `PUT /midflight/v1/engines/NAME` | the engine joins; it moves, where the address is another; where that is the same, nothing changes |
| `DELETE /midflight/v1/engines/NAME` | the engine leaves: its requests end, or go on elsewhere |
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.errors import RequestRejected
from midflight.models.identity import Leaf
from midflight.run.api.service import PREFIX
from midflight.types import Version
from midflight.wire.routes import StrictBody, body_of, json_answer, route

PATH = PREFIX + "/engines"


class EngineAddress(StrictBody, frozen=True):
    """The address of an engine. Its repr leaves the token out, so that it can be printed."""

    url: Annotated[str, Meta(pattern=r"^https?://[^\s/?#@]+/?$", max_length=512)]
    token: Annotated[str, Meta(max_length=512)] | None = None
    """The token of the engine's wire; without one it is that of the run's own engines."""
    again: bool = False
    """The address was sent before, and may be news to a gateway that was started anew. An engine
    that was told to leave stays away.
    """

    @property
    def place(self) -> tuple[str, str | None]:
        return self.url, self.token

    def __repr__(self) -> str:
        return f"<EngineAddress {self.url}>"


class MemberState(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    url: str
    state: str
    """`serving`, `joining` (it gets the current weights), `quarantined` or `leaving`."""
    version: Version
    requests: int
    error: str | None = None
    """The reason for its quarantine."""


class EngineLeftAnswer(msgspec.Struct, frozen=True):
    name: str
    resumed: int
    """Requests that had not ended when it was let go, and go on elsewhere."""


class EngineNeeds(msgspec.Struct, frozen=True):
    """The requirements that an engine must meet to join."""

    midflight: str
    model_path: str
    """The folder that the run's engines were started from, on the gateway's machine."""
    settings: Mapping[str, Leaf]
    """Options that its engines share, by the keys of the configuration."""


class Membership(msgspec.Struct, frozen=True):
    engines: tuple[MemberState, ...]
    run: EngineNeeds


class EngineMembership(Protocol):
    """Admits engines and lets them go."""

    def members(self) -> Membership: ...
    async def put(self, name: str, address: EngineAddress) -> tuple[MemberState, bool]:
        """Returns the engine as a member, and whether it is new here. After `EngineRefused` or
        `MemberConflict` nothing has changed.
        """
        ...

    async def leave(
        self, name: str, *, force: bool, drain_seconds: float | None, for_good: bool = False
    ) -> EngineLeftAnswer:
        """Waits for its requests, `drain_seconds` at most; without a number, as configured. With
        `force` it leaves though no other engine serves. With `for_good` a request that only it
        could answer fails at once, and waits for no other engine.
        """
        ...


def member_routes(run: EngineMembership, *, token: str) -> Sequence[BaseRoute]:
    """Returns the routes of the membership. All need the control token."""

    async def listed(request: Request) -> Response:
        return json_answer(run.members())

    async def put(request: Request) -> Response:
        address = await body_of(request, EngineAddress)
        state, is_new = await run.put(request.path_params["name"], address)
        return json_answer(state, status=201 if is_new else 200)

    async def delete(request: Request) -> Response:
        asked = request.query_params
        seconds = _seconds(asked["drain_seconds"]) if "drain_seconds" in asked else None
        left = await run.leave(
            request.path_params["name"],
            force=_is_on(asked.get("force", "0")),
            drain_seconds=seconds,
            for_good=_is_on(asked.get("for_good", "0")),
        )
        return json_answer(left)

    one = PATH + "/{name:path}"
    return [
        route(PATH, listed, token=token, method="GET"),
        route(one, put, token=token, method="PUT"),
        route(one, delete, token=token, method="DELETE"),
    ]


def _is_on(text: str) -> bool:
    return text.lower() in ("", "1", "true")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 1e6:
        raise RequestRejected(
            f"drain_seconds is {text[:40]!r}: give seconds from 0.", param="drain_seconds"
        )
    return seconds
