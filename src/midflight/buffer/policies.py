"""What over-age trajectories and tokens become, under `drop` and `mask`: pure functions on groups (DECISIONS 4).

`floor` is the oldest version that may still be trained: train_version - max_staleness. Both functions return the group without
over-age trainable tokens, and how the tokens that left divide into masked and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from midflight.types import Group, Row, StalePolicy, Trajectory, Version


@dataclass(frozen=True, slots=True)
class Trimmed:
    group: Group
    num_masked: int
    """Trainable tokens that stay in a row as context."""
    num_dropped: int
    """Trainable tokens that left with their row."""


def trim(policy: StalePolicy, group: Group, floor: Version) -> Trimmed:
    """What the policy leaves of a group at the step; `wait` and `requeue` train whole groups or none."""
    match policy:
        case StalePolicy.DROP:
            return without_stale_trajectories(group, floor)
        case StalePolicy.MASK:
            return with_stale_tokens_masked(group, floor)
        case StalePolicy.WAIT | StalePolicy.REQUEUE:
            return Trimmed(group, num_masked=0, num_dropped=0)


def without_stale_trajectories(group: Group, floor: Version) -> Trimmed:
    """`drop`: a trajectory with an over-age token loses its rows; its reward stays in the group's baseline."""
    kept = tuple(replace(t, rows=()) if _is_stale(t, floor) else t for t in group.trajectories)
    trimmed = replace(group, trajectories=kept)
    return Trimmed(trimmed, num_masked=0, num_dropped=group.num_trainable - trimmed.num_trainable)


def with_stale_tokens_masked(group: Group, floor: Version) -> Trimmed:
    """`mask`: an over-age token stays as context without a gradient; a row without any trainable token left is dropped."""
    kept: list[Trajectory] = []
    num_masked = 0
    for trajectory in group.trajectories:
        rows = [(row, masked) for row in trajectory.rows if (masked := _mask_stale(row, floor)).num_trainable]
        num_masked += sum(row.num_trainable - masked.num_trainable for row, masked in rows)
        kept.append(replace(trajectory, rows=tuple(masked for _, masked in rows)))
    trimmed = replace(group, trajectories=tuple(kept))
    return Trimmed(trimmed, num_masked=num_masked, num_dropped=group.num_trainable - trimmed.num_trainable - num_masked)


def _is_stale(trajectory: Trajectory, floor: Version) -> bool:
    return (oldest := trajectory.oldest_version) is not None and oldest < floor


def _mask_stale(row: Row, floor: Version) -> Row:
    return replace(row, loss_mask=row.loss_mask & (row.versions >= floor))
