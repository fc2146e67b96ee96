"""`/midflight/v1`: the routes by which a trainer, ours or a foreign one, draws batches and publishes weights."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from midflight.errors import MidflightError, RequestRejected, Unauthorized
from midflight.run.service import RolloutService, StepDone
from midflight.trajectories.packing import to_bytes
from midflight.types import Version, WeightManifest

Verb = Callable[[Request], Awaitable[Response]]


class Take(msgspec.Struct, frozen=True):
    train_version: Version


class AtVersion(msgspec.Struct, frozen=True):
    version: Version


def trainer_routes(service: RolloutService, *, token: str) -> Sequence[BaseRoute]:
    """All behind the control token. Bodies are JSON; `take` answers packed bytes (trajectories.packing)."""

    async def take(request: Request) -> Response:
        body = await _body(request, Take)
        return Response(to_bytes(await service.take(body.train_version)), media_type="application/octet-stream")

    async def done(request: Request) -> Response:
        await service.done(await _body(request, StepDone))
        return _OK

    async def weights(request: Request) -> Response:
        await service.publish(await _body(request, WeightManifest))
        return _OK

    async def checkpointed(request: Request) -> Response:
        await service.checkpointed((await _body(request, AtVersion)).version)
        return _OK

    async def finish(request: Request) -> Response:
        await service.finish((await _body(request, AtVersion)).version)
        return _OK

    verbs = {"take": take, "done": done, "weights": weights, "checkpointed": checkpointed, "finish": finish}
    return [Route(f"/midflight/v1/{name}", _guarded(verb, token), methods=["POST"]) for name, verb in verbs.items()]


_OK = Response(b"{}", media_type="application/json")
T = TypeVar("T")


async def _body(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RequestRejected(f"the body is not a {kind.__name__}: {error}") from error


def _guarded(verb: Verb, token: str) -> Verb:
    """Checks the token, and turns our errors into their HTTP face."""

    async def guarded(request: Request) -> Response:
        try:
            if not secrets.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {token}".encode()):
                raise Unauthorized("these routes need the control token as `Authorization: Bearer ...`")
            return await verb(request)
        except MidflightError as error:
            return JSONResponse({"error": {"message": str(error), "code": error.code}}, status_code=error.status)

    return guarded
