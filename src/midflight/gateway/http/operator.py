"""The operator's routes: pause, continue and abort, with the JSON that SGLang's clients send."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from midflight.errors import RequestRejected, Unauthorized, nearest
from midflight.gateway.dialects.faults import fault_of, log_unexpected
from midflight.gateway.http.wire import ClientGone, bearer, read_body, send_fault, send_json
from midflight.types import Json, PauseMode

_PAUSE_NAMES = {
    **{mode.value: mode for mode in PauseMode},
    "in_place": PauseMode.KEEP,
    "retract": PauseMode.RECOMPUTE,
    "wait": PauseMode.DRAIN,
}
"""Pause modes as the project, SGLang and vLLM call them."""


class Control(Protocol):
    """The operator's verbs over all engines: `control.Control`."""

    async def pause(self, mode: PauseMode | None = None) -> None: ...
    async def resume(self) -> None: ...
    async def abort(self, request_id: str | None) -> int: ...


class PauseBody(BaseModel):
    mode: str | None = None


class AbortBody(BaseModel):
    rid: str | None = None
    abort_all: bool = False


B = TypeVar("B", bound=BaseModel)


def operator_routes(control: Control, *, control_token: str | None) -> list[Route]:
    """Guarded by `control_token`, where there is one."""
    acts = {"/pause_generation": _pause, "/continue_generation": _resume, "/abort_request": _abort}
    return [Route(path, OperatorEndpoint(partial(act, control), control_token), methods=["POST"]) for path, act in acts.items()]


class OperatorEndpoint:
    """A control route: parses, acts, and turns errors into answers."""

    def __init__(self, act: Callable[[bytes], Awaitable[Json]], control_token: str | None) -> None:
        self._act = act
        self._token = control_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits for the body, then for the control to have acted."""
        try:
            self._check(bearer(scope))
            await send_json(send, await self._act(await read_body(receive)))
        except ClientGone:
            return
        except Exception as error:  # the edge: every error becomes an answer
            log_unexpected(error)
            await send_fault(send, fault_of(error))

    def _check(self, key: str | None) -> None:
        if self._token is not None and not hmac.compare_digest((key or "").encode(), self._token.encode()):
            raise Unauthorized("control needs its own token: send it as `Authorization: Bearer <token>`.")


async def _pause(control: Control, body: bytes) -> Json:
    name = _operator_body(PauseBody, body).mode
    if name is not None and name not in _PAUSE_NAMES:
        raise RequestRejected(f"mode is {name[:80]!r}: not a way to pause.{nearest(name, _PAUSE_NAMES)}", param="mode")
    await control.pause(None if name is None else _PAUSE_NAMES[name])
    return {"status": "ok", "message": "Generation is paused."}


async def _resume(control: Control, body: bytes) -> Json:
    del body  # nothing in it matters here
    await control.resume()
    return {"status": "ok", "message": "Generation continues."}


async def _abort(control: Control, body: bytes) -> Json:
    asked = _operator_body(AbortBody, body)
    if asked.rid is None and not asked.abort_all:
        raise RequestRejected('rid is missing: send the id of a request, or "abort_all": true.', param="rid")
    found = await control.abort(None if asked.abort_all else asked.rid)
    return {"status": "ok", "num_aborted": found}


def _operator_body(kind: type[B], body: bytes) -> B:
    """Fields that other servers know are ignored here; no body is an empty one."""
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RequestRejected(f"{place or 'the body'}: {first['msg']}. Send a JSON object.", param=place or None) from None
