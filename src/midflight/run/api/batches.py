"""Rows and batches as JSON: the same numbers as the packed bytes, for clients that would rather read lists."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from midflight.types import PackedBatch, Row


class RowLists(msgspec.Struct, frozen=True):
    """One row. All lists have its length; the last three are meaningful where `loss_mask` is true."""

    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    versions: list[int]
    kv_versions: list[int]


class RolloutRow(RowLists, frozen=True, omit_defaults=True):
    rollout: int
    """Which of the batch's rollouts it is of."""
    teacher_logprobs: list[float] | None = None
    """Of a run with a teacher, as long as the others; meaningful where `loss_mask` is true."""


class RolloutFacts(msgspec.Struct, frozen=True):
    group: int
    reward: float
    truncated: bool


class BatchLists(msgspec.Struct, frozen=True):
    lease: int
    train_version: int
    rollouts: list[RolloutFacts]
    """Those without rows too: they count in their group's baseline."""
    rows: list[RolloutRow]


def rows_as_lists(rows: Iterable[Row]) -> list[RowLists]:
    return [
        RowLists(row.token_ids.tolist(), row.loss_mask.tolist(), row.logprobs.tolist(), row.versions.tolist(), row.kv_versions.tolist())
        for row in rows
    ]


def batch_as_lists(batch: PackedBatch) -> BatchLists:
    facts = zip(batch.rollout_group.tolist(), batch.rewards.tolist(), batch.truncated.tolist(), strict=True)
    spans = [slice(*span) for span in zip(batch.row_offsets[:-1].tolist(), batch.row_offsets[1:].tolist(), strict=True)]
    return BatchLists(
        lease=batch.lease,
        train_version=batch.train_version,
        rollouts=[RolloutFacts(group, reward, truncated) for group, reward, truncated in facts],
        rows=[
            RolloutRow(
                batch.token_ids[span].tolist(),
                batch.loss_mask[span].tolist(),
                batch.logprobs[span].tolist(),
                batch.versions[span].tolist(),
                batch.kv_versions[span].tolist(),
                rollout,
                None if batch.teacher_logprobs is None else batch.teacher_logprobs[span].tolist(),
            )
            for span, rollout in zip(spans, batch.row_rollout.tolist(), strict=True)
        ],
    )
