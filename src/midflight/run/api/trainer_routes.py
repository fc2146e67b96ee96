"""`/midflight/v1`: the routes by which a trainer, ours or a foreign one, draws batches and
publishes weights.

docs/foreign-trainers.md documents them for other languages.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.errors import RequestRejected
from midflight.run.api.batch_lists import batch_as_lists
from midflight.run.api.model_tensors import ModelTensors
from midflight.run.api.service import LIFE, PREFIX, DeviceOwner, TrainerService, WentOn
from midflight.run.api.session_routes import WaitSeconds
from midflight.run.api.step_book import DoneBody, StepBook
from midflight.trajectories.packing import to_bytes
from midflight.types import Batch, Delta, PackedBatch, TensorSpec, Version, WeightManifest
from midflight.weights.transports.posted_files import check_readable, manifest_of
from midflight.wire.edge import with_client
from midflight.wire.routes import JSON, PACKED, StrictBody, body_of, json_answer, route, wants


class Take(StrictBody, frozen=True):
    train_version: Annotated[Version, Meta(ge=0, lt=2**31)]
    """Rows have 32 bits for it."""
    wait_seconds: WaitSeconds | None = None
    """The seconds without a batch after which the answer is 204. Without it the request waits as
    long as it takes.
    """


class LeaseBody(StrictBody, frozen=True):
    lease: int


class TurnBody(StrictBody, frozen=True):
    of: DeviceOwner


class VersionBody(StrictBody, frozen=True):
    version: Annotated[Version, Meta(ge=0)]


class RestartBody(VersionBody, frozen=True):
    least: Annotated[Version, Meta(ge=0)] = 0
    """The number under which the weights go on is not below this one."""


class WeightsBody(StrictBody, frozen=True):
    """Names the weights: `file`, a safetensors file that this machine can read; or all fields of a
    `WeightManifest`, from a trainer that made one.
    """

    version: Annotated[Version, Meta(ge=0)]
    file: str | None = None
    fingerprint: str | None = None
    transport: str | None = None
    location: str | None = None
    tensors: tuple[TensorSpec, ...] | None = None
    deltas: tuple[Delta, ...] = ()
    receivers: int | None = None
    """A field of a manifest. Its value is not used: the handover counts the receivers itself."""


class TrainerRoutes:
    """All routes are behind the control token. Each waits for the service, and for as long as its
    client does.
    """

    def __init__(
        self,
        service: TrainerService,
        *,
        token: str,
        model: Path,
        start_version: Version,
        served: Callable[[], Version],
        finished: Callable[[], None] | None = None,
        goes_on: tuple[Sequence[Batch], Version] | None = None,
    ) -> None:
        """`finished` is called when the answer to `finish` has been sent. `goes_on` is given if
        this process was started again and the trainer did not die: the batches that it has, and the
        version of the next.
        """
        self._service = service
        self._token = token
        self._model = model
        self._served = served
        self._finished = finished
        self._book = StepBook(start_version=start_version)
        if goes_on is not None:
            leased, next_version = goes_on
            self._book.go_on(leased, next_version=next_version, now=time.monotonic())
        self._tensors: ModelTensors | None = None

    def routes(self) -> Sequence[BaseRoute]:
        verbs = {
            "take": self._take,
            "ahead": self._gone,
            "done": self._done,
            "take_back": self._take_back,
            "restart": self._restart,
            "weights": self._weights,
            "turn": self._turn,
            "checkpointed": self._checkpointed,
            "finish": self._finish,
            "store": self._copy,
        }
        return [
            route(f"{PREFIX}/{name}", self._of_this_life(verb), token=self._token)
            for name, verb in verbs.items()
        ]

    def _of_this_life(
        self, verb: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            self._book.check_life(_life(request))
            return await verb(request)

        return answered

    async def _take(self, request: Request) -> Response:
        body = await body_of(request, Take)
        self._book.check_take(body.train_version)
        batch = await with_client(request.receive, self._drawn(body))
        if batch is None:
            return Response(status_code=204)
        self._book.taken(batch, now=time.monotonic())
        kind = wants(request, (PACKED, JSON))
        return await asyncio.to_thread(_batch_answer, batch, kind)

    async def _gone(self, request: Request) -> Response:
        del request
        raise RequestRejected(
            "POST ahead is gone: a step begins with its whole batch. Use POST take, which waits for "
            "it."
        )

    async def _drawn(self, body: Take) -> PackedBatch | None:
        if body.wait_seconds is None:
            return await self._service.take(body.train_version)
        return await self._service.take_within(body.train_version, seconds=body.wait_seconds)

    async def _done(self, request: Request) -> Response:
        """The same report may come again, from a client that lost the answer: it changes nothing."""
        body = await body_of(request, DoneBody)
        if not self._book.repeats(body):
            step = self._book.report(body, now=time.monotonic())
            await self._service.done(step)
            self._book.done(step, body)
        return json_answer({"version": body.version})

    async def _take_back(self, request: Request) -> Response:
        body = await body_of(request, LeaseBody)
        self._book.check_open(body.lease)
        await self._service.take_back(body.lease)
        self._book.taken_back(body.lease)
        return json_answer({"lease": body.lease})

    async def _restart(self, request: Request) -> Response:
        """The next step begins at the version of the answer, and its weights must be published
        first.
        """
        body = await body_of(request, RestartBody)
        self._book.check_restart(body.version)
        version = await self._service.restart(body.version, least=body.least)
        self._book.restarted(version, life=_life(request))
        return json_answer(WentOn(version, self._service.over))

    async def _weights(self, request: Request) -> Response:
        """Waits until every engine serves the version, is reserved, or is in quarantine. The
        answer's `served_version` is the version that the engines serve by then.
        """
        body = await body_of(request, WeightsBody)
        self._book.check_version(body.version)
        manifest = await self._manifest(body)
        self._book.publishing(manifest)
        await self._service.publish(manifest)
        return json_answer({"version": manifest.version, "served_version": self._served()})

    async def _turn(self, request: Request) -> Response:
        body = await body_of(request, TurnBody)
        await self._service.turn(body.of)
        return json_answer({"of": body.of})

    async def _checkpointed(self, request: Request) -> Response:
        body = await body_of(request, VersionBody)
        self._book.check_saved(body.version)
        await self._service.checkpointed(body.version)
        self._book.saved(body.version)
        return json_answer({"version": body.version})

    async def _copy(self, request: Request) -> Response:
        """Copies the store for the checkpoint of a version that was made. Groups that are trained
        later wait again if a run goes on from the copy.
        """
        body = await body_of(request, VersionBody)
        self._book.check_saved(body.version)
        return json_answer(await self._service.copy_store(body.version))

    async def _finish(self, request: Request) -> Response:
        body = await body_of(request, VersionBody)
        await self._service.finish(body.version)
        answer = json_answer({"version": body.version})
        answer.background = BackgroundTask(self._end)
        return answer

    async def _end(self) -> None:
        """Waits for nothing; a coroutine, because others are called in threads."""
        if self._finished is not None:
            self._finished()

    async def _manifest(self, body: WeightsBody) -> WeightManifest:
        """The manifest as the trainer gave it, or one that is made here from its file."""
        if body.file is not None:
            return await self._manifest_of_file(Path(body.file), body.version)
        manifest = _given_manifest(body)
        await asyncio.to_thread(check_readable, manifest)
        return manifest

    async def _manifest_of_file(self, path: Path, version: Version) -> WeightManifest:
        """Waits for the headers of the model and of the file to be read."""
        if self._tensors is None:
            self._tensors = await asyncio.to_thread(ModelTensors.of, self._model)
        fitting = self._tensors.fitting
        return await asyncio.to_thread(lambda: manifest_of(path, version=version, fitting=fitting))


def _batch_answer(batch: PackedBatch, kind: str) -> Response:
    """Takes half a second for a thousand rows of 16 000 tokens: it is for a thread."""
    if kind == JSON:
        return json_answer(batch_as_lists(batch))
    return Response(to_bytes(batch), media_type=PACKED)


def _given_manifest(body: WeightsBody) -> WeightManifest:
    if (
        body.fingerprint is None
        or body.transport is None
        or body.location is None
        or body.tensors is None
    ):
        raise RequestRejected(
            "weights need `version` and `file`, or all fields of a manifest.", param="file"
        )
    return WeightManifest(
        body.version, body.fingerprint, body.transport, body.location, body.tensors, body.deltas
    )


def _life(request: Request) -> int:
    """Returns the trainer's number from the header, or 0 if the header is missing: such a trainer
    is the only one.
    """
    said = request.headers.get(LIFE, "0")
    if not said.isdecimal():
        raise RequestRejected(f"{LIFE} is {said!r}; give a number, or leave it out.", param=LIFE)
    return int(said)
