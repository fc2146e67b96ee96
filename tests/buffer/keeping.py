"""Books with facts that are made by hand: what a run records of a group, in few words."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from midflight.buffer.books import Books, Wait
from midflight.buffer.groups import Limits
from midflight.types import Batch, Group, GroupKey, Reason, Task, Version
from midflight.types.facts import (
    Admitted,
    Fact,
    GroupClosed,
    GroupFinished,
    Leased,
    SlotFreed,
    Stepped,
    TakenBack,
    TrajectoryKept,
    VersionServed,
)

from .making import group, key


class Keeper:
    """Does what `GroupQueue` and `RolloutStream` do, without waiting. Tasks are drawn from 0 upwards."""

    def __init__(self, rules: Limits, start_version: Version = 0, *, also: Callable[[Fact], None] | None = None) -> None:
        """`also` applies every fact after the books."""
        self.books = Books(rules, start_version=start_version)
        self.closed: list[GroupClosed] = []
        self.drawn = 0
        self._also = also

    def record(self, fact: Fact) -> None:
        self.books.apply(fact)
        if isinstance(fact, GroupClosed):
            self.closed.append(fact)
        if self._also is not None:
            self._also(fact)

    def admit(self) -> GroupKey | Wait:
        if (wait := self.books.admission()) is not None:
            return wait
        started = self.books.in_line
        if started is None:
            started, self.drawn = key(self.drawn), self.drawn + 1
        self.record(Admitted(started, Task(f"task-{started.index}", "letters")))
        return started

    def admit_all(self) -> list[GroupKey]:
        admitted: list[GroupKey] = []
        while not isinstance(started := self.admit(), Wait):
            admitted.append(started)
        return admitted

    def waiting(self, *groups: Group) -> None:
        """Groups that finished before, whatever the credit."""
        for made in groups:
            self.record(Admitted(made.key, Task(made.task_id, made.source)))
            self.put(made)

    def keep(self, made: Group, *, masked: Mapping[Reason, int] | None = None, dropped: Mapping[Reason, int] | None = None) -> None:
        """The rollouts of a group; the counts are of the first."""
        for number, trajectory in enumerate(made.trajectories):
            self.record(TrajectoryKept(trajectory, (masked or {}) if number == 0 else {}, (dropped or {}) if number == 0 else {}))

    def put(self, made: Group, *, dropped: Mapping[Reason, int] | None = None) -> None:
        """The group's rollouts end, and it waits, or is closed as unfit."""
        self.keep(made, dropped=dropped)
        reason = self.books.unfit(made)
        self.record(GroupFinished(made, self.books.next_order) if reason is None else self.books.closing(made.key, reason))

    def lose(self, lost: GroupKey, *rollouts: tuple[int, ...], reason: Reason = Reason.NO_REWARD) -> None:
        """A running group ends without a usable result."""
        self.keep(group(lost, *rollouts))
        self.record(self.books.closing(lost, reason))

    def free(self, running: GroupKey) -> None:
        self.record(SlotFreed(running))

    def serve(self, version: Version) -> None:
        self.record(VersionServed(version))

    def take(self, train_version: Version, running: Mapping[GroupKey, Version | None] | None = None) -> Batch | Wait:
        if (held := self.books.held(train_version)) is not None:
            return held
        for closed in self.books.overdue(train_version):
            self.record(closed)
        found = self.books.choose(train_version, (running or {}).get)
        if isinstance(found, Leased):
            self.leased = found
            self.record(found)
            return found.batch
        return found

    def batch(self, train_version: Version, running: Mapping[GroupKey, Version | None] | None = None) -> Batch:
        batch = self.take(train_version, running)
        assert isinstance(batch, Batch), batch
        return batch

    def done(self, lease: int, version: Version = 0) -> None:
        self.record(Stepped(lease, version, started=0.0, ended=1.0, num_tokens=0, metrics={}))

    def skip(self, lease: int, version: Version = 0) -> None:
        for closed in self.books.skipping(lease):
            self.record(closed)
        self.record(Stepped(lease, version, started=0.0, ended=1.0, num_tokens=0, metrics={}, skipped=True))

    def take_back(self, lease: int) -> None:
        self.record(TakenBack(lease))
