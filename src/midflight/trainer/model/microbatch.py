"""Splitting rows into micro-batches by a budget of tokens, packed end to end without padding, what
rows share only once.

Rows that begin alike are families: the prompt of a group, the turns that rollouts have in common. A
family's shared tokens are computed once. `shift` is the one place that knows that the logits at a
token predict the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from midflight.errors import ConfigError
from midflight.trainer.model.attention import Runs
from midflight.trainer.model.scores import Kept
from midflight.types import UInt8

Scalar = TypeVar("Scalar", bound=np.generic)


class Layout(StrEnum):
    """How the rows of a micro-batch lie, from the fastest to the one that fits every model that
    takes rows.
    """

    PACKED = "packed"
    """End to end, what they share only once. The model's attention is ours."""
    PADDED = "padded"
    """Under each other, of similar length, padded on the right. The model's attention and mask are
    its own.
    """
    EQUAL = "equal"
    """Under each other, whole and of one length: for models in which the numbers of a row depend on
    how long the micro-batch's longest is.
    """


def shift(values: NDArray[Scalar], row_offsets: NDArray[np.integer[Any]]) -> NDArray[Scalar]:
    """Aligns a per-token array with the predictions: each row loses its first entry.

    [N] -> [N - R], where row r holds [row_offsets[r], row_offsets[r + 1]). Ids, mask,
    log-probabilities, versions: whatever is said of a token goes through here, so no two of them
    can be out of step. A row without tokens is not allowed.
    """
    assert (np.diff(row_offsets) > 0).all(), "every row has tokens"
    keep = np.ones(len(values), np.bool_)
    keep[row_offsets[:-1]] = False
    return values[keep]


def inputs(token_ids: NDArray[Scalar], row_offsets: NDArray[np.integer[Any]]) -> NDArray[Scalar]:
    """The tokens that predict: each row loses its last entry. `inputs(ids)[i]` is the token before
    `shift(ids)[i]`.
    """
    assert (np.diff(row_offsets) > 0).all(), "every row has tokens"
    keep = np.ones(len(token_ids), np.bool_)
    keep[row_offsets[1:] - 1] = False
    return token_ids[keep]


def shifted_offsets(row_offsets: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Where rows begin after `shift` and `inputs`: every row is one shorter. [R + 1]"""
    return np.asarray(row_offsets, np.int64) - np.arange(len(row_offsets))


Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Family:
    """Rows, by number, whose first `shared` tokens are equal; each has at least one token more. Of
    one row nothing is shared.
    """

    rows: tuple[int, ...]
    shared: int


def families(rows: Sequence[Tokens]) -> list[Family]:
    """Every row in one family, so that as many tokens as can be are shared.

    In the order of their tokens neighbours share most, so families are stretches of that order. n
    rows that begin with m equal tokens save (n - 1) m of them; the stretches that save most are
    found from the front, the last one by trying all its beginnings.
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i].astype(">u4").tobytes())
    common = np.array([_common(rows[i], rows[j]) for i, j in pairwise(order)], np.int64)
    saved = [0]
    begins = list[int]()
    for end in range(len(order)):
        # of the rows from each beginning up to this end
        shared = np.minimum.accumulate(common[:end][::-1])[::-1]
        gains = np.array(saved) + np.append(shared * np.arange(end, 0, -1), 0)
        begins.append(int(gains.argmax()))
        saved.append(int(gains.max()))
    found: list[Family] = []
    end = len(order)
    while end > 0:
        begin = begins[end - 1]
        found.append(
            Family(
                tuple(order[begin:end]),
                int(common[begin : end - 1].min()) if end - begin > 1 else 0,
            )
        )
        end = begin
    return found[::-1]


def fill(found: Sequence[Family], lengths: Sequence[int], *, budget: int) -> Iterator[list[Family]]:
    """Parts of at most `budget` tokens, shared ones counted once. A family that is cut computes
    them in each part; a row that is longer than the budget goes alone."""
    part: list[Family] = []
    total = 0
    for family in found:
        held: list[int] = []
        total += family.shared
        for row in family.rows:
            own = lengths[row] - family.shared
            if (part or held) and total + own > budget:
                yield [*part, *_whole(held, family.shared)]
                part = []
                held = []
                total = family.shared
            held.append(row)
            total += own
        part += _whole(held, family.shared)
    if part:
        yield part


def _whole(rows: Sequence[int], shared: int) -> list[Family]:
    return [Family(tuple(rows), shared if len(rows) > 1 else 0)] if rows else []


def _common(a: Tokens, b: Tokens) -> int:
    """Length of the common beginning that leaves both a token."""
    n = min(len(a), len(b)) - 1
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """The predictions to train on, K of them, over rows of input tokens. Already shifted.

    Row r's inputs are `input_ids[offsets[r] : offsets[r + 1]]`; prediction k is made at
    `inputs[k]`, an index into `input_ids`.
    """

    input_ids: Index
    """[N]"""
    offsets: Index
    """[R + 1]"""
    inputs: Index
    """[K], ascending"""
    targets: Index
    """[K], the tokens to predict"""
    kept: Kept | None = None
    """What the tokens were drawn from; None: each from the whole vocabulary"""
    experts: UInt8 | None = None
    """[N, B], the experts that the engine sent each input token to, where it recorded them"""

    @property
    def row(self) -> Index:
        """[K], the row of each prediction."""
        return np.searchsorted(self.offsets, self.inputs, side="right") - 1


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One forward: input tokens in R rows of L, and the k predictions made on them. Packed rows lie
    end to end in one row of all N tokens.
    """

    input_ids: Int[Tensor, "R L"]
    runs: Runs | None
    """How packed rows lie; None where rows lie under each other."""
    position_ids: Int[Tensor, "1 N"] | None
    """The place of each token in its row, of packed rows. Other rows begin at their first token, as
    the model counts by itself.
    """
    attention_mask: Int[Tensor, "R L"] | None
    """1 for tokens and 0 for padding, where there is padding."""
    inputs: Int[Tensor, " k"]
    """Where in `input_ids`, read row by row, the predictions are made."""
    targets: Int[Tensor, " k"]
    predictions: Int[Tensor, " k"]
    """Which of the `Predictions` these are."""
    kept: Kept | None
    """Of these predictions, as in `Predictions`."""
    experts: UInt8 | None = None
    """[N, B], as in `Predictions`; of tokens that rows share, the first row's."""


def predictions_of(
    token_ids: NDArray[np.int32],
    row_offsets: NDArray[np.int32],
    *,
    mask: NDArray[np.bool_],
    experts: UInt8 | None = None,
) -> Predictions:
    """The predictions of the tokens where `mask` is True ([N], unshifted). A row's first token is
    predicted by nothing.
    """
    where = np.flatnonzero(shift(mask, row_offsets))
    return Predictions(
        input_ids=inputs(token_ids, row_offsets).astype(np.int64),
        offsets=shifted_offsets(row_offsets),
        inputs=where,
        targets=shift(token_ids, row_offsets)[where].astype(np.int64),
        experts=None if experts is None else inputs(experts, row_offsets),
    )


Example = tuple[Sequence[int], Sequence[int]]
"""Ids of a prompt and of the answer to learn, its end-of-message token included."""


def answer_predictions(examples: Sequence[Example]) -> Predictions:
    """Rows of prompt and answer that predict the answer only."""
    for number, (prompt, answer) in enumerate(examples):
        if not len(prompt) or not len(answer):
            raise ConfigError(
                f"example {number} has a prompt of {len(prompt)} and an answer of {len(answer)} "
                "tokens. Both need at least one."
            )
    if not examples:
        raise ConfigError("a supervised step got no examples. Give it at least one.")
    lengths = [len(prompt) + len(answer) for prompt, answer in examples]
    return predictions_of(
        np.concatenate([[*prompt, *answer] for prompt, answer in examples]).astype(np.int32),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        mask=np.concatenate(
            [[False] * len(prompt) + [True] * len(answer) for prompt, answer in examples]
        ),
    )


def split(
    predictions: Predictions,
    chosen: Index,
    *,
    budget: int,
    device: torch.device,
    layout: Layout = Layout.PACKED,
) -> Iterator[MicroBatch]:
    """Micro-batches of at most `budget` tokens that hold the `chosen` predictions (ascending
    indices) and no others.

    Packed rows that begin alike share what they begin with: it is computed once. A row ends with
    its last chosen prediction, because what follows can't change it, but in `Layout.EQUAL`, where
    it can. A row longer than the budget goes alone.
    """
    rows = _rows(predictions, chosen, whole=layout is Layout.EQUAL)
    if layout is not Layout.PACKED:
        for padded in _of_similar_length(rows, budget=budget, equal=layout is Layout.EQUAL):
            yield _pad(predictions, padded, device=device)
        return
    found = families([predictions.input_ids[row.begin : row.begin + row.length] for row in rows])
    for part in fill(found, [row.length for row in rows], budget=budget):
        yield _pack(predictions, rows, part, device=device)


def share_of(predictions: Predictions, chosen: Index, *, rank: int, size: int) -> Index:
    """The chosen predictions that one of `size` ranks computes: whole rows, dealt out so that ranks
    have equal work.

    Rows that share a beginning stay together, unless one such family is so much of the whole that
    its rank would have much more to do.
    """
    if size == 1 or not len(chosen):
        return chosen
    rows = _rows(predictions, chosen)
    found = families([predictions.input_ids[row.begin : row.begin + row.length] for row in rows])
    work = _work(found, rows)
    if 4 * size * work.max() > work.sum():
        found = [Family((i,), 0) for i in range(len(rows))]
        work = _work(found, rows)
    mine = [
        found[i]
        for place, i in enumerate(np.argsort(-work, kind="stable"))
        if _dealt(place, size) == rank
    ]
    return np.sort(
        np.concatenate(
            [np.zeros(0, np.int64), *(rows[i].chosen for family in mine for i in family.rows)]
        )
    )


def _work(found: Sequence[Family], rows: Sequence[_RowSpan]) -> Index:
    """Tokens that each family takes."""
    return np.array(
        [
            family.shared + sum(rows[i].length - family.shared for i in family.rows)
            for family in found
        ]
    )


def _dealt(place: int, size: int) -> int:
    """Back and forth: the largest of each turn goes where the smallest went before."""
    turn, seat = divmod(place, size)
    return size - 1 - seat if turn % 2 else seat


def num_oversized(predictions: Predictions, *, budget: int) -> int:
    """Rows that exceed the budget on their own; each takes a forward and the memory it needs."""
    return int((np.diff(predictions.offsets) > budget).sum())


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


class _RowSpan(NamedTuple):
    """A row as far as it is needed: where it begins in `input_ids`, its tokens, and its chosen
    predictions.
    """

    begin: int
    length: int
    chosen: Index


def _rows(predictions: Predictions, chosen: Index, *, whole: bool = False) -> list[_RowSpan]:
    numbers, first = np.unique(predictions.row[chosen], return_index=True)
    if not len(numbers):
        return []
    begins = predictions.offsets[numbers]
    ends = predictions.offsets[numbers + 1]
    return [
        _RowSpan(
            int(begin),
            int(end - begin) if whole else int(predictions.inputs[own[-1]] - begin) + 1,
            own,
        )
        for begin, end, own in zip(begins, ends, np.split(chosen, first[1:]), strict=True)
    ]


def _of_similar_length(
    rows: Sequence[_RowSpan], *, budget: int, equal: bool
) -> Iterator[list[_RowSpan]]:
    """Shortest first, so that padding is little; parts of at most `budget` tokens with it, or of
    one row.
    """
    part: list[_RowSpan] = []
    for row in sorted(rows, key=lambda row: row.length):
        if part and (
            row.length * (len(part) + 1) > budget or (equal and row.length != part[0].length)
        ):
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _pad(predictions: Predictions, rows: Sequence[_RowSpan], *, device: torch.device) -> MicroBatch:
    """Rows are filled up with their last token, which no token before it sees."""
    lengths = np.array([row.length for row in rows])
    width = int(lengths.max())
    upto = np.minimum(np.arange(width), lengths[:, None] - 1)
    tokens = np.array([row.begin for row in rows])[:, None] + upto
    chosen = np.concatenate([row.chosen for row in rows])
    where = np.concatenate(
        [
            number * width + predictions.inputs[row.chosen] - row.begin
            for number, row in enumerate(rows)
        ]
    )
    mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
    return MicroBatch(
        input_ids=on_device(predictions.input_ids[tokens], device),
        runs=None,
        position_ids=None,
        attention_mask=None if mask.all() else on_device(mask, device),
        inputs=on_device(where, device),
        targets=on_device(predictions.targets[chosen], device),
        predictions=on_device(chosen, device),
        kept=None if predictions.kept is None else predictions.kept.at(chosen),
        experts=None if predictions.experts is None else predictions.experts[tokens.flatten()],
    )


class _Stretch(NamedTuple):
    """Tokens that lie together in a micro-batch: what a family shares (`row` -1), or what a row has
    of its own after that.
    """

    context: int
    length: int
    family: int
    row: int


def _pack(
    predictions: Predictions,
    rows: Sequence[_RowSpan],
    part: Sequence[Family],
    *,
    device: torch.device,
) -> MicroBatch:
    """Pieces of one context and length lie together, so that each such run is one call of
    attention.
    """
    shared = [_Stretch(0, family.shared, f, -1) for f, family in enumerate(part) if family.shared]
    own = [
        _Stretch(family.shared, rows[i].length - family.shared, f, i)
        for f, family in enumerate(part)
        for i in family.rows
    ]
    pieces = sorted(shared + own)
    kinds = Counter((piece.context, piece.length) for piece in pieces)
    starts = np.cumsum([0, *(piece.length for piece in pieces)])[:-1]
    start_of_family = {
        piece.family: start for start, piece in zip(starts, pieces, strict=True) if piece.row < 0
    }
    positions = [np.arange(piece.context, piece.context + piece.length) for piece in pieces]
    begins = [
        rows[piece.row if piece.row >= 0 else part[piece.family].rows[0]].begin for piece in pieces
    ]
    where = [
        _places(
            predictions,
            rows[piece.row],
            piece,
            start=start,
            shared=start_of_family.get(piece.family, 0),
        )
        for start, piece in zip(starts, pieces, strict=True)
        if piece.row >= 0
    ]
    chosen = np.concatenate([rows[piece.row].chosen for piece in pieces if piece.row >= 0])
    keys = [
        np.concatenate(
            [
                start_of_family.get(piece.family, 0) + np.arange(piece.context),
                start + np.arange(piece.length),
            ]
        )
        for start, piece in zip(starts, pieces, strict=True)
    ]
    tokens = np.concatenate([begin + at for begin, at in zip(begins, positions, strict=True)])
    return MicroBatch(
        input_ids=on_device(predictions.input_ids[tokens], device)[None],
        position_ids=on_device(np.concatenate(positions), device)[None],
        attention_mask=None,
        runs=Runs(
            counts=tuple(kinds.values()),
            lengths=tuple(length for _, length in kinds),
            contexts=tuple(context for context, _ in kinds),
            keys=on_device(np.concatenate(keys), device) if shared else None,
        ),
        inputs=on_device(np.concatenate(where), device),
        targets=on_device(predictions.targets[chosen], device),
        predictions=on_device(chosen, device),
        kept=None if predictions.kept is None else predictions.kept.at(chosen),
        experts=None if predictions.experts is None else predictions.experts[tokens],
    )


def _places(
    predictions: Predictions, row: _RowSpan, piece: _Stretch, *, start: int, shared: int
) -> Index:
    """Where in the micro-batch a row's predictions are made: its first ones may lie in what its
    family shares, which is at `shared`.
    """
    at = predictions.inputs[row.chosen] - row.begin
    return np.where(at < piece.context, shared + at, start + at - piece.context)
