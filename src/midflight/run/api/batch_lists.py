"""Rows and batches as JSON: the same numbers as the packed bytes, for clients that would rather
read lists.
"""

from collections.abc import Iterable
from math import isnan

import msgspec

from midflight.trajectories.packing import NO_ANSWER
from midflight.types import PackedBatch, Row
from midflight.types.sampling_masks import kept_ids


class RowLists(msgspec.Struct, frozen=True):
    """One row. All lists have its length; the last three are meaningful where `loss_mask` is
    true.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    versions: list[int]
    kv_versions: list[int]


class SessionRow(RowLists, frozen=True, omit_defaults=True):
    role: str = ""
    """The session's role, in a rollout that has several sessions."""


class RolloutRow(RowLists, frozen=True, omit_defaults=True):
    rollout: int
    """The number of the row's rollout in the batch."""
    teacher_logprobs: list[float] | None = None
    """It is present in a run with a teacher, and as long as the others; meaningful where
    `loss_mask` is true.
    """
    turns: list[int] | None = None
    """The answer that each token belongs to, counted from 0. It is present if some rollout has
    rewards for its answers.
    """
    kept: list[list[int]] | None = None
    """The ids that truncation left for each token, or none if nothing was cut off. It is present if
    `correction.sampling_masks` is on.
    """


class RolloutFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    group: int
    reward: float
    truncated: bool
    room: int | None
    turn_rewards: list[float] | None = None
    components: dict[str, float] = {}


class BatchLists(msgspec.Struct, frozen=True):
    lease: int
    train_version: int
    rollouts: list[RolloutFacts]
    """Rollouts without rows are here too: they count in their group's baseline."""
    rows: list[RolloutRow]


def rows_as_lists(rows: Iterable[Row]) -> list[SessionRow]:
    return [
        SessionRow(
            row.token_ids.tolist(),
            row.loss_mask.tolist(),
            row.logprobs.tolist(),
            row.versions.tolist(),
            row.kv_versions.tolist(),
            row.role,
        )
        for row in rows
    ]


def batch_as_lists(batch: PackedBatch) -> BatchLists:
    return BatchLists(
        lease=batch.lease,
        train_version=batch.train_version,
        rollouts=_rollouts(batch),
        rows=_rows(batch),
    )


def _rollouts(batch: PackedBatch) -> list[RolloutFacts]:
    num = len(batch.rewards)
    turn_rewards = [None] * num
    if batch.turn_rewards is not None:
        turn_rewards = batch.turn_rewards.reshape(num, -1).tolist()
    each = zip(
        batch.rollout_group.tolist(),
        batch.rewards.tolist(),
        batch.truncated.tolist(),
        _room(batch),
        turn_rewards,
        _components(batch),
        strict=True,
    )
    return [RolloutFacts(*facts) for facts in each]


def _room(batch: PackedBatch) -> list[int | None]:
    if batch.room is None:
        return [None] * len(batch.rewards)
    rooms: list[int | None] = batch.room.tolist()
    for place, room in enumerate(rooms):
        if room == NO_ANSWER:
            rooms[place] = None
    return rooms


def _components(batch: PackedBatch) -> list[dict[str, float]]:
    """Leaves out those that are NaN: the rollout has none of that name."""
    num = len(batch.rewards)
    table = [()] * num if batch.components is None else batch.components.reshape(num, -1).tolist()
    found: list[dict[str, float]] = []
    for line in table:
        named = zip(batch.component_names, line, strict=True)
        found.append({name: value for name, value in named if not isnan(value)})
    return found


def _rows(batch: PackedBatch) -> list[RolloutRow]:
    kept = None
    if batch.kept is not None and batch.kept_lengths is not None:
        kept = kept_ids(batch.kept, batch.kept_lengths)
    offsets = batch.row_offsets.tolist()
    rollouts = batch.row_rollout.tolist()
    rows: list[RolloutRow] = []
    for begin, end, rollout in zip(offsets[:-1], offsets[1:], rollouts, strict=True):
        span = slice(begin, end)
        scores = batch.teacher_logprobs
        turns = batch.turns
        row = RolloutRow(
            batch.token_ids[span].tolist(),
            batch.loss_mask[span].tolist(),
            batch.logprobs[span].tolist(),
            batch.versions[span].tolist(),
            batch.kv_versions[span].tolist(),
            rollout,
            None if scores is None else scores[span].tolist(),
            None if turns is None else turns[span].tolist(),
            None if kept is None else kept[span],
        )
        rows.append(row)
    return rows
