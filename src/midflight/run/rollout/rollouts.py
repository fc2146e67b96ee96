"""The stream of rollouts: groups are started as admission allows, and wait for a step when they
have ended.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `RolloutStream.run` | tasks | admission of the next group | the queue: a step taken, a version served, a rollout ended, a task posted |
| `RolloutStream._group` (one each) | its rollouts | their ends | the rollouts' deadlines |
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType

from midflight.buffer.books import FOR_TASKS, Books
from midflight.buffer.groups import Wait
from midflight.buffer.queue import GroupQueue
from midflight.environments.group import GroupRunner
from midflight.environments.rollout import RolloutRunner
from midflight.environments.tasks import TaskStream
from midflight.errors import RunFailed
from midflight.observe.alarms import USE_THE_CLIENT
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

MAX_FAILED_GROUPS = 8
"""The number of groups in a row without a reward, or without a request to the model, after which
the run fails. So many in a row are no coincidence: something is broken.
"""


class TokenFates:
    """Counts the tokens that are in no trajectory, by rollout and reason, until the rollout is kept
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
        """Returns the fact that the rollout is kept and not tried again. Its counts are forgotten
        here.
        """
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
            self._note_ended(group, record)
        return record

    def _note_ended(self, group: GroupKey, record: SessionRecord) -> None:
        for row in record.rows:
            version = row.oldest_version
            if version is not None:
                self._ended[group] = min(version, self._ended.get(group, version))

    def oldest_version(self, session_id: str) -> Version | None:
        return self._sessions.oldest_version(session_id)

    def request_watch(self, session_id: str) -> RequestWatch:
        return self._sessions.request_watch(session_id)

    def of_group(self, key: GroupKey) -> Version | None:
        """The oldest version among the tokens of the group's rollouts so far, `None` before the
        first.
        """
        oldest = self._ended.get(key)
        for session in self._live.get(key, ()):
            version = self._sessions.oldest_version(session)
            if version is not None and (oldest is None or version < oldest):
                oldest = version
        return oldest

    def restore(self, key: GroupKey, versions: Iterable[Version]) -> None:
        """Takes the versions of the recorded tokens of a group that goes on after a crash."""
        oldest = min(versions, default=None)
        if oldest is not None:
            self._ended[key] = oldest

    def forget(self, key: GroupKey) -> None:
        """Forgets a group that has finished: the buffer knows its age from now on."""
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


class RecordedRollouts:
    """Runs rollouts and keeps each that gets a reward. A rollout that was kept before a crash comes
    back from the store, once.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        fates: TokenFates,
        record: Record,
        *,
        kept: Callable[[Trajectory], None],
    ) -> None:
        """`kept` is called with each trajectory that is kept."""
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
        runner: RecordedRollouts,
        ages: GroupAges,
        fates: TokenFates,
        record: Record,
        room: Callable[[], Awaitable[None]],
        routable: Callable[[], bool],
        group_size: int,
        retries: int,
        passes: float,
    ) -> None:
        """`passes` is the reward of a rollout that has passed. `room` waits while the disk is far
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
        self._failed_in_a_row = 0
        self._silent_in_a_row = 0

    async def run(self) -> None:
        """Runs until it is cancelled, which cancels the groups, or until too many groups in a row
        have failed.
        """
        async with asyncio.TaskGroup() as groups:
            while True:
                await self._room()
                admitted = await self._queue.admit(self._draw, self._stream.task_of)
                self._begun(admitted.key)
                groups.create_task(
                    self._group(admitted.key, admitted.task), name=f"group {admitted.key}"
                )
                # the agents of a group start together, which blocks the loop for milliseconds
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
        for trajectory in trajectories:
            if trajectory.reward is None:
                self._record(self._fates.kept(trajectory))  # only now: it is not tried again
        group = Group.of(key, task, trajectories)
        reason = self._books.unfit(group)
        if reason is None:
            self._record(GroupFinished(group, self._books.next_order))
        else:
            self._record(self._closed(group, reason))
        if self._stream.curriculum is not None:
            rewards = [t.reward for t in trajectories if t.reward is not None]
            self._stream.curriculum.ended(key, rewards)
        self._ages.forget(key)
        self._budget(trajectories)

    def _closed(self, group: Group, reason: Reason) -> GroupClosed:
        """Returns the fact that closes a group. A group without spread is replaced by another task,
        because its own was too easy or too hard.
        """
        closed = self._books.closing(group.key, reason)
        reward = group.trajectories[0].reward if group.trajectories else None
        if reason is not Reason.ZERO_SPREAD or reward is None:
            return closed
        alike = "passed" if reward >= self._passes else "failed"
        return GroupClosed(group.key, reason, closed.num_tokens, alike=alike)

    def _budget(self, trajectories: list[Trajectory]) -> None:
        """Ends a run whose environment always fails, or never asks the model: it must not look like
        a run that is merely slow.

        Without any engine no group can succeed, so failures are not counted then: the launcher
        starts engines again, or ends the run and names them.
        """
        self._silent(trajectories)
        if any(t.reward is not None for t in trajectories) or not self._routable():
            self._failed_in_a_row = 0
            return
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= MAX_FAILED_GROUPS:
            first = next((t for t in trajectories if t.error), trajectories[0])
            error = first.error or "a reward of None"
            raise RunFailed(
                f"{self._failed_in_a_row} groups in a row got no reward; task {first.task_id} of "
                f"{first.source} failed with {error}; mend the "
                "environment or the engines, whose logs are in the run's folder."
            )

    def _silent(self, trajectories: list[Trajectory]) -> None:
        """Counts groups with a reward and without a token: their agents asked another model, or
        none. A group that failed does not count either way.
        """
        first = next((t for t in trajectories if t.reward is not None), None)
        if first is None:
            return
        if any(t.rows for t in trajectories):
            self._silent_in_a_row = 0
            return
        self._silent_in_a_row += 1
        if self._silent_in_a_row >= MAX_FAILED_GROUPS:
            raise RunFailed(
                f"{self._silent_in_a_row} groups in a row were scored without an answer of the "
                f"model, such as task {first.task_id} of {first.source} with reward "
                f"{first.reward:g}: there is nothing to train on. {USE_THE_CLIENT}"
            )
