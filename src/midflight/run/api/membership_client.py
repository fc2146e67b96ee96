"""The client of `/midflight/v1/engines`."""

from urllib.parse import quote, urlencode

import msgspec

from midflight.run.api.membership import PATH, EngineAddress
from midflight.wire.client import HttpAnswer, HttpClient


class MembershipClient:
    """Calls the routes from outside. It is open within `async with http`."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def members(self, *, seconds: float) -> HttpAnswer:
        return await self._http.call("GET", PATH, seconds=seconds)

    async def put(self, name: str, address: EngineAddress, *, seconds: float) -> HttpAnswer:
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
    ) -> HttpAnswer:
        asked = {"force": str(force).lower()}
        if drain_seconds is not None:
            asked["drain_seconds"] = str(drain_seconds)
        if for_good:
            asked["for_good"] = "true"
        return await self._http.call(
            "DELETE", f"{PATH}/{quote(name, safe='')}?{urlencode(asked)}", seconds=seconds
        )
