"""A rank gets its own rows of a batch, and trains on them as one that has the whole batch does, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from midflight.config.loss import CorrectionSection, ObjectiveSection
from midflight.trainer.credit import Scoring
from midflight.trainer.critic import Valuation
from midflight.trainer.model.attention import Runs
from midflight.trainer.model.microbatch import MicroBatch, dealt, split
from midflight.trainer.model.ranks import Ranks
from midflight.trainer.model.scores import SamplingMasks
from midflight.trainer.objective import Objective
from midflight.trainer.own_rows import Column, decode_own_rows, encode_own_rows
from midflight.trainer.tokens import LossTokens, step_tokens
from midflight.trainer.trainer import PolicyTrainer
from midflight.trajectories.packing import to_bytes
from midflight.types import PackedBatch

from .fixtures import batch, tiny_model, trainer
from .test_resharding import contents, on_ranks
from .test_truncated import truncated

CPU = torch.device("cpu")


def recorded(data: PackedBatch) -> PackedBatch:
    """With records of experts and of truncation, and rows that end with a token that is not trained on."""
    data.loss_mask[data.row_offsets[2:4] - 1] = False
    experts = np.random.default_rng(1).integers(0, 255, (len(data.token_ids), 3)).astype(np.uint8)
    return truncated(replace(data, experts=experts))


def tokens_of(data: PackedBatch, *, size: int) -> LossTokens:
    """The tokens, of which half of the groups have no advantage, dealt out."""
    data.rewards[data.rollout_group % 2 == 1] = 1
    found = step_tokens(data, Scoring(), max_staleness=4, max_missing_share=0.1, dtype=torch.float32, device=CPU)
    live = found.advantage.numpy() != 0
    ranks = dealt(found.predictions, [np.flatnonzero(live), np.flatnonzero(~live)], size=size)
    return replace(found, predictions=replace(found.predictions, rank_of_row=ranks))


def of_rank(tokens: LossTokens, rank: int, *, looks_beyond: bool = False) -> LossTokens:
    data = encode_own_rows(tokens, rank, version=0, looks_beyond=looks_beyond)
    return decode_own_rows(data).tokens(rank, dtype=torch.float32, device=CPU)


def same(found: object, expected: object) -> bool:
    match expected:
        case Tensor():
            assert isinstance(found, Tensor)
            return found.dtype == expected.dtype and torch.equal(found, expected)
        case np.ndarray():
            assert isinstance(found, np.ndarray)
            return found.dtype == expected.dtype and np.array_equal(found, expected)
        case MicroBatch() | Runs() | SamplingMasks():
            return all(same(getattr(found, f.name), getattr(expected, f.name)) for f in fields(expected))
        case _:
            return found == expected


@pytest.mark.parametrize("size", [2, 3, 20])
@pytest.mark.parametrize("make", [batch, lambda: recorded(batch(num_groups=5))])
def test_a_rank_makes_the_micro_batches_that_it_would_make_of_the_whole_batch(make: Callable[[], PackedBatch], size: int) -> None:
    """Twenty ranks are more than there are rows."""
    whole = tokens_of(make(), size=size)
    for rank in range(size):
        ours = of_rank(whole, rank)
        for chosen in (np.arange(whole.num_tokens), np.arange(0, whole.num_tokens, 3)):
            theirs, own = (tokens.predictions.of_rank(rank, chosen) for tokens in (whole, ours))
            assert same(own, theirs)
            expected, found = (list(split(t.predictions, own, budget=64, device=CPU)) for t in (whole, ours))
            assert len(found) == len(expected) and all(map(same, found, expected))
            for name in ("behaviour", "advantage", "age", "rollout"):
                assert same(getattr(ours, name)[own], getattr(whole, name)[own]), name
        assert same(ours.group, whole.group) and same(ours.rollout, whole.rollout) and ours.num_rollouts == whole.num_rollouts
        assert same(ours.predictions.held_by(rank), whole.predictions.held_by(rank))


def test_a_rank_gets_nothing_of_what_lies_in_the_rows_of_others() -> None:
    """Every token of a row has an id, and a log-probability, that says which row it is in."""
    data = batch(longest=60)
    row = np.repeat(np.arange(len(data.row_rollout)), np.diff(data.row_offsets)).astype(np.int32)
    marked = replace(data, token_ids=row + 1000, logprobs=(-row / 64 - 1).astype(np.float32))
    whole = tokens_of(marked, size=3)
    rank_of_row = whole.predictions.rank_of_row
    assert rank_of_row is not None and set(rank_of_row) == {0, 1, 2}
    for rank in range(3):
        sent = decode_own_rows(encode_own_rows(whole, rank, version=0, looks_beyond=False))
        own = set(np.flatnonzero(rank_of_row == rank).tolist())
        assert set((sent.input_ids.array() - 1000).tolist()) == own
        assert set(((-sent.behaviour.array() - 1) * 64).tolist()) == own
        ours = sent.tokens(rank, dtype=torch.float32, device=CPU)
        others = ~np.isin(ours.predictions.row, list(own))
        assert others.any() and not ours.behaviour[others].any() and not ours.predictions.targets[others].any()


def test_of_long_rows_each_of_four_ranks_gets_about_an_eighth_of_the_bytes_of_the_batch() -> None:
    """A token has 17 bytes in a batch: id, mask, log-probability and two versions. Its rank gets id and log-probability, 8 bytes; 8 / 17 / 4 is .118."""
    draw = np.random.default_rng(0)
    num_rows, length = 32, 2000
    num_tokens = num_rows * length
    offsets = np.arange(0, num_tokens + 1, length).astype(np.int32)
    mask = np.ones(num_tokens, np.bool_)
    mask[offsets[:-1]] = False
    data = replace(
        batch(num_groups=8, group_size=4),
        token_ids=draw.integers(0, 30000, num_tokens).astype(np.int32),
        loss_mask=mask,
        logprobs=(-draw.random(num_tokens)).astype(np.float32),
        versions=np.zeros(num_tokens, np.int32),
        kv_versions=np.zeros(num_tokens, np.int32),
        row_offsets=offsets,
        row_rollout=np.arange(num_rows, dtype=np.int32),
    )
    before = len(to_bytes(data))
    whole = tokens_of(data, size=4)
    after = [len(encode_own_rows(whole, rank, version=0, looks_beyond=False)) for rank in range(4)]
    assert max(after) < 0.125 * before and min(after) > 0.11 * before


def test_a_loss_that_looks_beyond_a_token_has_the_values_of_all_tokens_and_still_its_own_rows_alone() -> None:
    whole = tokens_of(batch(), size=2)
    ours = of_rank(whole, 1, looks_beyond=True)
    for name in ("behaviour", "advantage", "age"):
        assert same(getattr(ours, name), getattr(whole, name)), name
    assert whole.predictions.rank_of_row is not None
    has = np.repeat(whole.predictions.rank_of_row == 1, np.diff(whole.predictions.offsets))
    assert ours.predictions.input_ids[has].any() and not ours.predictions.input_ids[~has].any()


@pytest.mark.parametrize(
    "values", [[], [5], [5, 5, 5, 5, 5], [1, 2, 3], [0.5, float("nan"), float("nan")], [True, True, True, True, True, True, False]]
)
def test_a_column_is_read_as_it_was(values: list[float]) -> None:
    array = np.array(values)
    found = Column.of(array).array()
    assert found.dtype == array.dtype and np.array_equal(found, array, equal_nan=array.dtype.kind == "f")


# --- Steps of several ranks -------------------------------------------------------------------------------------------

LOSSES: dict[str, dict[str, object]] = {
    "one update": {},
    "several updates": {"updates_per_step": 2, "epochs_per_step": 2, "micro_batch_tokens": 48},
    "a loss that looks beyond": {"objective": Objective.of(ObjectiveSection(kind="gspo"), CorrectionSection(self_normalised=True))},
    "a critic": {"scoring": Scoring("gae"), "valuation": Valuation()},
    "a reference": {"objective": Objective.of(ObjectiveSection(kl_coefficient=0.1))},
}


def take_steps(name: str, told: Path) -> None:
    """Two steps of a rank that has each batch whole, and of one that follows the first by its own rows: the same weights and moments."""
    ranks = Ranks.joined()
    alike, follower = (made(name, ranks) for _ in range(2))
    for version in range(2):
        data = batch(seed=version, version=version)
        expected = alike.step(data)
        pipe = told / f"{version}"
        if ranks.is_first:
            tokens = follower.tokens_of(data)
            for rank in range(1, ranks.size):
                pipe.with_suffix(f".{rank}").write_bytes(follower.rows_of_rank(tokens, rank))
            dist.barrier()
            report = follower.train_on(data, tokens)
            assert (report.loss, report.skipped, dict(report.metrics)) == (expected.loss, None, dict(expected.metrics))
        else:
            dist.barrier()
            follower.follow(pipe.with_suffix(f".{ranks.rank}").read_bytes())
    assert follower.version == alike.version == 2 and follower.num_steps == 2
    found, theirs = contents(follower), contents(alike)
    assert [key for key in theirs if not torch.equal(found[key], theirs[key])] == []


def made(name: str, ranks: Ranks) -> PolicyTrainer:
    return trainer(tiny_model(), ranks=ranks, **LOSSES[name])


@pytest.mark.parametrize("name", list(LOSSES))
def test_ranks_that_follow_by_their_own_rows_have_the_bits_of_ranks_that_have_all(name: str, tmp_path: Path) -> None:
    on_ranks(2, partial(take_steps, name, tmp_path), tmp_path)


def test_a_rank_without_a_row_of_its_own_makes_its_forwards_all_the_same(tmp_path: Path) -> None:
    on_ranks(3, partial(take_one_row, tmp_path), tmp_path)


def take_one_row(told: Path) -> None:
    """A batch of two rows for three ranks."""
    ranks = Ranks.joined()
    ours = made("one update", ranks)
    data = batch(num_groups=1, group_size=2)
    keep = slice(data.row_offsets[1], None)
    data = replace(
        data,
        **{name: getattr(data, name)[keep] for name in ("token_ids", "loss_mask", "logprobs", "versions", "kv_versions")},
        row_offsets=data.row_offsets[1:] - data.row_offsets[1],
        row_rollout=data.row_rollout[1:],
        rewards=np.array([0, 1], np.float32),
    )
    rows = told / "rows"
    if ranks.is_first:
        tokens = ours.tokens_of(data)
        for rank in range(1, ranks.size):
            rows.with_suffix(f".{rank}").write_bytes(ours.rows_of_rank(tokens, rank))
        dist.barrier()
        assert ours.train_on(data, tokens).skipped is None
    else:
        dist.barrier()
        ours.follow(rows.with_suffix(f".{ranks.rank}").read_bytes())
    alone = trainer(tiny_model())
    alone.step(data)
    found, expected = contents(ours), contents(alone)
    assert all(torch.allclose(found[name], value, rtol=0, atol=1e-9) for name, value in expected.items())
