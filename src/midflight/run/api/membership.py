"""`/midflight/v1/engines`: how engines join a run, move to another address and leave it; and the
client of these routes.

GET    /midflight/v1/engines        who is a member, and what an engine must be like to become one
PUT    /midflight/v1/engines/NAME   joins; moves, where the address is another; changes nothing,
where it is the same DELETE /midflight/v1/engines/NAME   leaves: requests end, the rest goes on
elsewhere
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.errors import RequestRejected
from midflight.models.identity import Leaf
from midflight.run.api.service import PREFIX
from midflight.types import Version
from midflight.wire.client import Answered, HttpClient
from midflight.wire.routes import StrictBody, body_of, json_answer, route

PATH = PREFIX + "/engines"


class EngineAddress(StrictBody, frozen=True):
    """Where an engine is reached. Its repr would hold the token: never print one."""

    url: Annotated[str, Meta(pattern=r"^https?://[^\s/?#@]+/?$", max_length=512)]
    token: Annotated[str, Meta(max_length=512)] | None = None
    """Of the engine's wire; none is that of the run's own engines."""
    again: bool = False
    """It was said before, and may be news to a gateway that was started anew: an engine that was
    told to leave stays away.
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
    """Why it is in quarantine."""


class Left(msgspec.Struct, frozen=True):
    name: str
    resumed: int
    """Requests that had not ended when it was let go, and go on elsewhere."""


class EngineNeeds(msgspec.Struct, frozen=True):
    """What an engine must be like to join."""

    midflight: str
    model_path: str
    """The folder that the run's engines were started from, on the gateway's machine."""
    settings: Mapping[str, Leaf]
    """Options that its engines share, by the keys of the configuration."""


class Membership(msgspec.Struct, frozen=True):
    engines: tuple[MemberState, ...]
    run: EngineNeeds


class Membered(Protocol):
    """Who admits engines and lets them go."""

    def members(self) -> Membership: ...
    async def put(self, name: str, address: EngineAddress) -> tuple[MemberState, bool]:
        """The engine as a member, and whether it is new here; `EngineRefused` or `MemberConflict`,
        and nothing has changed.
        """
        ...

    async def leave(
        self, name: str, *, force: bool, drain_seconds: float | None, for_good: bool = False
    ) -> Left:
        """Waits for its requests, `drain_seconds` at most (none: as configured). `force`: though
        nobody else serves. `for_good`: what only it could answer fails at once and waits for
        nobody."""
        ...


def member_routes(run: Membered, *, token: str) -> Sequence[BaseRoute]:
    """All behind the control token."""

    async def listed(request: Request) -> Response:
        return json_answer(run.members())

    async def put(request: Request) -> Response:
        state, is_new = await run.put(
            request.path_params["name"], await body_of(request, EngineAddress)
        )
        return json_answer(state, status=201 if is_new else 200)

    async def delete(request: Request) -> Response:
        asked = request.query_params
        force, for_good = (
            asked.get(name, "0").lower() in ("", "1", "true") for name in ("force", "for_good")
        )
        seconds = _seconds(asked["drain_seconds"]) if "drain_seconds" in asked else None
        return json_answer(
            await run.leave(
                request.path_params["name"], force=force, drain_seconds=seconds, for_good=for_good
            )
        )

    one = PATH + "/{name:path}"
    return [
        route(PATH, listed, token=token, method="GET"),
        route(one, put, token=token, method="PUT"),
        route(one, delete, token=token, method="DELETE"),
    ]


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


class MembershipClient:
    """These routes, from outside. Open within `async with http`."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def members(self, *, seconds: float) -> Answered:
        return await self._http.call("GET", PATH, seconds=seconds)

    async def put(self, name: str, address: EngineAddress, *, seconds: float) -> Answered:
        return await self._http.call(
            "PUT", f"{PATH}/{quote(name, safe='')}", msgspec.json.encode(address), seconds=seconds
        )

    async def leave(
        self,
        name: str,
        *,
        force: bool,
        drain_seconds: float | None = None,
        for_good: bool = False,
        seconds: float | None = None,
    ) -> Answered:
        given = {
            "drain_seconds": None if drain_seconds is None else str(drain_seconds),
            "for_good": "true" if for_good else None,
        }
        asked = {
            "force": str(force).lower(),
            **{name: value for name, value in given.items() if value is not None},
        }
        return await self._http.call(
            "DELETE", f"{PATH}/{quote(name, safe='')}?{urlencode(asked)}", seconds=seconds
        )
