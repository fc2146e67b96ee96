"""Splitting rows into micro-batches by a budget of tokens, packed end to end without padding, what rows share only once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from midflight.trainer.model.attention import Runs
from midflight.trainer.model.families import Family, families, fill
from midflight.trainer.model.shift import inputs, shift, shifted_offsets

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
    """Of a token in its row."""
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

    Rows that begin alike share what they begin with: it is computed once. A row ends with its last chosen prediction, because what
    follows can't change it. A row longer than the budget goes alone.
    """
    rows = _rows(predictions, chosen)
    found = families([predictions.input_ids[row.begin : row.begin + row.length] for row in rows])
    for part in fill(found, [row.length for row in rows], budget=budget):
        yield _pack(predictions, rows, part, device=device)


def share_of(predictions: Predictions, chosen: Index, *, rank: int, size: int) -> Index:
    """The chosen predictions that one of `size` ranks computes: whole rows, dealt out so that ranks have equal work.

    Rows that share a beginning stay together, unless one such family is so much of the whole that its rank would have much more to do.
    """
    if size == 1 or not len(chosen):
        return chosen
    rows = _rows(predictions, chosen)
    found = families([predictions.input_ids[row.begin : row.begin + row.length] for row in rows])
    work = _work(found, rows)
    if 4 * size * work.max() > work.sum():
        found = [Family((i,), 0) for i in range(len(rows))]
        work = _work(found, rows)
    mine = [found[i] for place, i in enumerate(np.argsort(-work, kind="stable")) if _dealt(place, size) == rank]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *(rows[i].chosen for family in mine for i in family.rows)]))


def _work(found: Sequence[Family], rows: Sequence[_Row]) -> Index:
    """Tokens that each family takes."""
    return np.array([family.shared + sum(rows[i].length - family.shared for i in family.rows) for family in found])


def _dealt(place: int, size: int) -> int:
    """Back and forth: the largest of each turn goes where the smallest went before."""
    turn, seat = divmod(place, size)
    return size - 1 - seat if turn % 2 else seat


def num_oversized(predictions: Predictions, *, budget: int) -> int:
    """Rows that exceed the budget on their own; each takes a forward and the memory it needs."""
    return int((np.diff(predictions.offsets) > budget).sum())


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


class _Row(NamedTuple):
    """A row as far as it is needed: where it begins in `input_ids`, its tokens, and its chosen predictions."""

    begin: int
    length: int
    chosen: Index


def _rows(predictions: Predictions, chosen: Index) -> list[_Row]:
    numbers, first = np.unique(predictions.row[chosen], return_index=True)
    if not len(numbers):
        return []
    begins = predictions.offsets[numbers]
    return [
        _Row(int(begin), int(predictions.inputs[own[-1]] - begin) + 1, own)
        for begin, own in zip(begins, np.split(chosen, first[1:]), strict=True)
    ]


class _Piece(NamedTuple):
    """Tokens that lie together in a micro-batch: what a family shares (`row` -1), or what a row has of its own after that."""

    context: int
    length: int
    family: int
    row: int


def _pack(predictions: Predictions, rows: Sequence[_Row], part: Sequence[Family], *, device: torch.device) -> MicroBatch:
    """Pieces of one context and length lie together, so that each such run is one call of attention."""
    shared = [_Piece(0, family.shared, f, -1) for f, family in enumerate(part) if family.shared]
    own = [_Piece(family.shared, rows[i].length - family.shared, f, i) for f, family in enumerate(part) for i in family.rows]
    pieces = sorted(shared + own)
    kinds = Counter((piece.context, piece.length) for piece in pieces)
    starts = np.cumsum([0, *(piece.length for piece in pieces)])[:-1]
    start_of_family = {piece.family: start for start, piece in zip(starts, pieces, strict=True) if piece.row < 0}
    positions = [np.arange(piece.context, piece.context + piece.length) for piece in pieces]
    begins = [rows[piece.row if piece.row >= 0 else part[piece.family].rows[0]].begin for piece in pieces]
    where = [
        _places(predictions, rows[piece.row], piece, start=start, shared=start_of_family.get(piece.family, 0))
        for start, piece in zip(starts, pieces, strict=True)
        if piece.row >= 0
    ]
    chosen = np.concatenate([rows[piece.row].chosen for piece in pieces if piece.row >= 0])
    keys = [
        np.concatenate([start_of_family.get(piece.family, 0) + np.arange(piece.context), start + np.arange(piece.length)])
        for start, piece in zip(starts, pieces, strict=True)
    ]
    tokens = np.concatenate([begin + at for begin, at in zip(begins, positions, strict=True)])
    return MicroBatch(
        input_ids=on_device(predictions.input_ids[tokens], device)[None],
        position_ids=on_device(np.concatenate(positions), device)[None],
        runs=Runs(
            counts=tuple(kinds.values()),
            lengths=tuple(length for _, length in kinds),
            contexts=tuple(context for context, _ in kinds),
            keys=on_device(np.concatenate(keys), device) if shared else None,
        ),
        inputs=on_device(np.concatenate(where), device),
        targets=on_device(predictions.targets[chosen], device),
        predictions=on_device(chosen, device),
    )


def _places(predictions: Predictions, row: _Row, piece: _Piece, *, start: int, shared: int) -> Index:
    """Where in the micro-batch a row's predictions are made: its first ones may lie in what its family shares, which is at `shared`."""
    at = predictions.inputs[row.chosen] - row.begin
    return np.where(at < piece.context, shared + at, start + at - piece.context)
