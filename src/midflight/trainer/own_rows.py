"""The part of a step that one rank receives. It has the rank's own rows, and the shapes and groups
of all the others.

A rank makes tokens from its part that have the shapes of the whole batch, so that the formulas know
nothing of ranks. In rows of other ranks the ids are 0, and so are the values, unless the loss looks
beyond a token (`Objective.looks_beyond`) or there is a critic.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from jaxtyping import Shaped
from numpy.typing import NDArray
from torch import Tensor

from midflight.trainer.model.microbatch import Index, Predictions, on_device
from midflight.trainer.model.scores import SamplingMasks
from midflight.trainer.tokens import LossTokens
from midflight.types import Version
from midflight.types.run_lengths import run_lengths

Flags = NDArray[np.bool_]


class Column(msgspec.Struct, frozen=True):
    """A flat array, in which a run of equal values is there once, if that is shorter."""

    dtype: str
    values: bytes
    lengths: bytes
    """The length of each run, as int32; empty if each value is there."""

    @classmethod
    def of(cls, array: NDArray[Any]) -> Column:
        runs = run_lengths(array)
        if runs is None:
            return cls(array.dtype.str, array.tobytes(), b"")
        return cls(array.dtype.str, runs.values.tobytes(), runs.lengths.tobytes())

    def array(self) -> NDArray[Any]:
        values = np.frombuffer(self.values, self.dtype)
        if not self.lengths:
            return values.copy()
        return np.repeat(values, np.frombuffer(self.lengths, np.int32))


class OwnMasks(msgspec.Struct, frozen=True):
    """The `SamplingMasks` of the rank's own tokens."""

    ids: Column
    counts: Column

    @classmethod
    def of(cls, kept: SamplingMasks | None, own: Index) -> OwnMasks | None:
        if kept is None:
            return None
        chosen = kept.at(own)
        counts = np.diff(chosen.offsets).astype(np.int32)
        return cls(Column.of(chosen.ids.astype(np.int32)), Column.of(counts))

    def kept(self, own: Flags) -> SamplingMasks:
        counts = _spread(self.counts.array().astype(np.int64), own)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return SamplingMasks(self.ids.array().astype(np.int64), offsets)


class OwnRows(msgspec.Struct, frozen=True):
    """One rank's part of a step's tokens: N input tokens, R rows and K tokens of the loss in all of
    the step, n and k of them in the rows that this rank has.
    """

    version: Version
    """The version that begins the step."""
    num_rollouts: int
    offsets: Column
    """[R + 1]"""
    rank_of_row: Column
    """[R]"""
    predicts: Column
    """[N], true at the input tokens after which a token of the loss comes"""
    rollout: Column
    """[K]"""
    group: Column
    """[K]"""
    input_ids: Column
    """[n]"""
    last: Column
    """The targets that are no input token, because a row ends with them."""
    behaviour: Column
    """[K] if the loss looks beyond a token, else [k], as the two after it"""
    advantage: Column
    age: Column
    kept: OwnMasks | None
    experts: bytes | None
    """[n, B]"""

    def tokens(self, rank: int, *, dtype: torch.dtype, device: torch.device) -> LossTokens:
        """The tokens of the step as this rank knows them. Nobody reads `has_older_keys` and
        `masked` but the first rank.
        """
        predictions = self._predictions(rank)
        own = predictions.held_by(rank)[predictions.row]

        def whole(column: Column) -> Shaped[Tensor, " K"]:
            values = column.array()
            if len(values) != len(own):
                values = _spread(values, own)
            return on_device(values, device)

        rollout = self.rollout.array()
        return LossTokens(
            predictions=predictions,
            behaviour=whole(self.behaviour).to(dtype),
            advantage=whole(self.advantage).to(dtype),
            age=whole(self.age),
            has_older_keys=torch.zeros(len(own), dtype=torch.bool, device=device),
            rollout=on_device(rollout, device),
            group=self.group.array(),
            num_rollouts=self.num_rollouts,
            masked={},
        )

    def _predictions(self, rank: int) -> Predictions:
        nothing = np.zeros(0, np.int64)
        offsets = self.offsets.array()
        inputs = np.flatnonzero(self.predicts.array())
        rows = Predictions(nothing, offsets, inputs, nothing, rank_of_row=self.rank_of_row.array())
        held = rows.held_by(rank)
        has_input = np.repeat(held, np.diff(offsets))
        own = held[rows.row]
        input_ids = _spread(self.input_ids.array().astype(np.int64), has_input)
        targets = np.zeros(len(inputs), np.int64)
        ends = _ends_row(rows) & own
        inside = own & ~ends
        targets[inside] = input_ids[inputs[inside] + 1]
        targets[ends] = self.last.array()
        experts = None
        if self.experts is not None:
            found = np.frombuffer(self.experts, np.uint8).reshape(int(has_input.sum()), -1)
            experts = _spread(found, has_input)
        return Predictions(
            input_ids=input_ids,
            offsets=offsets,
            inputs=inputs,
            targets=targets,
            kept=None if self.kept is None else self.kept.kept(own),
            experts=experts,
            rank_of_row=rows.rank_of_row,
        )


_decoder = msgspec.msgpack.Decoder(OwnRows)


def encode_own_rows(
    tokens: LossTokens, rank: int, *, version: Version, looks_beyond: bool
) -> bytes:
    """One rank's part of the tokens of a step that begins at `version`, and of all others their
    values if the loss looks beyond a token.
    """
    p = tokens.predictions
    assert p.rank_of_row is not None, "rows are dealt out where there are several ranks"
    held = p.held_by(rank)
    own = held[p.row]
    has_input = np.repeat(held, np.diff(p.offsets))
    predicts = np.zeros(len(p.input_ids), np.bool_)
    predicts[p.inputs] = True
    told = np.ones(len(own), np.bool_) if looks_beyond else own

    def column(values: Tensor) -> Column:
        return Column.of(values.cpu().numpy()[told])

    rows = OwnRows(
        version=version,
        num_rollouts=tokens.num_rollouts,
        offsets=Column.of(p.offsets),
        rank_of_row=Column.of(p.rank_of_row),
        predicts=Column.of(predicts),
        rollout=Column.of(tokens.rollout.cpu().numpy()),
        group=Column.of(tokens.group),
        input_ids=Column.of(p.input_ids[has_input].astype(np.int32)),
        last=Column.of(p.targets[_ends_row(p) & own]),
        behaviour=column(tokens.behaviour.float()),  # engines say it in float32
        advantage=column(tokens.advantage),
        age=column(tokens.age),
        kept=OwnMasks.of(p.kept, np.flatnonzero(own)),
        experts=None if p.experts is None else p.experts[has_input].tobytes(),
    )
    return msgspec.msgpack.encode(rows)


def decode_own_rows(data: bytes) -> OwnRows:
    return _decoder.decode(data)


def _ends_row(predictions: Predictions) -> Flags:
    """[K], true at the predictions whose target ends its row."""
    return predictions.inputs == predictions.offsets[predictions.row + 1] - 1


def _spread(values: NDArray[Any], where: Flags) -> NDArray[Any]:
    """An array as long as `where`, with the values at the places where it is true, and 0 at all
    others.
    """
    spread = np.zeros((len(where), *values.shape[1:]), values.dtype)
    spread[where] = values
    return spread
