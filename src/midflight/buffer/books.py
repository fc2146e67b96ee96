"""The place of every group and every token, and the choice of the groups for the next step. Facts
change the books, and nothing else does.

I1: submitted = running + waiting + leased + trained + dropped(by reason), after every fact.
I3: received = waiting + trained + masked(by reason) + dropped(by reason), for the tokens of
rollouts that have ended. Tokens of running rollouts are in flight and known to the gateway; leased
ones wait until their step is done.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from midflight.buffer.groups import (
    Limits,
    OpenLease,
    Share,
    Tokens,
    TrainedGroup,
    TrimmedGroup,
    Wait,
    WaitingGroup,
)
from midflight.buffer.staleness import Lineage, ages, credit, overfull, surplus
from midflight.errors import OutOfTurn, UnknownLease
from midflight.types import (
    Batch,
    Fate,
    Group,
    GroupKey,
    Reason,
    RolloutKey,
    StalePolicy,
    Version,
    facts,
)

FOR_TASKS = "tasks"
"""The name of the wait for posted tasks, in a run whose tasks are all posted. The client that posts
them may take as long as it likes.
"""

MAX_REQUEUES = 1
"""How often a task is tried again under the `requeue` policy, before it is dropped."""


class Books:
    """The accounts of all groups, and the decisions on them: which group may start, is overdue, or
    goes into the next batch.

    The methods that decide return the facts that may be recorded next, and change nothing; only
    `apply` changes the books. They equal those that the store would give back after a crash.
    Synchronous: `GroupQueue` does the waiting.
    """

    def __init__(self, limits: Limits, *, start_version: Version = 0) -> None:
        self._limits = limits
        self.submitted = 0
        self.trained = 0
        self.dropped = Counter[Reason]()
        self.tokens = Tokens()
        self._line: set[GroupKey] = set()
        """Groups that start before any new task is drawn."""
        self._running: dict[GroupKey, int] = {}
        """The slots that each running group holds."""
        self._kept: dict[GroupKey, int] = {}
        """Trainable tokens of ended rollouts whose group has not ended."""
        self._bytes: dict[GroupKey, int] = {}
        """Bytes of ended rollouts whose group is neither trained nor dropped."""
        self._waiting: dict[GroupKey, WaitingGroup] = {}
        self._leases: dict[int, OpenLease] = {}
        self._learnt: dict[GroupKey, TrainedGroup] = {}
        self._served = start_version
        self._next = start_version
        """The version of the next step that has no batch."""
        self._made = start_version
        """The newest version that the trainer is known to have made."""
        self._highest = start_version
        """The highest version that any lease was meant to make."""
        self._num_leases = 0
        self._num_finished = 0
        self._lineage = Lineage()

    # --- What is where ---

    @property
    def running(self) -> tuple[GroupKey, ...]:
        """In the order of admission."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[GroupKey, ...]:
        """In the order of finishing."""
        return tuple(self._waiting)

    @property
    def next_version(self) -> Version:
        """The version of the next step that has no batch."""
        return self._next

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_running_rollouts(self) -> int:
        return sum(self._running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def leases(self) -> tuple[int, ...]:
        """Leases whose steps have not been reported."""
        return tuple(self._leases)

    @property
    def num_leased(self) -> int:
        return sum(len(lease.shares) for lease in self._leases.values())

    @property
    def tokens_waiting(self) -> int:
        """Trainable tokens of ended rollouts whose group runs, waits or is leased."""
        total = sum(self._kept.values())
        total += sum(finished.num_tokens for finished in self._waiting.values())
        for lease in self._leases.values():
            total += sum(share.num_trained for share in lease.shares.values())
        return total

    @property
    def num_bytes(self) -> int:
        """The size of the rows of ended rollouts in memory. Their group runs, waits or
        is leased.
        """
        return sum(self._bytes.values())

    @property
    def next_order(self) -> int:
        """The order of the next group that finishes."""
        return self._num_finished + 1

    @property
    def in_line(self) -> GroupKey | None:
        """The earliest task that must start before any new one is drawn."""
        return min(self._line, default=None)

    # --- Deciding ---

    def admission_state(self) -> facts.AdmissionState:
        """The numbers by which a group may start now."""
        return facts.AdmissionState(
            self._served, self.num_running_rollouts, self.num_bytes, self._limits.buffer_bytes
        )

    def admission(self, by: facts.AdmissionState | None = None) -> Wait | None:
        """`None` if a group may start: by recorded numbers, or by those of now."""
        limits = self._limits
        if by is None:
            by = self.admission_state()
        open_groups = self.num_running + self.num_waiting
        free = credit(
            open_groups=open_groups,
            next_version=self._next,
            served_version=by.served_version,
            max_staleness=limits.max_staleness,
            groups_per_step=limits.groups_per_step,
        )
        if free <= 0:
            whom = "handover" if by.served_version < self._made else "trainer"
            detail = (
                f"{open_groups} groups are open for step {self._next}, all that max_staleness "
                f"allows at version {by.served_version}"
            )
            return Wait(whom, detail)
        if self.num_waiting >= limits.buffer_groups:
            return Wait(
                "trainer",
                f"{self.num_waiting} finished groups wait, buffer_groups is {limits.buffer_groups}",
            )
        # With less than a batch open it would wait for a step that cannot come.
        if by.num_bytes >= by.max_bytes and open_groups >= limits.groups_per_step:
            detail = f"finished rollouts hold {by.num_bytes} bytes of {by.max_bytes} that they may"
            return Wait("trainer", detail)
        running = by.num_rollouts
        if running + limits.group_size > limits.max_in_flight:
            return Wait("slots", f"{running} rollouts run, max_in_flight is {limits.max_in_flight}")
        return None

    def unfit(self, group: Group) -> Reason | None:
        """Returns why a group whose rollouts have ended cannot wait for a step, or `None` if it
        can. A failed rollout is not among its scores (I10).
        """
        if not group.trajectories:
            return Reason.NO_REWARD
        if len(group.trajectories) < self._limits.min_group_size or group.oldest_version is None:
            return Reason.TOO_FEW
        if self._limits.drop_zero_spread and not _has_spread(group):
            return Reason.ZERO_SPREAD
        return None

    def closing(self, key: GroupKey, reason: Reason, *, again: bool = False) -> facts.GroupClosed:
        """The fact that ends a group now; `again` puts its task in line as the next attempt."""
        successor = GroupKey(key.epoch, key.index, key.attempt + 1) if again else None
        return facts.GroupClosed(key, reason, self._num_tokens(key), successor)

    def skipping(self, lease: int) -> list[facts.GroupClosed]:
        """The facts that end the groups of a lease whose step the trainer skipped. Raises
        `UnknownLease` if the lease is not open.
        """
        return [self.closing(key, Reason.SKIPPED) for key in self._open(lease).shares]

    def held(self, train_version: Version) -> Batch | None:
        """The batch already leased for that version, if its lease is open."""
        for lease in self._leases.values():
            if lease.batch.train_version == train_version:
                return lease.batch
        return None

    def overdue(self, train_version: Version) -> list[facts.GroupClosed]:
        """The facts that end the groups that no step from this version on may train on, by the
        stale policy. Raises `OutOfTurn` for a version that is past.

        Under `wait` there is none, unless a crash or a late message broke the proof's assumptions.
        The tasks of such groups are tried again any number of times, because no prompt may be lost
        to a crash (I8). It ends because the crashes are bounded.
        """
        if train_version < self._next:
            raise OutOfTurn(
                f"A batch for version {train_version} was asked, but the next is {self._next}; ask "
                "for that one."
            )
        limits = self._limits
        if limits.policy is StalePolicy.WAIT:
            shed = surplus(
                [(f.oldest, f.order) for f in self._waiting.values()],
                train_version,
                max_staleness=limits.max_staleness,
                groups_per_step=limits.groups_per_step,
            )
            return [
                self.closing(key, Reason.REQUEUED, again=True)
                for key, finished in self._waiting.items()
                if finished.order in shed
            ]
        floor = train_version - limits.max_staleness
        closed: list[facts.GroupClosed] = []
        for key, finished in self._waiting.items():
            if finished.oldest >= floor:
                continue
            if limits.policy is StalePolicy.REQUEUE:
                again = key.attempt < MAX_REQUEUES
                reason = Reason.REQUEUED if again else Reason.STALE
                closed.append(self.closing(key, reason, again=again))
            elif finished.at(floor, limits.policy).group.oldest_version is None:
                closed.append(self.closing(key, Reason.STALE))
        return closed

    def choose(
        self, train_version: Version, running_oldest: Callable[[GroupKey], Version | None]
    ) -> facts.Leased | Wait:
        """The batch of the step that begins at `train_version`: the B groups of oldest version, in
        the order of their keys.

        `running_oldest` gives the oldest version among the tokens of each running group, of its
        ended rollouts too, `None` before the first. Groups that are `overdue` must be closed
        before.
        """
        limits = self._limits
        aged = self._aged(train_version)
        chosen = aged[: limits.groups_per_step]
        left = aged[limits.groups_per_step :]
        if len(chosen) < limits.groups_per_step:
            have = f"{len(chosen)} of {limits.groups_per_step} groups"
            return Wait(
                "generation", f"step {train_version} has {have}; {self.num_running} are running"
            )
        if limits.policy is StalePolicy.WAIT:
            behind = [oldest for oldest, _, _ in left]
            wait = self._stragglers(behind, train_version, running_oldest)
            if wait is not None:
                return wait
        trimmed = [trimmed for _, _, trimmed in chosen]
        return self._leased(train_version, sorted(trimmed, key=lambda one: one.group.key))

    def _aged(self, train_version: Version) -> list[tuple[Version, int, TrimmedGroup]]:
        """The groups that wait, as that step would train on them, each with its oldest version and
        its order of finishing. They are sorted by these two.
        """
        aged: list[tuple[Version, int, TrimmedGroup]] = []
        for finished in self._waiting.values():
            trimmed = finished.at(train_version - self._limits.max_staleness, self._limits.policy)
            oldest: Version | None = finished.oldest
            if trimmed.group is not finished.group:
                oldest = trimmed.group.oldest_version
            if oldest is not None:  # else it is overdue
                aged.append((oldest, finished.order, trimmed))
        return sorted(aged, key=lambda entry: entry[:2])

    def _leased(self, train_version: Version, chosen: list[TrimmedGroup]) -> facts.Leased:
        batch = Batch(
            self._num_leases + 1, train_version, tuple(trimmed.group for trimmed in chosen)
        )
        staleness = ages((t for group in batch.groups for t in group.trajectories), train_version)
        masked: dict[RolloutKey, int] = {}
        dropped: dict[RolloutKey, int] = {}
        for trimmed in chosen:
            masked.update(trimmed.masked)
            dropped.update(trimmed.dropped)
        return facts.Leased(batch, staleness, masked, dropped)

    def _stragglers(
        self,
        behind: list[Version],
        train_version: Version,
        oldest_of: Callable[[GroupKey], Version | None],
    ) -> Wait | None:
        """The wait for running groups, if the batch would leave too many groups behind.

        A running group that is over age already can never be trained, so waiting for it would gain
        nothing.
        """
        limits = self._limits
        floor = train_version - limits.max_staleness
        running: dict[GroupKey, Version] = {}
        for key in self._running:
            smallest = oldest_of(key)
            if smallest is None:
                continue
            least, most = self._lineage.between(smallest)
            if most >= floor:
                running[key] = max(least, floor)
        bound = overfull(
            [*behind, *running.values()],
            train_version,
            max_staleness=limits.max_staleness,
            groups_per_step=limits.groups_per_step,
        )
        if bound is None:
            return None
        late = ", ".join(
            f"{k.epoch}-{k.index}-{k.attempt}" for k, oldest in running.items() if oldest <= bound
        )
        detail = (
            f"step {train_version} would leave too many groups behind at version {bound} or "
            f"older; running: {late}"
        )
        return Wait("stragglers", detail)

    def resumed_as(self, checkpoint: Version) -> Version:
        """The number under which the weights of a checkpoint go on: its own, unless a lease was
        meant to make a later one.
        """
        return checkpoint if self._highest <= checkpoint else self._highest + 1

    def learnt_after(self, checkpoint: Version) -> frozenset[GroupKey]:
        """Groups of steps that were made and that a checkpoint of that version does not have."""
        return frozenset(key for key, learnt in self._learnt.items() if learnt.version > checkpoint)

    # --- Applying ---

    def apply(self, fact: facts.Fact) -> None:
        """`UnknownLease` leaves everything as it was."""
        match fact:
            case facts.Admitted(key=key):
                assert not self._is_open(key), f"{key} is admitted already"
                self._line.discard(key)
                self._running[key] = self._limits.group_size
                self.submitted += 1
            case facts.SlotFreed(key=key):
                assert self._running[key] > 0, f"{key} has no rollout left to end"
                self._running[key] -= 1
                return
            case facts.TrajectoryKept():
                self._keep(fact)
                # It adds the same sum to both sides of I3; the next fact of its group is checked.
                return
            case facts.GroupFinished(group=group, order=order):
                del self._running[group.key]
                finished = WaitingGroup.of(group, order, self._lineage)
                self._waiting[group.key] = finished
                self._num_finished = order
                assert self._kept.pop(group.key, 0) == finished.num_tokens, (
                    f"I3: {group.key} has other tokens than its rollouts"
                )
            case facts.GroupClosed():
                self._close(fact)
            case facts.Leased(batch=batch):
                self._lease(batch)
            case facts.Stepped(lease=lease):
                self._step(lease)
            case facts.TakenBack(lease=lease):
                self._take_back(lease)
            case facts.WentBack():
                self._go_back(fact)
            case facts.Checkpointed(version=version):
                self._settle(version)
            case facts.Interrupted():
                self._put_in_line()
            case facts.CarriedOver():
                self._carry_over(fact)
            case facts.VersionServed(version=version):
                self._served = version
                self._made = max(self._made, version)
            case _:
                return
        self._check()

    def _put_in_line(self) -> None:
        self.submitted -= len(self._running)
        self._line.update(self._running)
        self._running.clear()

    def _keep(self, kept: facts.TrajectoryKept) -> None:
        trajectory = kept.trajectory
        number = trajectory.num_trainable
        group = trajectory.key.group
        self.tokens.received += number + sum(kept.masked.values()) + sum(kept.dropped.values())
        self.tokens.masked.update(kept.masked)
        self.tokens.dropped.update(kept.dropped)
        if trajectory.reward is None:
            self.tokens.drop(Reason.NO_REWARD, number)
        else:
            self._kept[group] = self._kept.get(group, 0) + number
            self._bytes[group] = self._bytes.get(group, 0) + trajectory.num_bytes

    def _close(self, closed: facts.GroupClosed) -> None:
        key = closed.key
        assert self._num_tokens(key) == closed.num_tokens, (
            f"I3: {key} has {self._num_tokens(key)} tokens, not {closed.num_tokens}"
        )
        self._running.pop(key, None)
        self._kept.pop(key, None)
        self._bytes.pop(key, None)
        self._waiting.pop(key, None)
        for lease in self._leases.values():
            lease.shares.pop(key, None)
        self.dropped[closed.reason] += 1
        self.tokens.drop(closed.reason, closed.num_tokens)
        if closed.successor is not None:
            self._line.add(closed.successor)

    def _lease(self, batch: Batch) -> None:
        """Leases a batch. The store gives whole groups, and the policy removes the same tokens from
        them as before.
        """
        assert batch.lease not in self._leases, f"lease {batch.lease} is taken"
        floor = batch.train_version - self._limits.max_staleness
        finished = {group.key: self._waiting.pop(group.key) for group in batch.groups}
        trimmed = {key: f.at(floor, self._limits.policy) for key, f in finished.items()}
        groups = tuple(t.group for t in trimmed.values())
        for group in groups:
            oldest = group.oldest_version
            assert oldest is not None and oldest >= floor, f"I2: a token below version {floor}"
        shares = {
            key: Share(t.group.num_trainable, sum(t.masked.values()), sum(t.dropped.values()))
            for key, t in trimmed.items()
        }
        if batch.groups != groups:
            batch = replace(batch, groups=groups)
        self._leases[batch.lease] = OpenLease(batch, finished, shares)
        for share in shares.values():
            self.tokens.mask(Reason.STALE, share.num_masked)
            self.tokens.drop(Reason.STALE, share.num_dropped)
        self._next = batch.train_version + 1
        self._highest = max(self._highest, self._next)
        self._num_leases = max(self._num_leases, batch.lease)

    def _step(self, number: int) -> None:
        lease = self._open(number)
        version = lease.batch.train_version + 1
        for key, share in lease.shares.items():
            self._learnt[key] = TrainedGroup(version, lease.finished[key].order, share)
            self.tokens.trained += share.num_trained
            self._bytes.pop(key, None)
        self.trained += len(lease.shares)
        self._made = max(self._made, version)
        del self._leases[number]

    def _take_back(self, number: int) -> None:
        lease = self._open(number)
        for key, share in lease.shares.items():
            self._untrim(share)
            self._waiting[key] = lease.finished[key]
        self._next = min(self._next, lease.batch.train_version)
        del self._leases[number]

    def _go_back(self, back: facts.WentBack) -> None:
        self._settle(back.checkpoint)
        for number in list(self._leases):
            self._take_back(number)
        self._lineage = self._lineage.forked(back.checkpoint, back.version)
        self._waiting = {
            key: WaitingGroup.of(f.recorded, f.order, self._lineage)
            for key, f in self._waiting.items()
        }
        for group in back.groups:
            learnt = self._learnt.pop(group.key)
            self._untrim(learnt.share)
            self.trained -= 1
            self.tokens.trained -= learnt.share.num_trained
            self._waiting[group.key] = WaitingGroup.of(group, learnt.order, self._lineage)
            self._bytes[group.key] = sum(t.num_bytes for t in group.trajectories)
        assert not self._learnt, (
            f"I8: {sorted(self._learnt)} were trained after the checkpoint and do not wait again"
        )
        self._next = back.version
        self._made = back.version
        self._highest = max(self._highest, back.version)

    def _untrim(self, share: Share) -> None:
        self.tokens.mask(Reason.STALE, -share.num_masked)
        self.tokens.drop(Reason.STALE, -share.num_dropped)

    def _settle(self, version: Version) -> None:
        """Makes steps up to `version` final. Also makes a step final that was never reported,
        because the checkpoint has it.
        """
        for number, lease in list(self._leases.items()):
            if lease.batch.train_version < version:
                self._step(number)
        self._learnt = {
            key: learnt for key, learnt in self._learnt.items() if learnt.version > version
        }

    def _carry_over(self, carried: facts.CarriedOver) -> None:
        self.submitted += carried.trained + sum(carried.dropped.values())
        self.trained += carried.trained
        self.dropped.update(carried.dropped)
        for (fate, reason), number in carried.tokens.items():
            self.tokens.received += number
            if reason is None:
                self.tokens.trained += number
            elif fate is Fate.MASKED:
                self.tokens.masked[reason] += number
            else:
                self.tokens.dropped[reason] += number
        self._line.update(carried.in_line)
        if carried.next_version is not None:
            self._next = carried.next_version
        if carried.highest_version is not None:
            self._highest = carried.highest_version
        self._num_leases = carried.num_leases
        self._num_finished = carried.num_finished

    # --- Looking up ---

    def _open(self, lease: int) -> OpenLease:
        if lease not in self._leases:
            raise UnknownLease(
                f"Lease {lease} is not open (open: {sorted(self._leases)}); take a batch again."
            )
        return self._leases[lease]

    def _num_tokens(self, key: GroupKey) -> int:
        """Trainable tokens of a group that runs, waits or is leased."""
        if key in self._running:
            return self._kept.get(key, 0)
        if key in self._waiting:
            return self._waiting[key].num_tokens
        return next(
            lease.shares[key].num_trained for lease in self._leases.values() if key in lease.shares
        )

    def _is_open(self, key: GroupKey) -> bool:
        if key in self._running or key in self._waiting:
            return True
        return any(key in lease.shares for lease in self._leases.values())

    def _check(self) -> None:
        groups = (
            self.num_running
            + self.num_waiting
            + self.num_leased
            + self.trained
            + self.dropped.total()
        )
        assert self.submitted == groups, (
            f"I1: {self.submitted} groups submitted, {groups} accounted for"
        )
        tokens = (
            self.tokens_waiting
            + self.tokens.trained
            + self.tokens.masked.total()
            + self.tokens.dropped.total()
        )
        assert self.tokens.received == tokens, (
            f"I3: {self.tokens.received} tokens received, {tokens} accounted for"
        )


def _has_spread(group: Group) -> bool:
    """True if some role of the group has different rewards."""
    for compared in group.by_role().values():
        if len({trajectory.reward for trajectory in compared.trajectories}) != 1:
            return True
    return False
