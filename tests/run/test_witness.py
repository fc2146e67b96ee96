"""Whose tokens had a gradient in a step, beside what the books say of them, in rows that lie packed or padded in several micro-batches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.trainer.fixtures import batch, tiny_model, trainer

from midflight.run.replay.witness import Witness, witnesses_of
from midflight.trainer.model.microbatch import Layout
from midflight.trainer.watch import StepWatch
from midflight.types import PackedBatch

REWARDS = (1, 1, 1, 1, 0, 0, 2, 2, 1, 1, 0, 2)
"""Of three groups: one without a spread, one in which all differ from the mean of 1, one in which two do not."""
WITH_ADVANTAGE = [4, 5, 6, 7, 10, 11]


def watched(layout: Layout) -> tuple[PackedBatch, StepWatch]:
    data = replace(batch(), rewards=np.array(REWARDS, np.float32))
    ours = trainer(tiny_model(), layout=layout, micro_batch_tokens=60)
    watch = ours.watch()
    ours.step(data)
    return data, watch


def witnesses(data: PackedBatch, watch: StepWatch) -> list[Witness]:
    return list(witnesses_of(SimpleNamespace(batch=data, watch=watch)))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [Layout.PACKED, Layout.PADDED])
def test_exactly_the_rollouts_with_an_advantage_have_a_gradient_of_its_sign(layout: Layout) -> None:
    data, watch = watched(layout)
    found = witnesses(data, watch)
    assert all(one.holds for one in found)
    assert [one.number for one in found if one.gradient > 0] == WITH_ADVANTAGE
    assert sum(one.num_tokens for one in found) == int(data.loss_mask.sum()) == len(watch.witness)
    signs = np.sign([REWARDS[number] - 1 for number in watch.tokens.rollout.tolist()])
    assert np.sign(watch.witness.numpy()).tolist() == (-signs).tolist(), "a better answer makes the loss less"


@pytest.mark.parametrize(("number", "gradient"), [(5, 0.0), (9, 0.1)])
def test_a_gradient_that_is_not_that_of_the_books_is_seen(number: int, gradient: float) -> None:
    data, watch = watched(Layout.PACKED)
    watch.witness[watch.tokens.rollout == number] = gradient
    assert [one.number for one in witnesses(data, watch) if not one.holds] == [number]
