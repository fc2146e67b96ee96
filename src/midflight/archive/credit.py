"""The advantages that a step trained with, worked out again: rewards are stored, and the trainer's
own functions make advantages of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from midflight.archive.stored import StoreReading, group_key
from midflight.config import Config
from midflight.errors import MidflightError
from midflight.trajectories.database import decode_scored
from midflight.trajectories.packing import pack
from midflight.types import Batch, Group, GroupKey, RolloutKey, Trajectory, Version


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """Of each rollout its advantage by answer, those from the last column on in the last one."""

    note: str
    """What of it is not as it was trained, or why there is none."""
    answers: dict[tuple[RolloutKey, str], NDArray[np.float64]] = field(
        default_factory=dict[tuple[RolloutKey, str], NDArray[np.float64]]
    )
    """By rollout and role."""


def credit_of(
    store: StoreReading, key: GroupKey, version: Version | None, config: Config
) -> Credit:
    """Of the rollouts of a group, in the step that made `version`; without one as if the group were
    a batch of its own.
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
        # imports torch, which no other page needs
        from midflight.trainer.credit import answer_advantages, scoring_of

        found = answer_advantages(pack(Batch(0, 0, tuple(groups))), scoring_of(config))
    except MidflightError as error:
        return Credit(f"no advantages: {error}")
    rollouts = [
        (each.key, role)
        for group in groups
        for role, of in group.by_role().items()
        for each in of.trajectories
    ]
    notes = ["worked out from the rewards, by the trainer's own functions"]
    if version is None:
        notes = ["as they would be if the group were trained by itself"]
    if config.distillation.teacher is not None:
        notes.append("without the teacher's part, which is not kept")
    return Credit("; ".join(notes), dict(zip(rollouts, found, strict=True)))


def _of_step(store: StoreReading, version: Version) -> Sequence[Group]:
    """In the order of the batch."""
    keys = store.ask(
        "SELECT epoch, position, attempt FROM groups WHERE version = ? OR lease IN (SELECT lease "
        "FROM leases WHERE train_version = ?) ORDER BY epoch, position, attempt",
        *(version, version - 1),
    )
    return [_group(store, group_key(key)) for key in keys]


def _group(store: StoreReading, key: GroupKey) -> Group:
    """Without tokens: rewards are all that advantages are made of."""
    (blob,) = store.ask(
        "SELECT task FROM groups WHERE (epoch, position, attempt) = (?, ?, ?)",
        key.epoch,
        key.index,
        key.attempt,
    )[0]
    task = store.task(blob)
    made = list[Trajectory]()
    for sample, reward, room, truncated, scored in store.ask(
        (
            "SELECT sample, reward, room, truncated, scored FROM rollouts WHERE (epoch, position, "
            "attempt) = (?, ?, ?)"
        ),
        *(key.epoch, key.index, key.attempt),
    ):
        of = store.decoded(decode_scored, scored)
        made.append(
            Trajectory(
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
        )
    return Group.of(key, task, made)
