"""The routes of the operator's control, with the JSON that clients of SGLang and vLLM send."""

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.errors import RequestRejected, nearest
from midflight.gateway.http.control import Control
from midflight.types import PauseMode
from midflight.wire.routes import body_of, json_answer, route

PAUSE_NAMES = {
    **{mode.value: mode for mode in PauseMode},
    "in_place": PauseMode.KEEP,
    "retract": PauseMode.RECOMPUTE,
    "wait": PauseMode.DRAIN,
}
"""Pause modes by their names in this project, in SGLang and in vLLM."""


class OperatorPause(msgspec.Struct, frozen=True):
    """The body of a pause. Other fields are ignored, here and in `OperatorAbort`."""

    mode: str | None = None


class OperatorAbort(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class OperatorAborts(msgspec.Struct, frozen=True):
    """The body that vLLM's clients send. Without ids it means all requests."""

    request_ids: list[str] | None = None


class ControlRoutes:
    """SGLang's `/pause_generation`, `/continue_generation`, `/abort_request` and `/flush_cache`,
    and vLLM's `/pause`, `/resume`, `/is_paused`, `/abort_requests` and `/reset_prefix_cache`. If
    there is a `token`, they demand it.
    """

    def __init__(self, control: Control, *, token: str | None) -> None:
        self._control = control
        self._token = token

    def routes(self) -> Sequence[BaseRoute]:
        verbs = {
            "/pause_generation": self._pause,
            "/pause": self._pause,
            "/continue_generation": self._resume,
            "/resume": self._resume,
            "/abort_requests": self._abort_several,
            "/inference/v1/abort_requests": self._abort_several,
            "/flush_cache": self._flush,
            "/reset_prefix_cache": self._flush,
            "/abort_request": self._abort,
        }
        asked = {"/is_paused": self._is_paused, "/flush_cache": self._flush}
        found = [route(path, verb, token=self._token) for path, verb in verbs.items()]
        for path, verb in asked.items():
            found.append(route(path, verb, token=self._token, method="GET"))
        return found

    async def _pause(self, request: Request) -> Response:
        """Pauses. The mode is in the body or, from vLLM's clients, in the query. If there is none,
        each engine pauses in the mode that costs it least.
        """
        name = (await body_of(request, OperatorPause)).mode or request.query_params.get("mode")
        if name is not None and name not in PAUSE_NAMES:
            raise RequestRejected(
                f"mode is {name[:80]!r}: not a way to pause.{nearest(name, PAUSE_NAMES)}",
                param="mode",
            )
        mode = None if name is None else PAUSE_NAMES[name]
        await self._control.pause(mode)
        if mode is PauseMode.ABORT:
            await self._control.abort(None)
        return json_answer({"status": "ok", "message": "Generation is paused."})

    async def _resume(self, request: Request) -> Response:
        await self._control.resume()
        return json_answer({"status": "ok", "message": "Generation continues."})

    async def _abort(self, request: Request) -> Response:
        asked = await body_of(request, OperatorAbort)
        if asked.rid is None and not asked.abort_all:
            raise RequestRejected(
                'rid is missing: send the id of a request, or "abort_all": true.', param="rid"
            )
        found = await self._control.abort(None if asked.abort_all else asked.rid)
        return json_answer({"status": "ok", "num_aborted": found})

    async def _abort_several(self, request: Request) -> Response:
        wanted = (await body_of(request, OperatorAborts)).request_ids
        found = 0
        for each in wanted or (None,):
            found += await self._control.abort(each)
        return json_answer({"status": "aborted", "aborted": found})

    async def _is_paused(self, request: Request) -> Response:
        return json_answer({"is_paused": self._control.paused})

    async def _flush(self, request: Request) -> Response:
        """Does nothing. Engines never use cached keys under other weights than those that made
        them.
        """
        return json_answer(
            {
                "status": "ok",
                "message": "Nothing is to be flushed: keys are used under their own weights only.",
            }
        )
