"""A run with a teacher on virtual time: every batch that the trainer takes has the teacher's scores, whatever befalls it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from midflight.errors import EngineUnavailable, RequestTimeout
from midflight.run.api.teacher import Teacher
from midflight.testing.ring import ScriptedScorer, SimulatedTrainer, SlowSteps, open_ring
from midflight.testing.virtual_time import run_virtual
from midflight.types import PackedBatch

from .site import TOKENIZER, Agents, config, fast_engines, source

TEMPERATURE, STEPS = 0.5, 6
LOST = EngineUnavailable("engine 'teacher' was cut off")


async def run(folder: Path, scorer: ScriptedScorer, *, deadline: float = 600.0, step_seconds: float = 0.3) -> Sequence[PackedBatch]:
    teacher = Teacher(scorer, temperature=TEMPERATURE, seconds=deadline)
    trainer = SimulatedTrainer()
    opened = open_ring(
        config(steps=STEPS), fast_engines(1), tokenizer=TOKENIZER, sources=[source()], environment=Agents(0), folder=folder, teacher=teacher
    )
    async with opened as ring:
        await ring.train(trainer, trainer, service=SlowSteps(ring.system, seconds=lambda: step_seconds))
    return trainer.batches


def check(batches: Sequence[PackedBatch]) -> None:
    assert len(batches) == STEPS
    for batch in batches:
        assert batch.loss_mask.any() and batch.teacher_logprobs is not None
        expected = ScriptedScorer.scores(batch.token_ids, batch.row_offsets, temperature=TEMPERATURE)
        np.testing.assert_array_equal(batch.teacher_logprobs, expected)


def test_every_batch_has_the_teachers_log_probability_of_each_of_its_tokens(tmp_path: Path) -> None:
    scorer = ScriptedScorer(seconds=0.1)
    check(run_virtual(lambda: run(tmp_path, scorer)))
    assert scorer.num_asked == STEPS


def test_a_teacher_that_dies_again_and_again_delays_batches_and_none_comes_without_scores(tmp_path: Path) -> None:
    scorer = ScriptedScorer(seconds=2.0)
    scorer.fail_next(LOST, times=5)
    check(run_virtual(lambda: run(tmp_path, scorer)))
    assert scorer.num_asked == STEPS + 5


def test_a_teacher_that_stays_away_ends_the_run_by_its_name(tmp_path: Path) -> None:
    scorer = ScriptedScorer(seconds=1000.0)
    with pytest.RaisesGroup(
        pytest.RaisesExc(RequestTimeout, match="the teacher did not score"), allow_unwrapped=True, flatten_subgroups=True
    ):
        run_virtual(lambda: run(tmp_path, scorer, deadline=60.0))
