"""Groups that wait for a step or are in one, the effect of the stale policy on them and their
tokens, and the limits of the buffer.

`floor` is the oldest version that may still be trained: train_version - max_staleness. `drop` and
`mask` return the group without over-age trainable tokens, and the numbers of removed tokens, masked
and dropped. All are pure functions on groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from midflight.buffer.staleness import Lineage
from midflight.types import (
    Batch,
    Group,
    GroupKey,
    Reason,
    RolloutKey,
    Row,
    StalePolicy,
    Trajectory,
    Version,
)


@dataclass(frozen=True, slots=True)
class Wait:
    """The answer "not yet". `for_whom` is one of generation, stragglers, trainer, handover, slots,
    tasks; `detail` is a sentence for people.
    """

    for_whom: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Depth (`max_in_flight`, rollouts), bound on age (`max_staleness`, versions) and size
    (`buffer_groups`, `buffer_bytes`) are three knobs.

    A batch must fit into the buffer and a group into the depth, or nothing is ever trained:
    `config.checks` refuses such numbers.
    """

    groups_per_step: int
    group_size: int
    max_staleness: int
    policy: StalePolicy
    max_in_flight: int
    buffer_groups: int
    buffer_bytes: int
    min_group_size: int
    drop_zero_spread: bool


@dataclass(frozen=True, slots=True)
class TrimmedGroup:
    """A group without its over-age tokens, and how many trainable tokens of each rollout left."""

    group: Group
    masked: Mapping[RolloutKey, int]
    """They stay in a row as context."""
    dropped: Mapping[RolloutKey, int]
    """They left with their row."""


def trim(policy: StalePolicy, group: Group, floor: Version) -> TrimmedGroup:
    """Returns the part of a group that the policy leaves at the step. `wait` and `requeue` train
    whole groups or none.
    """
    match policy:
        case StalePolicy.DROP:
            return without_stale_trajectories(group, floor)
        case StalePolicy.MASK:
            return with_stale_tokens_masked(group, floor)
        case StalePolicy.WAIT | StalePolicy.REQUEUE:
            return TrimmedGroup(group, {}, {})


def without_stale_trajectories(group: Group, floor: Version) -> TrimmedGroup:
    """Applies `drop`. A trajectory with an over-age token loses its rows. Its reward stays in the
    group's baseline.
    """
    stale = {t.key: t.num_trainable for t in group.trajectories if _is_stale(t, floor)}
    kept: list[Trajectory] = []
    for trajectory in group.trajectories:
        is_stale = trajectory.key in stale
        kept.append(replace(trajectory, rows=()) if is_stale else trajectory)
    return TrimmedGroup(replace(group, trajectories=tuple(kept)), masked={}, dropped=stale)


def with_stale_tokens_masked(group: Group, floor: Version) -> TrimmedGroup:
    """Applies `mask`. An over-age token stays as context without a gradient. A row without any
    trainable token left is dropped.
    """
    kept: list[Trajectory] = []
    num_masked = Counter[RolloutKey]()
    num_dropped = Counter[RolloutKey]()
    for trajectory in group.trajectories:
        rows: list[Row] = []
        for row in trajectory.rows:
            masked = _mask_stale(row, floor)
            left = masked.num_trainable
            if left:
                rows.append(masked)
                num_masked[trajectory.key] += row.num_trainable - left
            else:
                num_dropped[trajectory.key] += row.num_trainable
        kept.append(replace(trajectory, rows=tuple(rows)))
    return TrimmedGroup(replace(group, trajectories=tuple(kept)), num_masked, num_dropped)


def _is_stale(trajectory: Trajectory, floor: Version) -> bool:
    oldest = trajectory.oldest_version
    return oldest is not None and oldest < floor


def _mask_stale(row: Row, floor: Version) -> Row:
    return replace(row, loss_mask=row.loss_mask & (row.versions >= floor))


@dataclass(slots=True)
class WaitingGroup:
    """A group that waits. `trimmed` is the part that the stale policy leaves at `floor`, the oldest
    version that may be trained.

    The versions of `group` are renumbered, so that ages are steps; `recorded` has those that the
    engines attested.
    """

    recorded: Group
    group: Group
    oldest: Version
    order: int
    num_tokens: int
    floor: Version
    trimmed: TrimmedGroup

    @classmethod
    def of(cls, recorded: Group, order: int, lineage: Lineage) -> WaitingGroup:
        group = lineage.group(recorded)
        oldest = group.oldest_version
        assert oldest is not None, f"{group.key} waits without a token to train on"
        return cls(
            recorded=recorded,
            group=group,
            oldest=oldest,
            order=order,
            num_tokens=group.num_trainable,
            floor=oldest,
            trimmed=TrimmedGroup(group, {}, {}),
        )

    def at(self, floor: Version, policy: StalePolicy) -> TrimmedGroup:
        """Returns the part of the group that the policy leaves at this floor. The last result is
        kept.
        """
        if self.oldest >= floor:
            return TrimmedGroup(self.group, {}, {})
        if self.floor != floor:
            self.trimmed = trim(policy, self.group, floor)
            self.floor = floor
        return self.trimmed


@dataclass(frozen=True, slots=True)
class Share:
    """The tokens of a group in a step: those trained, and those that the stale policy took out."""

    num_trained: int
    num_masked: int
    num_dropped: int


@dataclass(slots=True)
class OpenLease:
    batch: Batch
    finished: dict[GroupKey, WaitingGroup]
    shares: dict[GroupKey, Share]


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group that the step which made `version` trained on, and that no checkpoint has yet."""

    version: Version
    order: int
    share: Share


@dataclass(slots=True)
class Tokens:
    """Tokens of rollouts that have ended, by fate (I3)."""

    received: int = 0
    trained: int = 0
    masked: Counter[Reason] = field(default_factory=Counter[Reason])
    dropped: Counter[Reason] = field(default_factory=Counter[Reason])

    def mask(self, reason: Reason, number: int) -> None:
        _count(self.masked, reason, number)

    def drop(self, reason: Reason, number: int) -> None:
        _count(self.dropped, reason, number)


def _count(counter: Counter[Reason], reason: Reason, number: int) -> None:
    """A reason without a token is not in the counter."""
    counter[reason] += number
    if not counter[reason]:
        del counter[reason]
