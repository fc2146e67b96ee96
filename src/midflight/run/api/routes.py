"""`/midflight/v1`: the routes by which a trainer, ours or a foreign one, draws batches and
publishes weights; and the teacher behind the gateway: the scores of a batch for whoever trains on
it, and of any rows over HTTP.

Documented for other languages in docs/foreign-trainers.md. `API_VERSION` counts up when a client of
the version before would no longer work; fields may be added to answers without that.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.config.bounds import RolloutBound
from midflight.config.sections import Config
from midflight.errors import (
    EngineError,
    EngineUnavailable,
    NotSupported,
    RequestRejected,
    RequestTimeout,
)
from midflight.ports import Scorer
from midflight.run.api.service import (
    LIFE,
    PREFIX,
    DoneBody,
    ModelTensors,
    StepBook,
    TrainerService,
    WentOn,
)
from midflight.run.api.session_routes import WaitSeconds, batch_as_lists
from midflight.run.heart import Heart
from midflight.run.parts import TEACHER
from midflight.trajectories.packing import teacher_is_finite, to_bytes
from midflight.types import (
    Batch,
    Delta,
    Float32,
    Int32,
    PackedBatch,
    TensorSpec,
    Version,
    WeightManifest,
)
from midflight.weights.transports.files import check_readable, manifest_of
from midflight.wire.edge import with_client
from midflight.wire.routes import JSON, PACKED, StrictBody, body_of, json_answer, route, wants

API_VERSION = 1


class Take(StrictBody, frozen=True):
    train_version: Annotated[Version, Meta(ge=0, lt=2**31)]
    """Rows have 32 bits for it."""
    wait_seconds: WaitSeconds | None = None
    """Then the answer is 204. Without it the request waits as long as it takes."""


class OfLease(StrictBody, frozen=True):
    lease: int


class AtVersion(StrictBody, frozen=True):
    version: Annotated[Version, Meta(ge=0)]


class RestartBody(AtVersion, frozen=True):
    least: Annotated[Version, Meta(ge=0)] = 0
    """The number under which the weights go on is not below this one."""


class AheadBody(AtVersion, frozen=True):
    tokens: Annotated[int, Meta(ge=1)]


class WeightsBody(StrictBody, frozen=True):
    """`file`, a safetensors file that this machine can read; or all fields of a `WeightManifest`
    from a trainer that made one.
    """

    version: Annotated[Version, Meta(ge=0)]
    file: str | None = None
    fingerprint: str | None = None
    transport: str | None = None
    location: str | None = None
    tensors: tuple[TensorSpec, ...] | None = None
    deltas: tuple[Delta, ...] = ()
    receivers: int | None = None
    """Of a manifest; who brings the version to the engines counts them."""


class Info(msgspec.Struct, frozen=True):
    """What answers here."""

    api_version: int
    run: str
    purpose: str
    model: str
    """The model id that agents use."""
    model_path: str
    """Folder of the weights that the run began with."""
    served_version: Version
    max_staleness: int
    groups_per_step: int
    group_size: int
    max_tokens: int
    temperature: float
    max_context: int
    rollout_seconds: float
    """That the agent of a claimed rollout may take by itself."""
    max_rollout_seconds: float
    """The last bound on a whole rollout, as of now."""
    steps: int


def info_route(
    config: Config,
    *,
    purpose: str,
    model: str,
    max_context: int,
    served: Callable[[], Version],
    bound: Callable[[], RolloutBound],
    token: str,
) -> BaseRoute:
    """`GET /midflight/v1`. `bound`: the last one on a rollout, as of now."""

    async def info(request: Request) -> Response:
        return json_answer(
            Info(
                api_version=API_VERSION,
                run=config.run.name,
                purpose=purpose,
                model=config.model.name,
                model_path=model,
                served_version=served(),
                max_staleness=config.rollout.max_staleness,
                groups_per_step=config.rollout.groups_per_step,
                group_size=config.rollout.group_size,
                max_tokens=config.environment.max_tokens,
                temperature=config.environment.temperature,
                max_context=max_context,
                rollout_seconds=config.environment.rollout_seconds,
                max_rollout_seconds=bound().seconds,
                steps=config.run.steps,
            )
        )

    return route(PREFIX, info, token=token, method="GET")


class TrainerRoutes:
    """All behind the control token. Each waits for the service, and for as long as its client
    does.
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
        """`finished` is called when the answer to `finish` has been sent. `goes_on`: beside a
        trainer that did not die, with the batches that it has and the version of the next."""
        self._service = service
        self._token = token
        self._model = model
        self._served = served
        self._finished = finished
        self._book = StepBook(start_version=start_version)
        if goes_on is not None:
            self._book.go_on(goes_on[0], next_version=goes_on[1], now=time.monotonic())
        self._tensors: ModelTensors | None = None

    def routes(self) -> Sequence[BaseRoute]:
        verbs = {
            "take": self._take,
            "ahead": self._ahead,
            "done": self._done,
            "take_back": self._take_back,
            "restart": self._restart,
            "weights": self._weights,
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
        if wants(request, (PACKED, JSON)) == JSON:
            return json_answer(batch_as_lists(batch))
        return Response(to_bytes(batch), media_type=PACKED)

    async def _ahead(self, request: Request) -> Response:
        body = await body_of(request, AheadBody)
        groups = await with_client(
            request.receive, self._service.ahead(body.version, tokens=body.tokens)
        )
        return (
            Response(status_code=204)
            if groups is None
            else Response(to_bytes(groups), media_type=PACKED)
        )

    async def _drawn(self, body: Take) -> PackedBatch | None:
        if body.wait_seconds is None:
            return await self._service.take(body.train_version)
        return await self._service.take_within(body.train_version, seconds=body.wait_seconds)

    async def _done(self, request: Request) -> Response:
        """The same report again, from a client that lost the answer, changes nothing."""
        body = await body_of(request, DoneBody)
        if not self._book.repeats(body):
            step = self._book.report(body, now=time.monotonic())
            await self._service.done(step)
            self._book.done(step, body)
        return json_answer({"version": body.version})

    async def _take_back(self, request: Request) -> Response:
        body = await body_of(request, OfLease)
        self._book.check_open(body.lease)
        await self._service.take_back(body.lease)
        self._book.taken_back(body.lease)
        return json_answer({"lease": body.lease})

    async def _restart(self, request: Request) -> Response:
        """The answer's version is the one that the next step begins at, and whose weights must be
        published first.
        """
        body = await body_of(request, RestartBody)
        self._book.check_restart(body.version)
        version = await self._service.restart(body.version, least=body.least)
        self._book.restarted(version, life=_life(request))
        return json_answer(WentOn(version, self._service.over))

    async def _weights(self, request: Request) -> Response:
        """Waits until every engine serves the version, is reserved or in quarantine;
        `served_version` says what came of it.
        """
        body = await body_of(request, WeightsBody)
        self._book.check_version(body.version)
        manifest = await self._manifest(body)
        self._book.publishing(manifest)
        await self._service.publish(manifest)
        return json_answer({"version": manifest.version, "served_version": self._served()})

    async def _checkpointed(self, request: Request) -> Response:
        body = await body_of(request, AtVersion)
        self._book.check_saved(body.version)
        await self._service.checkpointed(body.version)
        self._book.saved(body.version)
        return json_answer({"version": body.version})

    async def _copy(self, request: Request) -> Response:
        """Of a version that was made: what is trained later waits again where a run goes on from
        it.
        """
        body = await body_of(request, AtVersion)
        self._book.check_saved(body.version)
        return json_answer(await self._service.copy_store(body.version))

    async def _finish(self, request: Request) -> Response:
        body = await body_of(request, AtVersion)
        await self._service.finish(body.version)
        answer = json_answer({"version": body.version})
        answer.background = BackgroundTask(self._end)
        return answer

    async def _end(self) -> None:
        """Waits for nothing; a coroutine, because others are called in threads."""
        if self._finished is not None:
            self._finished()

    async def _manifest(self, body: WeightsBody) -> WeightManifest:
        """As the trainer gave it, or made here from its file."""
        if body.file is not None:
            tensors = self._tensors = self._tensors or await asyncio.to_thread(
                ModelTensors.of, self._model
            )
            path = Path(body.file)
            return await asyncio.to_thread(
                lambda: manifest_of(path, version=body.version, fitting=tensors.fitting)
            )
        if (
            body.fingerprint is None
            or body.transport is None
            or body.location is None
            or body.tensors is None
        ):
            raise RequestRejected(
                "weights need `version` and `file`, or all fields of a manifest.", param="file"
            )
        manifest = WeightManifest(
            body.version, body.fingerprint, body.transport, body.location, body.tensors, body.deltas
        )
        await asyncio.to_thread(check_readable, manifest)
        return manifest


def _life(request: Request) -> int:
    """A trainer that says nothing of it is the only one."""
    said = request.headers.get(LIFE, "0")
    if not said.isdecimal():
        raise RequestRejected(f"{LIFE} is {said!r}; give a number, or leave it out.", param=LIFE)
    return int(said)


# --- Tasks ----------------------------------------------------------------------------------------


class TasksBody(StrictBody, frozen=True):
    tasks: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    """Rows: an object of columns each, which the source makes a task of."""


class TasksTaken(msgspec.Struct, frozen=True):
    first: int
    """The number of the first of them, counted from 0 in the whole run; the others follow. It is
    their id, unless a column is.
    """
    taken: int
    waiting: int
    """That were not drawn yet, these and earlier ones."""


def tasks_route(
    post: Callable[[Sequence[dict[str, Any]]], tuple[range, int]], *, token: str
) -> BaseRoute:
    """`POST /midflight/v1/tasks`: all of them join the stream, or none does."""

    async def tasks(request: Request) -> Response:
        places, waiting = post((await body_of(request, TasksBody)).tasks)
        return json_answer(TasksTaken(places.start, len(places), waiting))

    return route(PREFIX + "/tasks", tasks, token=token)


# --- The teacher ----------------------------------------------------------------------------------


_log = logging.getLogger(__name__)
AGAIN_SECONDS = 0.5
"""Before a lost teacher is asked again: its loss may be seen by the request before it is by the
connection.
"""


class Teacher:
    """Asks a scorer, and again when that was lost: the launcher starts it anew. The temperature is
    that of the student's sampling.
    """

    def __init__(
        self, scorer: Scorer, *, temperature: float, seconds: float, heart: Heart | None = None
    ) -> None:
        self._scorer = scorer
        self._temperature = temperature
        self._seconds = seconds
        self._heart = heart or Heart()

    async def scored(self, batch: PackedBatch) -> PackedBatch:
        """The batch with its scores: never without. `EngineError` if those of tokens to train on
        are not finite; else see `score`.
        """
        scores = (
            await self.score(batch.token_ids, batch.row_offsets)
            if len(batch.token_ids)
            else np.zeros(0, np.float32)
        )
        made = replace(batch, teacher_logprobs=scores)
        if not teacher_is_finite(made):
            raise EngineError(
                "the teacher gave a log-probability that is not finite. Check the weights of "
                "distillation.teacher."
            )
        return made

    async def score(self, token_ids: Int32, row_offsets: Int32) -> Float32:
        """As the port's `Scorer`. Waits for the teacher, through restarts; `RequestTimeout` names
        it after the deadline.
        """
        try:
            with self._heart.doing(
                "asks the teacher for scores", whom=TEACHER, limit=self._seconds
            ):
                async with asyncio.timeout(self._seconds):
                    return await self._answered(token_ids, row_offsets)
        except TimeoutError:
            raise RequestTimeout(
                f"the teacher did not score {len(token_ids)} tokens within {self._seconds:g} s. "
                f"See logs/{TEACHER}.log in the run's folder, or raise distillation.score_seconds."
            ) from None

    async def _answered(self, token_ids: Int32, row_offsets: Int32) -> Float32:
        while True:
            try:
                return await self._scorer.score(
                    token_ids, row_offsets, temperature=self._temperature
                )
            except EngineUnavailable as lost:
                _log.warning("asking the teacher again: %s", lost)
            await asyncio.sleep(AGAIN_SECONDS)


TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class ScoreBody(StrictBody, frozen=True):
    rows: Annotated[list[Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]


class RowScores(msgspec.Struct, frozen=True):
    """For each row as many numbers as it has tokens."""

    logprobs: list[list[float]]


def score_route(teacher: Teacher | None, *, token: str) -> BaseRoute:
    """`POST /midflight/v1/score`. Waits for the teacher, and for as long as the client does."""

    async def score(request: Request) -> Response:
        rows = (await body_of(request, ScoreBody)).rows
        if teacher is None:
            raise NotSupported(
                "scoring: this run has no teacher. Start it with distillation.teacher."
            )
        token_ids, offsets = _flat(rows)
        scores = await with_client(request.receive, teacher.score(token_ids, offsets))
        return json_answer(RowScores([part.tolist() for part in np.split(scores, offsets[1:-1])]))

    return route(PREFIX + "/score", score, token=token)


def _flat(rows: Sequence[Sequence[int]]) -> tuple[Int32, Int32]:
    offsets = np.array(list(accumulate(map(len, rows), initial=0)), dtype=np.int32)
    return np.array([token_id for row in rows for token_id in row], dtype=np.int32), offsets
