"""`midflight replay RUN --decisions`: the events of a run in the order in which they happened, applied
to the same books; where these would decide otherwise today.

What is decided again: whether a group may start, whether it may wait for a step, which groups a step
gets, and which are closed because no step may train on them any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from midflight.archive.prove.record import Link, opened
from midflight.archive.store_reader import StoreFiles, stores_of
from midflight.buffer.books import Books
from midflight.buffer.groups import Limits, Wait
from midflight.config.load import past_config
from midflight.errors import NoRun
from midflight.run.rollout.system import buffer_limits
from midflight.trajectories.database import decode_admission
from midflight.trajectories.store import Store
from midflight.types import Batch, Group, GroupKey, Reason
from midflight.types.facts import (
    Admitted,
    GroupFinished,
    Interrupted,
    Leased,
    TakenBack,
    TrajectoryKept,
    WentBack,
)

AGED = (Reason.STALE, Reason.REQUEUED)
"""The reasons for which a group that waits is closed because of its age."""
OF_SCORES = (Reason.NO_REWARD, Reason.TOO_FEW, Reason.ZERO_SPREAD)
"""The reasons for which a group is closed when its rollouts have ended."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision that differs."""

    event: int
    """The number of the link in the store's chain."""
    what: str


@dataclass(slots=True)
class Decisions:
    """The decisions of a run, made again."""

    num_admissions: int = 0
    num_groups: int = 0
    num_leases: int = 0
    num_unrecorded: int = 0
    """Groups of an older Midflight, which did not record by what they were admitted."""
    different: tuple[Decision, ...] = ()


def decide_again(folder: Path) -> Decisions:
    """Applies the events of every store of a run to new books. Raises `NoRun` if the run has no
    record of them.
    """
    config = past_config(folder / "config.toml")
    stores = stores_of(folder)
    if not stores:
        raise NoRun(f"{folder} has no store: give the folder of a run that has begun to train.")
    found = Decisions()
    for each in stores:
        limits = buffer_limits(config.rollout, shards=len(stores))
        again = _DecidesAgain(each, limits, found)
        try:
            found.different += tuple(again.run())
        finally:
            again.close()
    return found


class _DecidesAgain:
    """One store's events, applied to books of their own."""

    def __init__(self, files: StoreFiles, limits: Limits, found: Decisions) -> None:
        self._files = files
        self._limits = limits
        self._found = found
        self._books = Books(limits, start_version=0)
        self._store = Store(files.path, run=None, segments=files.segments)
        self._waiting: dict[GroupKey, Group] = {}
        self._leases: dict[int, tuple[Group, ...]] = {}

    def close(self) -> None:
        self._store.close()

    def run(self) -> Iterator[Decision]:
        """Yields the decisions that differ."""
        with opened(*self._files) as record:
            if not record.has_chain:
                raise NoRun(
                    f"{self._files.path} has no record of its events: an older Midflight made the run."
                )
            for link in record.links():
                yield from self._event(link)

    def _event(self, link: Link) -> Iterator[Decision]:
        match link.event:
            case "rollout":
                return
            case "older":
                raise NoRun(
                    f"{self._files.path} was begun by an older Midflight, which did not record its "
                    "events, so that its decisions cannot be made again."
                )
            case "admitted":
                yield from self._admitted(link)
            case "waiting":
                yield from self._finished(link)
            case "interrupted":
                self._books.apply(Interrupted())
            case "leased":
                yield from self._leased(link)
            case "taken_back":
                self._give_back(link)
            case "went_back":
                self._went_back(link)
            case reason:
                yield from self._closed(link, Reason(reason))

    def _admitted(self, link: Link) -> Iterator[Decision]:
        self._found.num_admissions += 1
        key = GroupKey(*link.key)
        wait = self._books.admission(decode_admission(link.detail or b""))
        if wait is not None:
            yield Decision(link.number, f"group {key} was started, and would wait: {wait.detail}")
        self._books.apply(Admitted(key, self._store.task(key)))

    def _finished(self, link: Link) -> Iterator[Decision]:
        self._found.num_groups += 1
        group = self._store.group(GroupKey(*link.key))
        reason = self._books.unfit(group)
        if reason is not None:
            yield Decision(link.number, f"group {group.key} waited, and would be dropped: {reason}")
        if group.key not in self._books.running:
            self._found.num_unrecorded += 1
            self._books.apply(Admitted(group.key, self._store.task(group.key)))
        for trajectory in group.trajectories:
            self._books.apply(TrajectoryKept(trajectory, {}, {}))
        self._books.apply(GroupFinished(group, self._books.next_order))
        self._waiting[group.key] = group

    def _closed(self, link: Link, reason: Reason) -> Iterator[Decision]:
        self._found.num_groups += 1
        key = GroupKey(*link.key)
        if reason in OF_SCORES:
            expected = self._books.unfit(self._store.group(key))
            if expected is not reason:
                now = f"dropped: {expected}" if expected else "kept for a step"
                yield Decision(
                    link.number, f"group {key} was dropped ({reason}), and would be {now}"
                )
        if key in self._waiting:
            if reason in AGED:
                yield from self._aged(link, key, reason)
            del self._waiting[key]
        elif reason is not Reason.SKIPPED and key not in self._books.running:
            self._found.num_unrecorded += reason in OF_SCORES
            return  # it ran, by no record, or was in line
        self._books.apply(self._books.closing(key, reason))

    def _aged(self, link: Link, key: GroupKey, reason: Reason) -> Iterator[Decision]:
        overdue = {
            closed.key: closed.reason for closed in self._books.overdue(self._books.next_version)
        }
        if overdue.get(key) is not reason:
            now = f"closed: {overdue[key]}" if key in overdue else "kept"
            yield Decision(link.number, f"group {key} was closed ({reason}), and would be {now}")

    def _leased(self, link: Link) -> Iterator[Decision]:
        self._found.num_leases += 1
        lease, train_version, _ = link.key
        keys = _keys(link)
        for closed in self._books.overdue(train_version):
            yield Decision(
                link.number,
                f"group {closed.key} would be closed ({closed.reason}) before this lease",
            )
        chosen = self._books.choose(train_version, lambda key: None)
        if isinstance(chosen, Wait):
            yield Decision(
                link.number, f"the step at version {train_version} would wait: {chosen.detail}"
            )
        else:
            now = {group.key for group in chosen.batch.groups}
            if now != set(keys):
                yield Decision(
                    link.number,
                    f"the step at version {train_version} was given {_names(set(keys) - now)}, and "
                    f"would be given {_names(now - set(keys))} in their place",
                )
        groups = tuple(self._waiting.pop(key) for key in keys)
        self._books.apply(Leased(Batch(lease, train_version, groups), {}, {}, {}))
        self._leases[lease] = groups

    def _give_back(self, link: Link) -> None:
        lease, _, _ = link.key
        self._books.apply(TakenBack(lease))
        for group in self._leases.pop(lease):
            self._waiting[group.key] = group

    def _went_back(self, link: Link) -> None:
        """Steps that are in the checkpoint stand; the groups of all others wait again."""
        checkpoint, version, _ = link.key
        self._books.apply(WentBack(checkpoint, version, ()))
        waiting_again = set(self._books.waiting)
        for lease, groups in list(self._leases.items()):
            if any(group.key in waiting_again for group in groups):
                for group in self._leases.pop(lease):
                    self._waiting[group.key] = group


def _keys(link: Link) -> list[GroupKey]:
    return [GroupKey(*key) for key in msgspec.msgpack.decode(link.detail or b"\x90")]


def _names(keys: set[GroupKey]) -> str:
    return ", ".join(map(str, sorted(keys))) or "no group"
