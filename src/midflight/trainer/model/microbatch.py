"""Micro-batches: rows that are split by a budget of tokens and packed end to end without padding.

Rows that begin alike are families: they share the prompt of a group, or the turns that rollouts
have in common. A family's shared tokens are computed once. `shift` is the one place that knows that
the logits at a token predict the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
from midflight.trainer.model.scores import SamplingMasks
from midflight.types import UInt8

Scalar = TypeVar("Scalar", bound=np.generic)


class Layout(StrEnum):
    """The layout of the rows of a micro-batch, from the fastest one to the one that fits every
    model that takes rows.
    """

    PACKED = "packed"
    """Rows lie end to end, and their common tokens are there only once. The model's attention is
    ours.
    """
    PADDED = "padded"
    """Rows of similar length lie under each other, padded on the right. The model's attention and
    mask are its own.
    """
    EQUAL = "equal"
    """Whole rows of one length lie under each other. This is for models in which the numbers of a
    row depend on the length of the micro-batch's longest row.
    """


def shift(values: NDArray[Scalar], row_offsets: NDArray[np.integer[Any]]) -> NDArray[Scalar]:
    """Aligns a per-token array with the predictions: each row loses its first entry.

    [N] -> [N - R], where row r holds [row_offsets[r], row_offsets[r + 1]). Ids, mask,
    log-probabilities, versions: every array with values of tokens goes through here, so no two of
    them can be out of step. A row without tokens is not allowed.
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
    """Returns the beginnings of rows after `shift` and `inputs`: every row is one shorter. [R
    + 1]
    """
    return np.asarray(row_offsets, np.int64) - np.arange(len(row_offsets))


Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Family:
    """Rows, by number, whose first `shared` tokens are equal; each has at least one token more. A
    family of one row shares nothing.
    """

    rows: tuple[int, ...]
    shared: int


def families(rows: Sequence[Tokens]) -> list[Family]:
    """Puts every row into one family, so that as many tokens as possible are shared.

    In the order of their tokens neighbours share most, so families are stretches of that order. n
    rows that begin with m equal tokens save (n - 1) m of them. The stretches that save most are
    found from the front: for each end, all beginnings of its stretch are tried.
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i].astype(">u4").tobytes())
    common = np.array([_common(rows[i], rows[j]) for i, j in pairwise(order)], np.int64)
    saved = [0]
    begins = list[int]()
    for end in range(len(order)):
        # Tokens that the rows from each beginning up to this end share.
        shared = np.minimum.accumulate(common[:end][::-1])[::-1]
        gains = np.array(saved) + np.append(shared * np.arange(end, 0, -1), 0)
        begins.append(int(gains.argmax()))
        saved.append(int(gains.max()))
    found: list[Family] = []
    end = len(order)
    while end > 0:
        begin = begins[end - 1]
        shared = int(common[begin : end - 1].min()) if end - begin > 1 else 0
        found.append(Family(tuple(order[begin:end]), shared))
        end = begin
    return found[::-1]


def fill(found: Sequence[Family], lengths: Sequence[int], *, budget: int) -> Iterator[list[Family]]:
    """Fills parts of at most `budget` tokens, in which shared tokens count once. A family that is
    cut computes its shared tokens in each part. A row that is longer than the budget goes alone.
    """
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
    """The family of these rows; none if there are no rows."""
    if not rows:
        return []
    return [Family(tuple(rows), shared if len(rows) > 1 else 0)]


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
    kept: SamplingMasks | None = None
    """The ids that each token was drawn from. None: each from the whole vocabulary."""
    experts: UInt8 | None = None
    """[N, B], the experts that the engine sent each input token to, if it recorded them"""
    rank_of_row: Index | None = None
    """[R], the rank that computes the predictions of each row, see `dealt`. None: there is one
    rank.
    """

    @property
    def row(self) -> Index:
        """[K], the row of each prediction."""
        first = np.searchsorted(self.inputs, self.offsets)
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(first))

    def of_rank(self, rank: int, chosen: Index) -> Index:
        """Those of the chosen predictions that the rank computes."""
        if self.rank_of_row is None:
            return chosen
        return chosen[self.rank_of_row[self.row[chosen]] == rank]

    def held_by(self, rank: int) -> NDArray[np.bool_]:
        """[R], the rows that a rank has: those that it computes. If it computes none, it has the
        first row that has a prediction, because it makes forwards while others make theirs.
        """
        if self.rank_of_row is None:
            return np.ones(len(self.offsets) - 1, np.bool_)
        held = self.rank_of_row == rank
        if not held.any():
            held[self.row[:1]] = True
        return held


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One forward: input tokens in R rows of L, and the k predictions made on them. Packed rows lie
    end to end in one row of all N tokens.
    """

    input_ids: Int[Tensor, "R L"]
    runs: Runs | None
    """The layout of packed rows, or None if rows lie under each other."""
    position_ids: Int[Tensor, "1 N"] | None
    """The place of each token in its row, for packed rows. Other rows begin at their first token,
    as the model counts by itself.
    """
    attention_mask: Int[Tensor, "R L"] | None
    """1 for tokens and 0 for padding, if there is padding."""
    inputs: Int[Tensor, " k"]
    """The places in `input_ids`, read row by row, at which the predictions are made."""
    targets: Int[Tensor, " k"]
    predictions: Int[Tensor, " k"]
    """The numbers of these predictions among the `Predictions`."""
    kept: SamplingMasks | None
    """The ids that these predictions were drawn from, see `Predictions`."""
    experts: UInt8 | None = None
    """[N, B], as in `Predictions`; tokens that rows share have the experts of the first row."""


def predictions_of(
    token_ids: NDArray[np.int32],
    row_offsets: NDArray[np.int32],
    *,
    mask: NDArray[np.bool_],
    experts: UInt8 | None = None,
) -> Predictions:
    """The predictions of the tokens where `mask` is True ([N], unshifted). Nothing predicts a row's
    first token.
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
    ids: list[int] = []
    in_answer: list[bool] = []
    offsets = [0]
    for prompt, answer in examples:
        ids += [*prompt, *answer]
        in_answer += [False] * len(prompt) + [True] * len(answer)
        offsets.append(len(ids))
    return predictions_of(
        np.array(ids, np.int32), np.array(offsets, np.int32), mask=np.array(in_answer, np.bool_)
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

    Packed rows that begin alike share their beginning, which is computed once. A row ends with its
    last chosen prediction, because the tokens after it can't change it. In `Layout.EQUAL` they can,
    so rows stay whole there. A row longer than the budget goes alone.
    """
    rows = _rows(predictions, chosen, whole=layout is Layout.EQUAL)
    if layout is not Layout.PACKED:
        for padded in _of_similar_length(rows, budget=budget, equal=layout is Layout.EQUAL):
            yield _pad(predictions, padded, device=device)
        return
    found = _families_of(predictions, rows)
    for part in fill(found, [row.length for row in rows], budget=budget):
        yield _pack(predictions, rows, part, device=device)


def dealt(predictions: Predictions, parts: Iterable[Index], *, size: int) -> Index:
    """The rank among `size` that computes each row, [R], or -1 for a row without a chosen
    prediction. The rows of each part (chosen predictions, ascending) are dealt out so that ranks
    have equal work in it. A row of several parts is dealt out in the first of them.

    Rows that share a beginning stay together, unless one such family is so large that its rank
    would have much more work.
    """
    rank_of_row = np.full(len(predictions.offsets) - 1, -1)
    row = predictions.row
    for part in parts:
        chosen = part[rank_of_row[row[part]] < 0]
        if not len(chosen):
            continue
        rows = _rows(predictions, chosen)
        found = _families_of(predictions, rows)
        work = np.array([_work(family, rows) for family in found])
        if 4 * size * work.max() > work.sum():
            found = [Family((i,), 0) for i in range(len(rows))]
            work = np.array([_work(family, rows) for family in found])
        for place, i in enumerate(np.argsort(-work, kind="stable")):
            for member in found[i].rows:
                rank_of_row[rows[member].number] = _dealt(place, size)
    return rank_of_row


def _work(family: Family, rows: Sequence[_RowSpan]) -> int:
    """Tokens that a family takes."""
    return family.shared + sum(rows[i].length - family.shared for i in family.rows)


def _dealt(place: int, size: int) -> int:
    """The rank that gets the family at this place, largest first. Ranks are dealt to back and
    forth: the largest of each turn goes where the smallest went before.
    """
    turn, seat = divmod(place, size)
    return size - 1 - seat if turn % 2 else seat


def num_oversized(predictions: Predictions, *, budget: int) -> int:
    """Rows that exceed the budget on their own; each takes a forward and the memory it needs."""
    return int((np.diff(predictions.offsets) > budget).sum())


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


class _RowSpan(NamedTuple):
    """A row as far as it is needed: its number, its beginning in `input_ids`, its tokens, and its
    chosen predictions.
    """

    number: int
    begin: int
    length: int
    chosen: Index


def _rows(predictions: Predictions, chosen: Index, *, whole: bool = False) -> list[_RowSpan]:
    """The rows of the chosen predictions, up to the last chosen one unless `whole`."""
    numbers, first = np.unique(predictions.row[chosen], return_index=True)
    if not len(numbers):
        return []
    begins = predictions.offsets[numbers]
    ends = predictions.offsets[numbers + 1]
    rows: list[_RowSpan] = []
    for number, begin, end, own in zip(
        numbers, begins, ends, np.split(chosen, first[1:]), strict=True
    ):
        if not whole:
            end = predictions.inputs[own[-1]] + 1
        rows.append(_RowSpan(int(number), int(begin), int(end - begin), own))
    return rows


def _families_of(predictions: Predictions, rows: Sequence[_RowSpan]) -> list[Family]:
    ids = predictions.input_ids
    return families([ids[row.begin : row.begin + row.length] for row in rows])


def _of_similar_length(
    rows: Sequence[_RowSpan], *, budget: int, equal: bool
) -> Iterator[list[_RowSpan]]:
    """Parts of rows, shortest first, so that there is little padding. A part has at most `budget`
    tokens, padding included, or it is one row.
    """
    part: list[_RowSpan] = []
    for row in sorted(rows, key=lambda row: row.length):
        is_full = row.length * (len(part) + 1) > budget
        differs = equal and bool(part) and row.length != part[0].length
        if part and (is_full or differs):
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
    where = [
        number * width + predictions.inputs[row.chosen] - row.begin
        for number, row in enumerate(rows)
    ]
    mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
    return MicroBatch(
        input_ids=on_device(predictions.input_ids[tokens], device),
        runs=None,
        position_ids=None,
        attention_mask=None if mask.all() else on_device(mask, device),
        inputs=on_device(np.concatenate(where), device),
        targets=on_device(predictions.targets[chosen], device),
        predictions=on_device(chosen, device),
        kept=None if predictions.kept is None else predictions.kept.at(chosen),
        experts=None if predictions.experts is None else predictions.experts[tokens.flatten()],
    )


class _Stretch(NamedTuple):
    """Tokens that lie together in a micro-batch: those that a family shares (`row` is -1), or those
    that a row has of its own after them.
    """

    context: int
    length: int
    family: int
    row: int


def _stretches(part: Sequence[Family], rows: Sequence[_RowSpan]) -> list[_Stretch]:
    """Stretches of one context and length lie together, so that each such run is one call of
    attention.
    """
    found: list[_Stretch] = []
    for number, family in enumerate(part):
        if family.shared:
            found.append(_Stretch(0, family.shared, number, -1))
        for i in family.rows:
            found.append(_Stretch(family.shared, rows[i].length - family.shared, number, i))
    return sorted(found)


def _pack(
    predictions: Predictions,
    rows: Sequence[_RowSpan],
    part: Sequence[Family],
    *,
    device: torch.device,
) -> MicroBatch:
    """One row of all tokens of these families, stretch after stretch."""
    stretches = _stretches(part, rows)
    lengths = [stretch.length for stretch in stretches]
    starts = np.cumsum([0, *lengths])[:-1]
    start_of_family = {
        stretch.family: start
        for start, stretch in zip(starts, stretches, strict=True)
        if stretch.row < 0
    }
    tokens: list[Index] = []
    positions: list[Index] = []
    keys: list[Index] = []
    where: list[Index] = []
    chosen: list[Index] = []
    for start, stretch in zip(starts, stretches, strict=True):
        shared = start_of_family.get(stretch.family, 0)
        # The first row of a family lends its tokens to the stretch that all of them share.
        row = rows[stretch.row if stretch.row >= 0 else part[stretch.family].rows[0]]
        in_row = np.arange(stretch.context, stretch.context + stretch.length)
        tokens.append(row.begin + in_row)
        positions.append(in_row)
        keys.append(shared + np.arange(stretch.context))
        keys.append(start + np.arange(stretch.length))
        if stretch.row >= 0:
            where.append(_places(predictions, row, stretch, start=start, shared=shared))
            chosen.append(row.chosen)
    runs = Counter((stretch.context, stretch.length) for stretch in stretches)
    all_chosen = np.concatenate(chosen)
    all_tokens = np.concatenate(tokens)
    experts = predictions.experts
    return MicroBatch(
        input_ids=on_device(predictions.input_ids[all_tokens], device)[None],
        position_ids=on_device(np.concatenate(positions), device)[None],
        attention_mask=None,
        runs=Runs(
            counts=tuple(runs.values()),
            lengths=tuple(length for _, length in runs),
            contexts=tuple(context for context, _ in runs),
            keys=on_device(np.concatenate(keys), device) if start_of_family else None,
        ),
        inputs=on_device(np.concatenate(where), device),
        targets=on_device(predictions.targets[all_chosen], device),
        predictions=on_device(all_chosen, device),
        kept=None if predictions.kept is None else predictions.kept.at(all_chosen),
        experts=None if experts is None else experts[all_tokens],
    )


def _places(
    predictions: Predictions, row: _RowSpan, stretch: _Stretch, *, start: int, shared: int
) -> Index:
    """Returns the places in the micro-batch at which a row's predictions are made. Its first ones
    may lie in the tokens that its family shares, which begin at `shared`.
    """
    at = predictions.inputs[row.chosen] - row.begin
    return np.where(at < stretch.context, shared + at, start + at - stretch.context)
