"""The state of station 5: what runs, what waits, what is leased, and what the next step may train on. Never waits itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count

from midflight.buffer import policies
from midflight.buffer.ledger import Ledger
from midflight.buffer.limits import Limits
from midflight.buffer.staleness import credit, overfull, surplus
from midflight.errors import OutOfTurn, UnknownLease
from midflight.types import Batch, Group, GroupKey, Reason, StalePolicy, Version


@dataclass(frozen=True, slots=True)
class Wait:
    """Not yet. `for_whom` is one of generation, stragglers, trainer, handover, slots; `detail` is a sentence for people."""

    for_whom: str
    detail: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A group attempt that ended untrained. With a `successor`, the task is at the front of the line under that key."""

    key: GroupKey
    reason: Reason
    num_tokens: int
    successor: GroupKey | None = None


@dataclass(slots=True)
class _Finished:
    group: Group
    oldest: Version
    order: int
    """Of finishing; kept when a lease comes back."""


class GroupBuffer:
    """Finished groups, oldest version first; `GroupQueue` does the waiting.

    `closed` is called for every group that ends untrained, after the deed; it must not call back.
    """

    def __init__(self, limits: Limits, *, start_version: Version = 0, first_lease: int = 1, closed: Callable[[Closed], None]) -> None:
        self._limits = limits
        self._closed = closed
        self.ledger = Ledger()
        self._served = start_version
        self._next = start_version  # of the next step that has no batch
        self._made = start_version  # the newest version the trainer is known to have made
        self._finished: dict[GroupKey, _Finished] = {}
        self._front: deque[GroupKey] = deque()  # attempts to start before any new task is drawn
        self._leases: dict[int, tuple[Batch, tuple[_Finished, ...]]] = {}
        self._lease_ids = count(first_lease)
        self._orders = count()

    # --- Admission ---

    def serve(self, version: Version) -> None:
        """v_served, the oldest version a routable engine serves. It never falls: an engine rejoins at the current version."""
        self._served = version
        self._made = max(self._made, version)

    def admit(self, draw: Callable[[], GroupKey]) -> GroupKey | Wait:
        """Starts a group: a requeued or unfinished one first, else the one that `draw` takes from the task stream.

        `draw` is called only when there is credit (S7).
        """
        if (wait := self._admission()) is not None:
            return wait
        key = self._front.popleft() if self._front else draw()
        self.ledger.admit(key, self._limits.group_size)
        return key

    def _admission(self) -> Wait | None:
        limits, ledger = self._limits, self.ledger
        open_groups = ledger.num_running + ledger.num_waiting
        free = credit(
            open_groups=open_groups,
            next_version=self._next,
            served_version=self._served,
            max_staleness=limits.max_staleness,
            groups_per_step=limits.groups_per_step,
        )
        if free <= 0:
            whom = "handover" if self._served < self._made else "trainer"
            return Wait(
                whom, f"{open_groups} groups are open for step {self._next}, all that max_staleness allows at version {self._served}"
            )
        if ledger.num_waiting >= limits.buffer_groups:
            return Wait("trainer", f"{ledger.num_waiting} finished groups wait, buffer_groups is {limits.buffer_groups}")
        if ledger.num_running_rollouts + limits.group_size > limits.max_in_flight:
            return Wait("slots", f"{ledger.num_running_rollouts} rollouts run, max_in_flight is {limits.max_in_flight}")
        return None

    def end_rollout(self, key: GroupKey) -> None:
        """A rollout of a running group has ended and frees its slot."""
        self.ledger.end_rollout(key)

    # --- Groups that end ---

    def put(self, group: Group, *, masked: Mapping[Reason, int] | None = None, dropped: Mapping[Reason, int] | None = None) -> None:
        """A running group has finished: it waits for a step, or is dropped by a filter and gives its credit back (S7).

        Every trajectory has a reward. `masked` and `dropped` count the tokens of its rollouts whose fate is decided already.
        """
        self.ledger.finish(group.key, group.num_trainable, masked=masked or {}, dropped=dropped or {})
        oldest = group.oldest_version
        if oldest is None or len(group.trajectories) < self._limits.min_group_size:
            self._close(group.key, Reason.TOO_FEW)
        elif self._limits.drop_zero_spread and len({t.reward for t in group.trajectories}) == 1:
            self._close(group.key, Reason.ZERO_SPREAD)
        else:
            self._finished[group.key] = _Finished(group, oldest, next(self._orders))

    def drop(self, key: GroupKey, reason: Reason, *, num_tokens: int = 0) -> None:
        """A running group ended without a usable result; `num_tokens` were generated for it. Its credit comes back."""
        self._close(key, reason, num_tokens=num_tokens)

    def _close(self, key: GroupKey, reason: Reason, *, num_tokens: int = 0, successor: GroupKey | None = None) -> None:
        lost = self.ledger.drop(key, reason, num_tokens)
        self._finished.pop(key, None)
        if successor is not None:
            self._front.append(successor)
        self._closed(Closed(key, reason, lost, successor))

    def _requeue(self, key: GroupKey, *, at_most: int) -> None:
        """The attempt closes and its task goes to the front as the next attempt; after `at_most` attempts more it is dropped."""
        if key.attempt < at_most:
            self._close(key, Reason.REQUEUED, successor=replace(key, attempt=key.attempt + 1))
        else:
            self._close(key, Reason.STALE)

    # --- Batches ---

    def lease(self, train_version: Version, running_oldest: Mapping[GroupKey, Version | None]) -> Batch | Wait:
        """The batch of the step that begins at `train_version`: the B groups of oldest version, in the order of their keys.

        `running_oldest` gives the oldest version among the tokens of each running group, of its ended rollouts too, `None` before
        the first. Asked again for a version whose lease is open, it answers with the same batch.
        """
        if (batch := self.held(train_version)) is not None:
            return batch
        if train_version < self._next:
            raise OutOfTurn(f"A batch for version {train_version} was asked, but the next is {self._next}; ask for that one.")
        self._apply_policy(train_version)
        ordered = sorted(self._finished.values(), key=lambda f: (f.oldest, f.order))
        chosen, left = ordered[: self._limits.groups_per_step], ordered[self._limits.groups_per_step :]
        wait = self._wait(chosen, left, train_version, running_oldest)
        return wait or self._give(train_version, chosen)

    def held(self, train_version: Version) -> Batch | None:
        """The batch already leased for that version, if its lease is open."""
        return next((batch for batch, _ in self._leases.values() if batch.train_version == train_version), None)

    def _wait(
        self, chosen: list[_Finished], left: list[_Finished], train_version: Version, running_oldest: Mapping[GroupKey, Version | None]
    ) -> Wait | None:
        needed = self._limits.groups_per_step
        if len(chosen) < needed:
            return Wait("generation", f"step {train_version} has {len(chosen)} of {needed} groups; {self.ledger.num_running} are running")
        if self._limits.policy is not StalePolicy.WAIT:
            return None
        # A running group that is over age already can never be trained: to wait for it would gain nothing.
        floor = train_version - self._limits.max_staleness
        running = {key: oldest for key in self.ledger.running if (oldest := running_oldest.get(key)) is not None and oldest >= floor}
        behind = [*(f.oldest for f in left), *running.values()]
        bound = overfull(behind, train_version, max_staleness=self._limits.max_staleness, groups_per_step=needed)
        if bound is None:
            return None
        late = ", ".join(f"{k.epoch}-{k.index}-{k.attempt}" for k, oldest in running.items() if oldest <= bound)
        return Wait("stragglers", f"step {train_version} would leave too many groups behind at version {bound} or older; running: {late}")

    def _give(self, train_version: Version, chosen: list[_Finished]) -> Batch:
        chosen = sorted(chosen, key=lambda f: f.group.key)
        batch = Batch(next(self._lease_ids), train_version, tuple(f.group for f in chosen))
        floor = train_version - self._limits.max_staleness
        assert all((o := g.oldest_version) is not None and o >= floor for g in batch.groups), (
            f"I2: a token below version {floor} in a batch"
        )
        self.ledger.lease(batch.lease, [g.key for g in batch.groups])
        for group in batch.groups:
            del self._finished[group.key]
        self._leases[batch.lease] = batch, tuple(chosen)
        self._next = train_version + 1
        return batch

    def done(self, lease: int) -> None:
        """The step is made. Its groups are trained, and final with the checkpoint that contains it (`checkpointed`)."""
        batch, _ = self._lease(lease)
        self.ledger.train(lease, batch.train_version + 1)
        del self._leases[lease]
        self._made = max(self._made, batch.train_version + 1)

    def discard(self, lease: int, reason: Reason) -> None:
        """The step was skipped: its groups are dropped, and a batch for the same version may be taken again."""
        batch, _ = self._lease(lease)
        tokens = self.ledger.discard(lease, reason)
        del self._leases[lease]
        self._next = min(self._next, batch.train_version)
        for key, num_tokens in tokens.items():
            self._closed(Closed(key, reason, num_tokens))

    def take_back(self, lease: int) -> None:
        """The trainer died before the step was made: the groups wait again, in their old places."""
        batch, finished = self._lease(lease)
        self.ledger.take_back(lease)
        del self._leases[lease]
        self._finished.update({f.group.key: f for f in finished})
        self._next = min(self._next, batch.train_version)

    def _lease(self, lease: int) -> tuple[Batch, tuple[_Finished, ...]]:
        if lease not in self._leases:
            raise UnknownLease(f"Lease {lease} is not open (open: {sorted(self._leases)}); take a batch again.")
        return self._leases[lease]

    # --- Age ---

    def _apply_policy(self, train_version: Version) -> None:
        floor = train_version - self._limits.max_staleness
        stale = [f.group for f in self._finished.values() if f.oldest < floor]
        match self._limits.policy:
            case StalePolicy.WAIT:
                self._shed(train_version)
            case StalePolicy.REQUEUE:
                for group in stale:
                    self._requeue(group.key, at_most=self._limits.requeues)
            case StalePolicy.DROP | StalePolicy.MASK:
                for group in stale:
                    self._trim(group.key, policies.trim(self._limits.policy, group, floor))

    def _trim(self, key: GroupKey, trimmed: policies.Trimmed) -> None:
        oldest = trimmed.group.oldest_version
        if oldest is None:
            self._close(key, Reason.STALE)
            return
        self.ledger.trim(key, Reason.STALE, num_masked=trimmed.num_masked, num_dropped=trimmed.num_dropped)
        self._finished[key] = replace(self._finished[key], group=trimmed.group, oldest=oldest)

    def _shed(self, train_version: Version) -> None:
        """Under `wait`, closes what no batch can take in time; nothing, unless a crash or a late message broke the proof's assumptions.

        The tasks are tried again however often, as no prompt may be lost to a crash (I8): the crashes are bounded.
        """
        ordered = sorted(self._finished.values(), key=lambda f: (f.oldest, f.order))
        excess = surplus(
            [f.oldest for f in ordered],
            train_version,
            max_staleness=self._limits.max_staleness,
            groups_per_step=self._limits.groups_per_step,
        )
        for finished in ordered[:excess]:
            key = finished.group.key
            self._close(key, Reason.REQUEUED, successor=replace(key, attempt=key.attempt + 1))

    # --- Checkpoints and crashes ---

    def checkpointed(self, version: Version) -> None:
        """A checkpoint of `version` exists: what was trained up to it stays trained."""
        self.ledger.settle(version)

    def restore(self, *, waiting: Iterable[Group] = (), leases: Iterable[Batch] = (), unfinished: Iterable[GroupKey] = ()) -> None:
        """Fills a fresh buffer from the store: groups in the order they finished, open leases of a living trainer, keys to start again."""
        for group in waiting:
            self.ledger.restore(group.key, group.num_trainable)
            self._enter(group)
        for batch in map(self._as_given, leases):
            self.ledger.restore_lease(batch.lease, {g.key: g.num_trainable for g in batch.groups})
            self._leases[batch.lease] = batch, tuple(self._entry(g) for g in batch.groups)
            self._next = max(self._next, batch.train_version + 1)
        self._front.extend(unfinished)

    def _as_given(self, batch: Batch) -> Batch:
        """The store keeps groups as they finished; the policy trims them for this step as it did before."""
        floor = batch.train_version - self._limits.max_staleness
        return replace(batch, groups=tuple(policies.trim(self._limits.policy, group, floor).group for group in batch.groups))

    def restart(self, version: Version, *, untrained: Iterable[Group] = ()) -> None:
        """A new trainer begins at `version`. Open leases come back, and `untrained`: groups whose step is in no checkpoint."""
        for lease in list(self._leases):
            self.take_back(lease)
        for group in untrained:
            self.ledger.untrain(group.key, group.num_trainable)
            self._enter(group)
        self._next = self._made = version

    def _enter(self, group: Group) -> None:
        self._finished[group.key] = self._entry(group)

    def _entry(self, group: Group) -> _Finished:
        oldest = group.oldest_version
        assert oldest is not None, f"{group.key} waits without a token to train on"
        return _Finished(group, oldest, next(self._orders))
