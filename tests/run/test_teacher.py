"""The teacher of a run: what it adds to a batch, what it survives, and its route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
import numpy as np
import pytest
from tests.gateway.offered import RecordingControl, ScriptedGenerator, make_gateway
from tests.run.test_trainer_routes import API, CONTROL, TOKEN, one_batch

from midflight.errors import ContextExceeded, EngineError, EngineUnavailable, RequestTimeout
from midflight.gateway.http.http import build_app
from midflight.run.api.batch_lists import batch_as_lists
from midflight.run.api.teacher import Teacher, score_route
from midflight.testing.ring import ScriptedScorer
from midflight.testing.virtual_time import run_virtual
from midflight.trajectories.packing import from_bytes, to_bytes
from midflight.types import Float32, Int32
from midflight.wire.memory import MemoryTransport

LOST = EngineUnavailable("engine 'teacher' was cut off")


def test_a_batch_gets_the_scores_of_its_rows_at_the_students_temperature_and_keeps_them_on_the_wire() -> None:
    async def main() -> None:
        batch = await Teacher(ScriptedScorer(), temperature=0.5, seconds=10).scored(one_batch(7))
        assert batch.teacher_logprobs is not None and batch.teacher_logprobs.tolist() == [0.0, -8.0, -12.0]
        sent = from_bytes(to_bytes(batch)).teacher_logprobs
        assert sent is not None and sent.dtype == np.float32 and sent.tolist() == [0.0, -8.0, -12.0]
        assert [row.teacher_logprobs for row in batch_as_lists(batch).rows] == [[0.0, -8.0, -12.0]]

    run_virtual(main)


def test_a_batch_without_rows_asks_nothing() -> None:
    async def main() -> None:
        scorer, whole = ScriptedScorer(), one_batch(7)
        none = {name: getattr(whole, name)[:0] for name in ("token_ids", "loss_mask", "logprobs", "versions", "kv_versions", "row_rollout")}
        batch = await Teacher(scorer, temperature=1, seconds=10).scored(replace(whole, row_offsets=np.zeros(1, np.int32), **none))
        assert batch.teacher_logprobs is not None and len(batch.teacher_logprobs) == 0 == scorer.num_asked

    run_virtual(main)


def test_a_teacher_that_was_lost_is_asked_again_until_it_is_back() -> None:
    async def main() -> None:
        scorer = ScriptedScorer(seconds=1.0)
        scorer.fail_next(LOST, times=3)
        batch = await Teacher(scorer, temperature=1, seconds=60).scored(one_batch(7))
        assert batch.teacher_logprobs is not None and scorer.num_asked == 4

    run_virtual(main)


@pytest.mark.parametrize("dead", [True, False])
def test_a_teacher_that_stays_away_or_is_too_slow_is_an_error_that_names_it_after_the_deadline(dead: bool) -> None:
    async def main() -> None:
        scorer = ScriptedScorer(seconds=0.1 if dead else 1000.0)
        scorer.fail_next(LOST, times=1000)
        began = asyncio.get_running_loop().time()
        with pytest.raises(RequestTimeout, match=r"the teacher did not score 3 tokens within 60 s.*teacher\.log.*run\.stall_seconds"):
            await Teacher(scorer, temperature=1, seconds=60).scored(one_batch(7))
        assert asyncio.get_running_loop().time() - began == pytest.approx(60)

    run_virtual(main)


class Broken(ScriptedScorer):
    async def score(self, token_ids: Int32, row_offsets: Int32, *, temperature: float) -> Float32:
        return np.array([np.nan, -1.0, -np.inf], np.float32)


def test_scores_that_are_no_numbers_are_an_error_and_not_a_batch() -> None:
    with pytest.raises(EngineError, match="not finite"):
        run_virtual(lambda: Teacher(Broken(), temperature=1, seconds=60).scored(one_batch(7)))


@asynccontextmanager
async def site(teacher: Teacher | None) -> AsyncIterator[httpx2.AsyncClient]:
    gateway = make_gateway(ScriptedGenerator(), anonymous=False, max_sessions=1)
    app = build_app(gateway, RecordingControl(), control_token=TOKEN, extra_routes=[score_route(teacher, token=TOKEN)])
    async with asyncio.TaskGroup() as tasks, httpx2.AsyncClient(transport=MemoryTransport(app, tasks), base_url="http://here:1") as http:
        yield http


def asked(teacher: Teacher | None, body: object, *, headers: dict[str, str] = CONTROL) -> httpx2.Response:
    async def main() -> httpx2.Response:
        async with site(teacher) as http:
            return await http.post(f"{API}/score", json=body, headers=headers)

    return run_virtual(main)


def test_whoever_holds_the_control_token_is_told_the_scores_of_any_rows() -> None:
    teacher = Teacher(ScriptedScorer(), temperature=0.5, seconds=60)
    answer = asked(teacher, {"rows": [[1, 2, 3], [9], [4, 4]]})
    assert (answer.status_code, answer.json()) == (200, {"logprobs": [[0.0, -8.0, -12.0], [0.0], [0.0, -12.0]]})
    assert asked(teacher, {"rows": [[1]]}, headers={}).status_code == 401


@pytest.mark.parametrize("body", [{}, {"rows": []}, {"rows": [[]]}, {"rows": [[-1]]}, {"rows": [[2**31]]}, {"rows": [[1.5]]}, {"ids": [1]}])
def test_a_body_that_is_no_list_of_rows_is_refused(body: object) -> None:
    answer = asked(Teacher(ScriptedScorer(), temperature=1, seconds=60), body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


def test_what_the_teacher_refuses_and_a_run_without_one_are_said() -> None:
    scorer = ScriptedScorer()
    scorer.fail_next(ContextExceeded("scoring: a row has 99 tokens", param="rows"))
    answer = asked(Teacher(scorer, temperature=1, seconds=60), {"rows": [[1]]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    answer = asked(None, {"rows": [[1]]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_supported")
    assert "distillation.teacher" in answer.json()["error"]["message"]
