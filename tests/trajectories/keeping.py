"""A store with facts that are made by hand: what a run records of a group, in few words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from midflight.trajectories.store import Store
from midflight.types import Batch, Fate, Group, GroupKey, Reason, RolloutKey, Trajectory, Turn, Version
from midflight.types.facts import (
    Admitted,
    Checkpointed,
    GroupClosed,
    GroupFinished,
    Interrupted,
    Leased,
    Stepped,
    TrajectoryKept,
    TurnKept,
    WentBack,
)

from .making import group, key, task


class Keeper(Store):
    def __init__(self, path: Path, *, run: str = "tests") -> None:
        super().__init__(path, run=run)
        self._order = self._db.number("finished") or 0

    def admit(self, admitted: GroupKey) -> None:
        self.apply(Admitted(admitted, task(admitted.index)))

    def keep_turn(self, rollout: RolloutKey, number: int, made: Turn) -> None:
        self.apply(TurnKept(rollout, number, made))

    def keep(
        self, trajectory: Trajectory, *, masked: Mapping[Reason, int] | None = None, dropped: Mapping[Reason, int] | None = None
    ) -> None:
        self.apply(TrajectoryKept(trajectory, masked or {}, dropped or {}))

    def finish_group(self, made: Group) -> None:
        self._order += 1
        self.apply(GroupFinished(made, self._order))

    def finish(self, index: int, *, version: Version = 0) -> Group:
        """A whole group, from its admission to its waiting."""
        made = group(key(index), version=version)
        self.admit(made.key)
        for each in made.trajectories:
            self.keep(each)
        self.finish_group(made)
        return made

    def close_group(self, closed: GroupKey, reason: Reason, *, successor: GroupKey | None = None) -> None:
        self.apply(GroupClosed(closed, reason, num_tokens=4, successor=successor))

    def lease(self, batch: Batch, *, masked: Mapping[RolloutKey, int] | None = None) -> None:
        self.apply(Leased(batch, {}, masked or {}, {}))

    def done(self, lease: int) -> None:
        self.apply(Stepped(lease, 0, started=0.0, ended=1.0, num_tokens=0, metrics={}))

    def checkpoint(self, version: Version) -> None:
        self.apply(Checkpointed(version))

    def go_back(self, checkpoint: Version) -> list[GroupKey]:
        """After the death of the ring, whose trainer goes on from that checkpoint: the groups that wait, in the order of finishing."""
        self.apply(Interrupted())
        self.apply(WentBack(checkpoint, checkpoint, self.groups_after(checkpoint)))
        return [made.key for made in self.waiting]

    @property
    def waiting(self) -> list[Group]:
        """Leased ones too."""
        return [fact.group for fact in self.facts() if isinstance(fact, GroupFinished)]

    @property
    def fates(self) -> Mapping[tuple[Fate, Reason | None], int]:
        return self._fates("1")
