"""The introduction of an engine that may join a gateway: which process it is, what it can do, which
model it has, and whether it sees a file of the gateway's. The gateway asks once for each joining.
`Hello` has the rest, on each connection.
"""

import asyncio
import contextlib
import secrets
from pathlib import Path
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.engines.wire import PREFIX
from midflight.errors import EngineRefused
from midflight.models.identity import ModelIdentity
from midflight.ports import Engine
from midflight.types import Capabilities, Version
from midflight.version import __version__
from midflight.wire.client import HttpClient
from midflight.wire.routes import json_answer, route

NONCE = ".midflight-seen-"
"""The beginning of the names of files that an engine may be asked to look at. It looks at no
others.
"""
MAX_NONCE_BYTES = 64


class About(msgspec.Struct, frozen=True):
    process: str
    """The process's id, drawn at its start. No other process has it, not even a later one at the
    same address.
    """
    midflight: str
    """The engine's version of the package."""
    capabilities: Capabilities
    version: Version
    """The version of the weights that the engine serves."""
    model: ModelIdentity
    sees: str | None = None
    """The contents of the file that the engine was asked to look at. `None` if it was not asked, or
    cannot read the file.
    """


def about_route(engine: Engine, model: Path) -> BaseRoute:
    """`GET /engine/v1/about`. `model` is the folder that the engine was started from."""
    process = secrets.token_hex(8)

    async def about(request: Request) -> Response:
        weights = bool(request.query_params.get("weights"))
        nonce = Path(request.query_params.get("nonce", ""))
        identity = await asyncio.to_thread(ModelIdentity.of, model, weights=weights)
        sees = None
        if nonce.name.startswith(NONCE):
            sees = await asyncio.to_thread(_seen, nonce)
        capabilities = engine.capabilities
        health = await engine.health()
        answer = About(
            process=process,
            midflight=__version__,
            capabilities=capabilities,
            version=health.version,
            model=identity,
            sees=sees,
        )
        return json_answer(answer)

    return route(PREFIX + "/about", about, method="GET")


def _seen(path: Path) -> str | None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(MAX_NONCE_BYTES).decode(errors="replace")
    return None


async def ask_about(
    url: str, *, token: str | None, nonce: Path | None = None, weights: bool = False, seconds: float
) -> About:
    """Asks the engine at `url` about itself. Waits for the answer, `seconds` at most. Raises
    `EngineRefused` with the reason if an engine cannot join from there.
    """

    def lost(what: str) -> EngineRefused:
        why = what.partition(": ")[2].partition("(")[0]
        return EngineRefused(
            (
                f"no engine answers at {url} ({why}): start it first, and name an address that the "
                "gateway reaches."
            ),
            param="url",
        )

    asked: dict[str, str] = {}
    if nonce:
        asked["nonce"] = str(nonce)
    if weights:
        asked["weights"] = "1"
    async with HttpClient(url, lost=lost, token=token) as http:
        answer = await http.call("GET", f"{PREFIX}/about?{urlencode(asked)}", seconds=seconds)
    if answer.status == 401:
        raise EngineRefused(
            (
                f"the engine at {url} does not accept the token: give the one that it was started "
                "with."
            ),
            param="token",
        )
    with contextlib.suppress(msgspec.DecodeError):
        if answer.status == 200:
            return msgspec.json.decode(answer.content, type=About)
        if answer.status < 500:
            raise _no_engine(url, f"answered {answer.status}")
        raise EngineRefused(
            f"the engine at {url} failed: {answer.content[:300].decode(errors='replace')}",
            param="url",
        )
    raise _no_engine(url, "answered something else")


def _no_engine(url: str, what: str) -> EngineRefused:
    return EngineRefused(
        f"{url} is no engine of Midflight {__version__}: it {what} where one says what it is. A "
        "vLLM or SGLang server joins by `midflight join --engine KIND --engine-url URL`.",
        param="url",
    )
