"""The stream of rollouts: groups are started as admission allows, and wait for a step when they
have ended. And held-out scores along a run: before it, after it, and of every so many versions
between, each of exactly one version.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `RolloutStream.run` | tasks | admission of the next group | the queue: a step taken, a version served, a rollout ended, a task posted |
| `RolloutStream._group` (one each) | its rollouts | their ends | the rollouts' deadlines |
| `Evaluations.run` | evaluations due | the next that is due; its rollouts; then the handover that its engine missed | a version published; the rollouts' deadlines, or the end of the reservation; the engine, or the handover's deadlines |
| `Evaluations.making_way` | nothing | an evaluation that no version may overtake | its end; where training goes on, another engine, or `pin_seconds` |
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Protocol

from midflight.buffer.books import FOR_TASKS, Books, Wait
from midflight.buffer.queue import GroupQueue
from midflight.environments.evaluation import Evaluator
from midflight.environments.group import GroupRunner
from midflight.environments.rollout import RolloutRunner
from midflight.environments.tasks import TaskStream
from midflight.errors import RunFailed
from midflight.gateway.fleet.fleet import Fleet
from midflight.gateway.fleet.reservation import Reservation
from midflight.observe.alarms import USE_THE_CLIENT
from midflight.observe.status import Phase
from midflight.ports import RequestWatch, SessionHandle, Sessions
from midflight.types import (
    Group,
    GroupKey,
    Reason,
    RolloutKey,
    Row,
    SamplingParams,
    SessionRecord,
    Task,
    Trajectory,
    Version,
)
from midflight.types.facts import GroupClosed, GroupFinished, Record, SlotFreed, TrajectoryKept
from midflight.weights.handover import Handover

MAX_FAILED_GROUPS = 8
"""Groups in a row of which not one rollout got a reward, or none asked the model. More is no bad
luck: something is broken.
"""


class Fates:
    """Tokens that no trajectory carries on, by rollout and reason, until the rollout is kept
    (I3).
    """

    def __init__(self) -> None:
        self._masked: defaultdict[RolloutKey, Counter[Reason]] = defaultdict(Counter)
        self._dropped: defaultdict[RolloutKey, Counter[Reason]] = defaultdict(Counter)

    def session_closed(
        self, key: RolloutKey, *, masked: Mapping[Reason, int], dropped: Mapping[Reason, int]
    ) -> None:
        if masked:
            self._masked[key].update(masked)
        if dropped:
            self._dropped[key].update(dropped)

    def rows_discarded(self, key: RolloutKey, rows: tuple[Row, ...], *, reason: Reason) -> None:
        self._dropped[key][reason] += sum(row.num_trainable for row in rows)

    def kept(self, trajectory: Trajectory) -> TrajectoryKept:
        """The rollout is not tried again; its counts are forgotten here."""
        key = trajectory.key
        return TrajectoryKept(trajectory, self._masked.pop(key, {}), self._dropped.pop(key, {}))


class GroupAges:
    """Implements `ports.Sessions` around the gateway's, and knows the oldest token of each running
    group (I2).

    A group's age counts its ended rollouts too; it is forgotten with the group.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._live: dict[GroupKey, set[str]] = defaultdict(set)
        self._group_of: dict[str, GroupKey] = {}
        self._ended: dict[GroupKey, Version] = {}

    def open(self, key: RolloutKey, *, sampling: SamplingParams, tracked: bool) -> SessionHandle:
        handle = self._sessions.open(key, sampling=sampling, tracked=tracked)
        self._live[key.group].add(handle.session_id)
        self._group_of[handle.session_id] = key.group
        return handle

    def close(self, session_id: str) -> SessionRecord:
        record = self._sessions.close(session_id)
        group = self._group_of.pop(session_id, None)
        if group is not None:
            self._live[group].discard(session_id)
            versions = [v for row in record.rows if (v := row.oldest_version) is not None]
            if versions:
                self._ended[group] = min(*versions, self._ended.get(group, versions[0]))
        return record

    def oldest_version(self, session_id: str) -> Version | None:
        return self._sessions.oldest_version(session_id)

    def request_watch(self, session_id: str) -> RequestWatch:
        return self._sessions.request_watch(session_id)

    def of_group(self, key: GroupKey) -> Version | None:
        """The oldest version among the tokens of the group's rollouts so far, `None` before the
        first.
        """
        live = (self._sessions.oldest_version(session) for session in self._live.get(key, ()))
        return min((v for v in (*live, self._ended.get(key)) if v is not None), default=None)

    def restore(self, key: GroupKey, versions: Iterable[Version]) -> None:
        """A group that will go on after a crash: the versions of its recorded tokens."""
        if (oldest := min(versions, default=None)) is not None:
            self._ended[key] = oldest

    def forget(self, key: GroupKey) -> None:
        """The group has finished: the buffer knows its age from now on."""
        self._live.pop(key, None)
        self._ended.pop(key, None)


class GroupSlots:
    """The slots that admission reserved for a group: leaving one frees it for the next group."""

    def __init__(self, key: GroupKey, record: Record) -> None:
        self._key = key
        self._record = record

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        self._record(SlotFreed(self._key))


class Recorded:
    """Runs rollouts and keeps each that gets a reward. Those kept before a crash come back from the
    store, once.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        fates: Fates,
        record: Record,
        *,
        kept: Callable[[Trajectory], None],
    ) -> None:
        """`kept` looks at each that is."""
        self._runner = runner
        self._fates = fates
        self._record = record
        self._look = kept
        self._finished: dict[RolloutKey, Trajectory] = {}

    def restore(self, trajectories: Iterable[Trajectory]) -> None:
        self._finished.update({t.key: t for t in trajectories if t.reward is not None})

    async def run(self, key: RolloutKey, task: Task) -> Trajectory:
        if (finished := self._finished.pop(key, None)) is not None:
            return finished
        trajectory = await self._runner.run(key, task)
        if trajectory.reward is not None:
            self._record(self._fates.kept(trajectory))
            self._look(trajectory)
        return trajectory


class RolloutStream:
    """Starts a group whenever admission allows, and sees each to its end."""

    def __init__(
        self,
        queue: GroupQueue,
        books: Books,
        stream: TaskStream,
        *,
        runner: Recorded,
        ages: GroupAges,
        fates: Fates,
        record: Record,
        room: Callable[[], Awaitable[None]],
        routable: Callable[[], bool],
        group_size: int,
        retries: int,
        passes: float,
    ) -> None:
        """`passes`: the reward of a rollout that has passed. `room` waits while the disk is far
        behind; `routable` says whether any engine takes requests.
        """
        self._queue = queue
        self._books = books
        self._stream = stream
        self._runner = runner
        self._ages = ages
        self._fates = fates
        self._record = record
        self._room = room
        self._routable = routable
        self._group_size = group_size
        self._retries = retries
        self._passes = passes
        self._failed_in_a_row = self._silent_in_a_row = 0

    async def run(self) -> None:
        """Runs until cancelled, which cancels the groups, or until too many groups in a row have
        failed.
        """
        async with asyncio.TaskGroup() as groups:
            while True:
                await self._room()
                admitted = await self._queue.admit(self._draw, self._stream.task_of)
                self._begun(admitted.key)
                groups.create_task(
                    self._group(admitted.key, admitted.task), name=f"group {admitted.key}"
                )
                # the agents of a group start together: milliseconds in which nobody else is heard
                await asyncio.sleep(0)

    def _begun(self, key: GroupKey) -> None:
        curriculum = self._stream.curriculum
        if curriculum is not None and (drawn := curriculum.begun(key)) is not None:
            self._record(drawn)

    def _draw(self) -> GroupKey | Wait:
        return self._stream.draw() or Wait(FOR_TASKS, "no task that was posted is left")

    async def _group(self, key: GroupKey, task: Task) -> None:
        slots = GroupSlots(key, self._record)
        runner = GroupRunner(
            rollouts=self._runner,
            slots=slots,
            fates=self._fates,
            group_size=self._group_size,
            retries=self._retries,
        )
        trajectories = await runner.run(key, task)
        for lost in (t for t in trajectories if t.reward is None):
            self._record(self._fates.kept(lost))  # only now: it is not tried again
        group = Group.of(key, task, trajectories)
        reason = self._books.unfit(group)
        self._record(
            GroupFinished(group, self._books.next_order)
            if reason is None
            else self._closed(group, reason)
        )
        if self._stream.curriculum is not None:
            self._stream.curriculum.ended(
                key, [t.reward for t in trajectories if t.reward is not None]
            )
        self._ages.forget(key)
        self._budget(trajectories)

    def _closed(self, group: Group, reason: Reason) -> GroupClosed:
        """One without spread is replaced by another task, because its own was too easy or too
        hard.
        """
        closed = self._books.closing(group.key, reason)
        reward = group.trajectories[0].reward if group.trajectories else None
        if reason is not Reason.ZERO_SPREAD or reward is None:
            return closed
        return GroupClosed(
            group.key,
            reason,
            closed.num_tokens,
            alike="passed" if reward >= self._passes else "failed",
        )

    def _budget(self, trajectories: list[Trajectory]) -> None:
        """An environment that always fails, or never asks the model, must not look like a run that
        is merely slow.

        Without any engine nobody can succeed: the launcher starts engines again, or ends the run
        and names them.
        """
        self._silent(trajectories)
        if any(t.reward is not None for t in trajectories) or not self._routable():
            self._failed_in_a_row = 0
            return
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= MAX_FAILED_GROUPS:
            first = next((t for t in trajectories if t.error), trajectories[0])
            raise RunFailed(
                f"{self._failed_in_a_row} groups in a row got no reward; task {first.task_id} of "
                f"{first.source} failed with {first.error or 'a reward of None'}; mend the "
                "environment or the engines, whose logs are in the run's folder."
            )

    def _silent(self, trajectories: list[Trajectory]) -> None:
        """Groups with a reward and without a token: their agents asked another model, or none. A
        group that failed says nothing of that.
        """
        first = next((t for t in trajectories if t.reward is not None), None)
        if first is None or any(t.rows for t in trajectories):
            self._silent_in_a_row = self._silent_in_a_row if first is None else 0
            return
        self._silent_in_a_row += 1
        if self._silent_in_a_row >= MAX_FAILED_GROUPS:
            raise RunFailed(
                f"{self._silent_in_a_row} groups in a row were scored without an answer of the "
                f"model, such as task {first.task_id} of {first.source} with reward "
                f"{first.reward:g}: there is nothing to train on. {USE_THE_CLIENT}"
            )


# --- Evaluations ----------------------------------------------------------------------------------


class Phases(Protocol):
    """Whoever shows the run hears what it is doing."""

    def begin_phase(self, phase: Phase, *, num_tasks: int = 0) -> None: ...


class ReservedSessions:
    """Implements `ports.Sessions` around the gateway's: while there is a reservation, its sessions
    are for that.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.reservation: Reservation | None = None

    def open(self, key: RolloutKey, *, sampling: SamplingParams, tracked: bool) -> SessionHandle:
        handle = self._sessions.open(key, sampling=sampling, tracked=tracked)
        if self.reservation is not None:
            self.reservation.sessions.add(handle.session_id)
        return handle

    def close(self, session_id: str) -> SessionRecord:
        record = self._sessions.close(session_id)
        if self.reservation is not None:
            self.reservation.sessions.discard(session_id)
        return record

    def oldest_version(self, session_id: str) -> Version | None:
        return self._sessions.oldest_version(session_id)

    def request_watch(self, session_id: str) -> RequestWatch:
        return self._sessions.request_watch(session_id)


class Evaluations:
    """One at a time. Before and after training all engines work at it and no version comes;
    between, one engine is reserved for it.
    """

    def __init__(
        self,
        evaluator_of: Callable[[Sessions], Evaluator],
        tasks: Sequence[Task],
        *,
        every: int,
        pin_seconds: float,
        phases: Phases,
        fleet: Fleet,
        handover: Handover,
        sessions: Sessions,
    ) -> None:
        """`every`: versions between two that fall due, 0 for none. Where not every version is
        published, the next that is falls due.
        """
        self._sessions = ReservedSessions(sessions)
        self._evaluator = evaluator_of(self._sessions)
        self._tasks = tasks
        self._every = every
        self._pin_seconds = pin_seconds
        self._phases = phases
        self._fleet = fleet
        self._handover = handover
        self._due = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._all_engines = asyncio.Lock()
        self._before: Version | None = None
        self._published: Version | None = None

    # --- Before and after training ----------------------------------------------------------------

    async def evaluate(self) -> None:
        """Waits for a handover under way, then for its rollouts, each of which has a deadline.
        Without a held-out task it is not made.
        """
        if not self._tasks:
            return
        async with self._all_engines:
            self._phases.begin_phase(
                Phase.EVALUATION, num_tasks=self._evaluator.num_rollouts(self._tasks)
            )
            current = self._handover.current  # what an engine that is away comes back with
            self._before = self._fleet.served_version() if current is None else current.version
            await self._evaluator.run(self._tasks, version=self._before)

    # --- Between ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def making_way(self) -> AsyncGenerator[None]:
        """A version may be handed over within. Waits for an evaluation by all engines, and, while
        no engine could take the version, `pin_seconds` at most for one that has the only engine:
        what is unfinished then has failed."""
        async with self._all_engines:
            if (reservation := self._sessions.reservation) is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pin_seconds):
                        await reservation.passable.wait()
                if not reservation.passable.is_set():
                    self._fleet.unreserve(reservation)
            yield

    def published(self, version: Version) -> None:
        """To be called as soon as its handover has ended, before the next can begin. One that falls
        due during another is left out.
        """
        before = version - 1 if self._published is None else self._published
        self._published = version
        due = self._tasks and self._every and version // self._every > before // self._every
        if due and version != self._before and self._sessions.reservation is None:
            self._sessions.reservation = self._fleet.reserve(version)
            self._idle.clear()
            self._due.set()

    async def run(self) -> None:
        """Waits for the next that falls due; ended by its task group."""
        while True:
            await self._due.wait()
            self._due.clear()
            if (reservation := self._sessions.reservation) is not None:
                await self._by_one_engine(reservation)

    async def settled(self) -> None:
        """Waits for the evaluation under way, unless the one after training will be of the same
        version.
        """
        reservation = self._sessions.reservation
        if reservation is not None and reservation.version < self._fleet.current_version():
            await self._idle.wait()

    async def _by_one_engine(self, reservation: Reservation) -> None:
        """Waits for its rollouts, and for its engine to take the version that has come
        meanwhile.
        """
        self._phases.begin_phase(
            Phase.TRAINING, num_tasks=self._evaluator.num_rollouts(self._tasks)
        )
        try:
            await self._evaluator.run(
                self._tasks, version=reservation.version, over=reservation.over
            )
            engine = reservation.engine
            self._fleet.unreserve(reservation)
            if engine is not None:
                await self._handover.catch_up(engine)
        finally:
            self._fleet.unreserve(reservation)
            self._sessions.reservation = None
            self._idle.set()
