"""`/midflight/v1/score`: the teacher scores the tokens of rows.

The teacher scores each batch before the trainer gets it, and any rows that come over HTTP.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.errors import EngineError, EngineUnavailable, NotSupported, RequestTimeout
from midflight.ports import Scorer
from midflight.run.api.service import PREFIX
from midflight.run.heartbeat import Heartbeat
from midflight.run.parts import TEACHER
from midflight.trajectories.packing import teacher_is_finite
from midflight.types import Float32, Int32, PackedBatch
from midflight.wire.edge import with_client
from midflight.wire.routes import StrictBody, body_of, json_answer, route

_log = logging.getLogger(__name__)
AGAIN_SECONDS = 0.5
"""The wait between two requests to a lost teacher: a request may find the loss before the
connection does.
"""


class Teacher:
    """Asks a scorer, and asks again when that was lost: the launcher starts it anew. The
    temperature is that of the student's sampling.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        temperature: float,
        seconds: float,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._scorer = scorer
        self._temperature = temperature
        self._seconds = seconds
        self._heartbeat = heartbeat or Heartbeat()

    async def scored(self, batch: PackedBatch) -> PackedBatch:
        """The batch with its scores: it is never returned without them. Raises `EngineError` if the
        scores of tokens to train on are not finite; for other errors see `score`.
        """
        if len(batch.token_ids):
            scores = await self.score(batch.token_ids, batch.row_offsets)
        else:
            scores = np.zeros(0, np.float32)
        made = replace(batch, teacher_logprobs=scores)
        if not teacher_is_finite(made):
            raise EngineError(
                "the teacher gave a log-probability that is not finite. Check the weights of "
                "distillation.teacher."
            )
        return made

    async def score(self, token_ids: Int32, row_offsets: Int32) -> Float32:
        """Scores as the port's `Scorer` does. Waits for the teacher, through restarts. After the
        deadline it raises `RequestTimeout`, which names the teacher.
        """
        try:
            with self._heartbeat.doing(
                "asks the teacher for scores", whom=TEACHER, limit=self._seconds
            ):
                async with asyncio.timeout(self._seconds):
                    return await self._answered(token_ids, row_offsets)
        except TimeoutError:
            raise RequestTimeout(
                f"the teacher did not score {len(token_ids)} tokens within {self._seconds:g} s. "
                f"See logs/{TEACHER}.log in the run's folder, or raise run.stall_seconds."
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
    """Each row has as many numbers as it has tokens."""

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
        parts = np.split(scores, offsets[1:-1])
        return json_answer(RowScores([part.tolist() for part in parts]))

    return route(PREFIX + "/score", score, token=token)


def _flat(rows: Sequence[Sequence[int]]) -> tuple[Int32, Int32]:
    ends = list(accumulate(map(len, rows), initial=0))
    token_ids = [token_id for row in rows for token_id in row]
    return np.array(token_ids, dtype=np.int32), np.array(ends, dtype=np.int32)
