"""Reductions and schedules, against values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from midflight.trainer.formulas.reductions import constant, sequence_mean, token_mean
from midflight.trainer.schedule import Schedule

from .tensors import of


def test_reductions_by_hand() -> None:
    # Rollout 0 has losses 1, 2, 3 and rollout 2 has 10; rollout 1 has no tokens.
    loss, rollout, counts = of(1, 2, 3, 10), torch.tensor([0, 0, 0, 2]), torch.tensor([3, 0, 1])
    assert float(token_mean(loss, num_tokens=4)) == 4.0
    assert float(sequence_mean(loss, rollout, tokens_of_rollout=counts, num_rollouts=2)) == 6.0  # (2 + 10) / 2
    assert float(constant(loss, num_rollouts=2, length=8)) == 1.0  # 16 / (2 * 8)


def test_reductions_of_parts_add_up_to_the_whole() -> None:
    loss, rollout, counts = of(1, 2, 3, 10), torch.tensor([0, 0, 0, 2]), torch.tensor([3, 0, 1])
    shares = [sequence_mean(loss[s], rollout[s], tokens_of_rollout=counts, num_rollouts=2) for s in (slice(0, 2), slice(2, 4))]
    assert float(sum(shares)) == pytest.approx(6.0)


def test_schedules_rise_then_fall_to_zero_after_the_last_step() -> None:
    linear = Schedule("linear", warmup_steps=2, total_steps=6)
    assert [linear.factor(s) for s in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = Schedule("cosine", warmup_steps=0, total_steps=4)
    assert [cosine.factor(s) for s in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])
    assert Schedule("constant", warmup_steps=1, total_steps=2).factor(100) == 1.0
