"""HTTP to an inference server: JSON calls and server-sent events, with errors that name the server and the path."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import aiohttp
import msgspec

from midflight.errors import EngineError, EngineUnavailable, Overloaded, RequestRejected
from midflight.wire.client import HttpClient

_JSON = {"Content-Type": "application/json"}
_LINE_BYTES = 2**24
"""Of one event: a server that repeats what it said sends the longest answer in one."""
_QUESTION_SECONDS = 10.0
"""For questions that a server answers at once. With a longer limit, questions of callers that have left would pile up at a frozen server."""
_DEED_SECONDS = 600.0
"""For the longest work of a server: loading the largest model. Callers have shorter deadlines, but those do not reach over the wire,
and a call that never ended would keep all others waiting."""
_OF_THE_REQUEST = (400, 413, 422)
"""Statuses that judge what was asked. Any other may be of whatever stands before the server, or took its port: elsewhere it may succeed."""


class ServerClient:
    """Connections to one server. Every call waits for the answer; deadlines are the caller's, and ours at the latest."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url
        self._http = HttpClient(url, lost=self.unavailable, line_bytes=_LINE_BYTES)

    async def __aenter__(self) -> ServerClient:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.__aexit__(*exc)

    async def get(self, path: str) -> object:
        return _json(await self._call("GET", path, None, seconds=_QUESTION_SECONDS))

    async def post(self, path: str, body: object = None) -> object:
        return _json(await self._call("POST", path, body, seconds=_DEED_SECONDS))

    async def paths(self) -> frozenset[str]:
        """The routes that the server has."""
        described = await self.get("/openapi.json")
        paths = described.get("paths") if isinstance(described, dict) else None
        if not isinstance(paths, dict):
            raise EngineError(f"{self._who} describes no routes at /openapi.json: neither vLLM nor SGLang listens there. Check the URL.")
        return frozenset(map(str, paths))

    async def _call(self, method: str, path: str, body: object, *, seconds: float) -> bytes:
        answer = await self._http.call(method, path, _encoded(body), headers=_JSON, seconds=seconds)
        if answer.status >= 300:
            raise EngineError(f"{self._who} answered {path} with {answer.status}: {_shown(answer.content)}. Look at its log.")
        return answer.content

    async def events(self, path: str, body: object) -> AsyncIterator[bytes]:
        """Data of each server-sent event but the closing `[DONE]`, for as long as they come. `RequestRejected` where the server refuses
        the request."""
        async with self._http.open("POST", path, _encoded(body), headers=_JSON) as answer:
            if answer.status != 200:
                raise self._refusal(answer, path, await answer.read())
            try:
                async for line in answer.content:
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        yield data
            except ValueError as error:
                raise self.unavailable(f"broke off its answer to {path} with a line that is too long: {error!r}") from error

    def unavailable(self, what: str) -> EngineUnavailable:
        return EngineUnavailable(f"{self._who} {what}. Send the request to another engine, or wait for this one.")

    def _refusal(self, answer: aiohttp.ClientResponse, path: str, content: bytes) -> Exception:
        said = f"{self._who} answered {path} with {answer.status}: {_shown(content)}"
        if answer.status in (429, 503):
            after = answer.headers.get("Retry-After", "1")
            return Overloaded(f"{said}.", retry_after_seconds=int(after) if after.isdigit() else 1)
        if answer.status in _OF_THE_REQUEST:
            return RequestRejected(f"{said}.")
        return EngineUnavailable(f"{said}. Look at its log.")

    @property
    def _who(self) -> str:
        return f"engine {self.name!r} at {self.url}"


def _encoded(body: object) -> bytes | None:
    return None if body is None else msgspec.json.encode(body)


def _json(content: bytes) -> object:
    try:
        return msgspec.json.decode(content) if content.strip() else None
    except msgspec.DecodeError:
        return content.decode(errors="replace")


def _shown(content: bytes) -> str:
    return content[:300].decode(errors="replace").strip()


def part(answer: object, *path: str | int, of: str) -> object:
    """A part of a JSON answer; `EngineError` where it is not there. `of` names the server that gave it, and the version it takes."""
    at = answer
    for key in path:
        if isinstance(at, dict) and key in at:
            at = cast(dict[object, object], at)[key]
        elif isinstance(at, list) and isinstance(key, int) and key < len(cast(list[object], at)):
            at = cast(list[object], at)[key]
        else:
            raise EngineError(f"reading {str(answer)[:200]!r}: it has no {'.'.join(map(str, path))}. Attach to {of}.")
    return at


def number(answer: object, *path: str | int, of: str) -> int:
    """A part that is a whole number; `EngineError` where it is none."""
    found = part(answer, *path, of=of)
    if not isinstance(found, int):
        raise EngineError(
            f"reading {str(answer)[:200]!r}: {'.'.join(map(str, path))} is {found!r}, expected a whole number. Attach to {of}."
        )
    return found
