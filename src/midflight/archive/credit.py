"""Computes again the advantages with which a step trained: the store has the rewards, and the
trainer's own functions compute advantages from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from midflight.archive.store_reader import StoreReader, group_key
from midflight.config import Config
from midflight.errors import MidflightError
from midflight.trajectories.database import decode_scored
from midflight.trajectories.packing import pack
from midflight.types import Batch, Group, GroupKey, RolloutKey, Trajectory, Version


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """The advantages of each rollout by answer. The last column is for all further answers, too."""

    note: str
    """The difference between these and the trained values, or the reason why there are none."""
    answers: dict[tuple[RolloutKey, str], NDArray[np.float64]] = field(
        default_factory=dict[tuple[RolloutKey, str], NDArray[np.float64]]
    )
    """Advantages by rollout and role."""


def credit_of(store: StoreReader, key: GroupKey, version: Version | None, config: Config) -> Credit:
    """The advantages of a group's rollouts in the step that made `version`. Without a version they
    are computed as if the group were a batch of its own.
    """
    if config.objective.advantage == "gae":
        return Credit(
            "advantages of single tokens come from the critic's values, which are not kept"
        )
    if not config.distillation.rewards and config.distillation.teacher is not None:
        return Credit(
            "the teacher's log-probabilities are what is learned from, and they are not kept"
        )
    groups = _of_step(store, version) if version is not None else [_group(store, key)]
    try:
        # This imports torch, which no other page needs.
        from midflight.trainer.credit import answer_advantages, scoring_of

        found = answer_advantages(pack(Batch(0, 0, tuple(groups))), scoring_of(config))
    except MidflightError as error:
        return Credit(f"no advantages: {error}")
    rollouts: list[tuple[RolloutKey, str]] = []
    for group in groups:
        for role, of in group.by_role().items():
            rollouts += [(trajectory.key, role) for trajectory in of.trajectories]
    if version is None:
        notes = ["as they would be if the group were trained by itself"]
    else:
        notes = ["worked out from the rewards, by the trainer's own functions"]
    if config.distillation.teacher is not None:
        notes.append("without the teacher's part, which is not kept")
    return Credit("; ".join(notes), dict(zip(rollouts, found, strict=True)))


def _of_step(store: StoreReader, version: Version) -> Sequence[Group]:
    """The groups of a step, in the order of the batch."""
    keys = store.ask(
        "SELECT epoch, position, attempt FROM groups WHERE version = ? OR lease IN (SELECT lease "
        "FROM leases WHERE train_version = ?) ORDER BY epoch, position, attempt",
        version,
        version - 1,
    )
    return [_group(store, group_key(key)) for key in keys]


def _group(store: StoreReader, key: GroupKey) -> Group:
    """A group without its tokens: advantages are computed from rewards alone."""
    columns = (key.epoch, key.index, key.attempt)
    (blob,) = store.ask(
        "SELECT task FROM groups WHERE (epoch, position, attempt) = (?, ?, ?)", *columns
    )[0]
    task = store.task(blob)
    made = list[Trajectory]()
    for sample, reward, room, truncated, scored in store.ask(
        "SELECT sample, reward, room, truncated, scored FROM rollouts WHERE (epoch, position, "
        "attempt) = (?, ?, ?)",
        *columns,
    ):
        of = store.decoded(decode_scored, scored)
        trajectory = Trajectory(
            RolloutKey(key, sample),
            task.id,
            task.source,
            reward,
            rows=(),
            truncated=bool(truncated),
            room=room,
            components=of.components,
            turn_rewards=of.turn_rewards,
            roles=of.roles,
        )
        made.append(trajectory)
    return Group.of(key, task, made)
