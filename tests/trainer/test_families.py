"""Rows that begin alike share what they begin with, and give the same numbers as each row alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from midflight.trainer.model.microbatch import Family, dealt, families, fill, predictions_of, split
from midflight.trainer.model.policy import Policy
from midflight.types import PackedBatch

from .fixtures import batch, tiny_model

CPU = torch.device("cpu")
rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(np.array), min_size=1, max_size=12)


def test_rows_of_one_prompt_are_a_family() -> None:
    prompt, other = [7, 8, 9], [7, 1]
    found = families([np.array([*prompt, 1, 2]), np.array([*other, 5]), np.array([*prompt, 3]), np.array([*prompt, 1, 4, 4])])
    assert {frozenset(f.rows): f.shared for f in found} == {frozenset({0, 2, 3}): 3, frozenset({1}): 0}


@given(rows)
def test_every_row_is_in_one_family_and_keeps_a_token_of_its_own(given_rows: list[np.ndarray]) -> None:
    found = families(given_rows)
    assert sorted(i for family in found for i in family.rows) == list(range(len(given_rows)))
    for family in found:
        heads = {tuple(given_rows[i][: family.shared]) for i in family.rows}
        assert len(heads) == 1 and all(len(given_rows[i]) > family.shared for i in family.rows)
        assert family.shared == 0 or len(family.rows) > 1


@given(rows, st.integers(1, 30))
def test_parts_keep_the_budget_and_hold_every_row_once(given_rows: list[np.ndarray], budget: int) -> None:
    lengths = [len(row) for row in given_rows]
    parts = list(fill(families(given_rows), lengths, budget=budget))
    assert sorted(i for part in parts for family in part for i in family.rows) == list(range(len(given_rows)))

    def tokens(part: list[Family]) -> int:
        return sum(f.shared + sum(lengths[i] - f.shared for i in f.rows) for f in part)

    for part in parts:
        assert tokens(part) <= budget or sum(len(f.rows) for f in part) == 1


def with_prompts(shared: int) -> PackedBatch:
    """Rollouts of a group begin with the same tokens."""
    data = batch(num_groups=3, group_size=4, longest=24)
    for row, begin in enumerate(data.row_offsets[:-1]):
        end = min(begin + shared, data.row_offsets[row + 1])
        data.token_ids[begin:end] = 100 * data.rollout_group[data.row_rollout[row]] // 3 + np.arange(end - begin)
    return data


@pytest.mark.parametrize("budget", [4096, 60, 20])
def test_shared_beginnings_change_no_number(budget: int) -> None:
    """Also those where predictions are made in what is shared: long prompts leave no row anything else at first."""
    data, policy = with_prompts(9), Policy(tiny_model())
    predictions = predictions_of(data.token_ids, data.row_offsets, mask=data.loss_mask)
    everything = np.arange(len(predictions.targets))
    together = torch.zeros(len(everything), dtype=torch.float64)
    computed = 0
    for micro in split(predictions, everything, budget=budget, device=CPU):
        computed += micro.runs.num_tokens
        together[micro.predictions] = policy(micro, temperature=1.0)[0].detach()
    for row in np.unique(predictions.row):
        (micro,) = split(predictions, np.flatnonzero(predictions.row == row), budget=4096, device=CPU)
        assert micro.runs.keys is None
        alone = policy(micro, temperature=1.0)[0].detach()
        assert torch.allclose(together[micro.predictions], alone, rtol=0, atol=1e-12)
    if budget == 4096:
        alone_tokens = sum(
            int(predictions.inputs[predictions.row == r].max() - predictions.offsets[r]) + 1 for r in np.unique(predictions.row)
        )
        assert computed < 0.8 * alone_tokens


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("shared", [0, 9])
def test_ranks_get_every_prediction_once(size: int, shared: int) -> None:
    data = with_prompts(shared)
    predictions = predictions_of(data.token_ids, data.row_offsets, mask=data.loss_mask)
    chosen = np.arange(0, len(predictions.targets), 2)
    dealt_out = replace(predictions, rank_of_row=dealt(predictions, [chosen], size=size))
    shares = [dealt_out.of_rank(rank, chosen) for rank in range(size)]
    assert sorted(np.concatenate(shares).tolist()) == chosen.tolist()
    assert all((np.diff(share) > 0).all() for share in shares)


def test_ranks_get_equal_work_where_most_rows_have_nothing_in_common() -> None:
    """Sixteen pairs, and a thousand rows that are one family because nothing is saved by cutting them apart."""
    draw = np.random.default_rng(0)
    pairs = [[*prompt, *draw.integers(0, 50, 8)] for prompt in draw.integers(0, 50, (16, 8)) for _ in range(2)]
    rows = [*pairs, *draw.integers(0, 2**20, (1000, 16)).tolist()]
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    mask = np.ones(offsets[-1], np.bool_)
    mask[offsets[:-1]] = False
    predictions = predictions_of(np.concatenate(rows).astype(np.int32), offsets, mask=mask)
    chosen = np.arange(len(predictions.targets))
    dealt_out = replace(predictions, rank_of_row=dealt(predictions, [chosen], size=2))
    sizes = [len(dealt_out.of_rank(rank, chosen)) for rank in range(2)]
    assert max(sizes) < 1.1 * min(sizes)
