"""Splitting rows into micro-batches by a budget of tokens, packed end to end without padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from midflight.trainer.attention import Runs
from midflight.trainer.shift import inputs, shift, shifted_offsets

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """The predictions to train on, K of them, over rows of input tokens. Already shifted.

    Row r's inputs are `input_ids[offsets[r] : offsets[r + 1]]`; prediction k is made at `inputs[k]`, an index into `input_ids`.
    """

    input_ids: Index
    """[N]"""
    offsets: Index
    """[R + 1]"""
    inputs: Index
    """[K], ascending"""
    targets: Index
    """[K], the tokens to predict"""

    @property
    def row(self) -> Index:
        """[K], the row of each prediction."""
        return np.searchsorted(self.offsets, self.inputs, side="right") - 1


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One forward: N input tokens in rows laid end to end, and the k predictions made on them."""

    input_ids: Int[Tensor, "1 N"]
    position_ids: Int[Tensor, "1 N"]
    """Restarts at 0 with every row."""
    runs: Runs
    inputs: Int[Tensor, " k"]
    """Where in `input_ids` the predictions are made."""
    targets: Int[Tensor, " k"]
    predictions: Int[Tensor, " k"]
    """Which of the `Predictions` these are."""


def predictions_of(token_ids: NDArray[np.int32], row_offsets: NDArray[np.int32], *, mask: NDArray[np.bool_]) -> Predictions:
    """The predictions of the tokens where `mask` is True ([N], unshifted). A row's first token is predicted by nothing."""
    where = np.flatnonzero(shift(mask, row_offsets))
    return Predictions(
        input_ids=inputs(token_ids, row_offsets).astype(np.int64),
        offsets=shifted_offsets(row_offsets),
        inputs=where,
        targets=shift(token_ids, row_offsets)[where].astype(np.int64),
    )


def split(predictions: Predictions, chosen: Index, *, budget: int, device: torch.device) -> Iterator[MicroBatch]:
    """Micro-batches of at most `budget` tokens that hold the `chosen` predictions (ascending indices) and no others.

    Rows are taken shortest first, so that equal lengths lie together; a row ends with its last chosen prediction, because what
    follows can't change it. A row longer than the budget goes alone.
    """
    row = predictions.row[chosen]
    rows, first = np.unique(row, return_index=True)
    ends = np.append(first[1:], len(chosen))
    lengths = predictions.inputs[chosen[ends - 1]] - predictions.offsets[rows] + 1 if len(rows) else np.zeros(0, np.int64)
    order = np.argsort(lengths, kind="stable")
    for part in _fill(lengths, order, budget):
        picked = [chosen[first[i] : ends[i]] for i in part]
        yield _pack(predictions, rows[part], lengths[part], picked, device=device)


def share_of(predictions: Predictions, chosen: Index, *, rank: int, size: int) -> Index:
    """The chosen predictions that one of `size` ranks computes: whole rows, dealt out by length so that ranks have equal work."""
    if size == 1:
        return chosen
    row = predictions.row[chosen]
    rows, counts = np.unique(row, return_counts=True)
    last = chosen[np.cumsum(counts) - 1]
    lengths = predictions.inputs[last] - predictions.offsets[rows]
    place = np.empty(len(rows), np.int64)
    place[np.argsort(-lengths, kind="stable")] = np.arange(len(rows))
    turn, seat = np.divmod(place, size)
    dealt = np.where(turn % 2, size - 1 - seat, seat)  # back and forth: the longest of each turn goes where the shortest went before
    return chosen[np.repeat(dealt == rank, counts)]


def num_oversized(predictions: Predictions, *, budget: int) -> int:
    """Rows that exceed the budget on their own; each takes a forward and the memory it needs."""
    return int((np.diff(predictions.offsets) > budget).sum())


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def _fill(lengths: Index, order: Index, budget: int) -> Iterator[Index]:
    start, total = 0, 0
    for i, row in enumerate(order):
        if i > start and total + lengths[row] > budget:
            yield order[start:i]
            start, total = i, 0
        total += int(lengths[row])
    if start < len(order):
        yield order[start:]


def _pack(predictions: Predictions, rows: Index, lengths: Index, picked: list[Index], *, device: torch.device) -> MicroBatch:
    begins = predictions.offsets[rows]
    positions = np.concatenate([np.arange(t) for t in lengths])
    tokens = positions + np.repeat(begins, lengths)
    chosen = np.concatenate(picked)
    moved = np.repeat(np.cumsum(lengths) - lengths - begins, [len(p) for p in picked])
    values, counts = np.unique(lengths, return_counts=True)
    return MicroBatch(
        input_ids=on_device(predictions.input_ids[tokens], device)[None],
        position_ids=on_device(positions, device)[None],
        runs=Runs(counts=tuple(counts.tolist()), lengths=tuple(values.tolist())),
        inputs=on_device(predictions.inputs[chosen] + moved, device),
        targets=on_device(predictions.targets[chosen], device),
        predictions=on_device(chosen, device),
    )
