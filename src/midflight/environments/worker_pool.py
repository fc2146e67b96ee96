"""The pool of worker processes, and the rollouts that they run. It is synchronous except for
`run`, which waits for one agent.

A rollout waits in line until a worker takes it. Seconds for which it is not to blame do not count
against its deadline. If its worker is lost, the rollout has failed if it is to blame. Otherwise it
begins again with another worker, which is given its completed turns (I8), and neither its retries
nor its deadline have been used up. The blame lies

- with no rollout, where the launcher says that the worker was stopped from outside;
- with the rollout that blocked its worker's event loop, as the worker's own watch saw;
- otherwise with the only rollout that the worker had, unless that was waiting for the gateway;
- otherwise with no rollout yet. Those that were not waiting for the gateway begin again alone in a
  worker, so that the cause is known the next time.

The pool judges agents. The launcher's watchdog, which hears a worker's process, judges whether the
worker lives. The pool hears a worker's event loop, on the connection that carries the rollouts. It
asks the launcher to end a worker

- whose loop is blocked by an agent that is past its rollout's deadline;
- whose loop an agent has blocked for `stall_seconds` without waiting for the gateway, while others
  are held up. All of them begin again, each alone in a worker, where the blocking one may go on to
  its deadline;
- that was not heard for longer than `stall_seconds`: its connection is lost, or the launcher finds
  the same;
- with many agents that have not ended with their rollouts.

The measured delay of messages, of this process or of half of the workers, is added to all of these
seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol, cast

from midflight.environments.result_checks import UnscoredRollout
from midflight.environments.tool_time import ToolTime
from midflight.errors import AgentFailed, AgentLost, EnvironmentFailed
from midflight.lateness import Lateness, delay_of
from midflight.ports import SessionHandle
from midflight.stopwatch import Stopwatch
from midflight.types import Result, Task

BEAT_SECONDS = 1.0
"""Seconds between two heartbeats of a worker's event loop."""
LOOK_SECONDS = 1.0
"""Seconds between two looks for workers that hang."""
SILENT_BEATS = 3
"""The number of missed heartbeats after which a worker is blocked, or stopped, or has no processor.
It gets nothing new, and the time of its rollouts does not count, except for that of one that is
known to block it.
"""
REST_SECONDS = 2.0
"""The time by which the pool acts later than the launcher, which finds a worker's process stopped
or silent and knows why.
"""
MEMORY = 4
"""The time for which a delay is remembered, as a multiple of `stall_seconds`."""
GRACE_SECONDS = 5.0
"""The seconds that an agent, with its `finally` blocks, may take to end after its rollout."""
MAX_LEFT = 16
"""The number of agents of ended rollouts, such as threads that sleep, that a worker may have left
running. With more the worker is started anew.
"""
MAX_LOST = 3
"""The number of workers that a rollout may lose before it counts as the cause of their death."""


class Recorder(Protocol):
    """The part of the gateway that agents need when they begin again."""

    def reopen(self, session_id: str) -> SessionHandle: ...
    def awaits(self, session_id: str) -> bool: ...


@dataclass(slots=True, eq=False)
class Assignment:
    """A rollout that a worker is to run, until it has ended."""

    task: Task
    data: str
    """The data of the task, as JSON."""
    session: SessionHandle
    began: float
    since: float
    """The time at which it was put in line."""
    ended: asyncio.Future[object]
    alone: bool = False
    worker: PoolWorker | None = None
    excused: float = 0.0
    waits: Stopwatch = field(default_factory=Stopwatch)
    """Runs while programs of the rollout wait for a processor."""
    tools: ToolTime = field(init=False)
    num_lost: int = 0
    """The number of workers that died while they ran it, and may have died because of it."""
    attempts: str | None = None
    """The attempts of a group that has ended and is to be scored, as JSON. Then there is no agent,
    and `session` is only a name.
    """

    def __post_init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forgets the waits and the tools of an agent that is lost."""
        self.waits = Stopwatch()
        self.tools = ToolTime(self.waits.seconds)


@dataclass(frozen=True, slots=True)
class GroupName:
    """The name of a group that is scored, in the place of a session."""

    session_id: str
    base_url: str = ""
    api_key: str = ""


class RolloutPlacement(NamedTuple):
    """The place of a rollout that has begun."""

    part: str
    """The worker that has it or for which it waits, or an empty string if agents run in this
    process.
    """
    waits: bool = False
    """True if it is in line for a place there."""


HERE = RolloutPlacement("")


class WorkerOutlet(Protocol):
    """Sends messages to one worker. It is synchronous. Messages to a worker that has gone are lost,
    like everything that was there.
    """

    def run(self, job: Assignment) -> None: ...
    def cancel(self, session_id: str) -> None: ...


@dataclass(slots=True, eq=False)
class PoolWorker:
    """One worker, for as long as it is connected."""

    name: str
    outlet: WorkerOutlet
    heard: float
    words: Lateness
    jobs: dict[str, Assignment] = field(default_factory=dict[str, Assignment])
    left: dict[str, float] = field(default_factory=dict[str, float])
    """Sessions whose rollout has ended while its agent runs on, with the time of that end."""
    culprit: str | None = None
    """The session whose agent blocks the loop."""
    where: str = ""
    condemned: bool = False
    spared: bool = False
    """True if no agent is to blame for the worker's end."""

    def guilty(self) -> str | None:
        """The session that is to blame for the worker's death."""
        if self.culprit:
            return self.culprit
        if len(self.jobs) == 1 and not self.left:
            return next(iter(self.jobs))
        return None


@dataclass(frozen=True, slots=True)
class HungWorker:
    """A worker to be ended, and why."""

    name: str
    why: str


class WorkerPool:
    """All connected workers, and the rollouts that they run or that wait for one. Implements
    `AgentHost`.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        stall_seconds: float,
        names: Sequence[str] = (),
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`names` are those of all workers that are to join. `say` is called with messages for
        people.
        """
        self._recorder = recorder
        self._stall_seconds = stall_seconds
        self._names = names
        self._say = say
        self._looks = Lateness(LOOK_SECONDS, memory_seconds=MEMORY * stall_seconds)
        self._delay = 0.0
        """The delay of messages at the last look."""
        self._line: deque[Assignment] = deque()
        self._workers: dict[str, PoolWorker] = {}
        self._jobs: dict[str, Assignment] = {}
        self.alone = False
        """True if every rollout is alone in its worker, because one was seen to block its loop."""

    # --- AgentHost --------------------------------------------------------------------------------

    async def run(self, task: Task, session: SessionHandle) -> object:
        """Runs an agent, see `AgentHost.run`. Waits for a worker and for the agent there. It is
        ended also by the loss of workers, when the agent is to blame.
        """
        return await self._ended(self._assignment(task, session))

    def _assignment(
        self, task: Task, session: SessionHandle, *, attempts: str | None = None
    ) -> Assignment:
        loop = asyncio.get_running_loop()
        return Assignment(
            task,
            _written(task),
            session,
            began=loop.time(),
            since=loop.time(),
            ended=loop.create_future(),
            attempts=attempts,
        )

    async def _ended(self, job: Assignment) -> object:
        """Waits for the worker's answer to an assignment. It begins the assignment again elsewhere
        if that is lost and is not to blame.
        """
        loop = asyncio.get_running_loop()
        session_id = job.session.session_id
        self._jobs[session_id] = job
        try:
            while True:
                self._put(job)
                try:
                    return await job.ended
                except AgentLost:
                    if job.attempts is None:
                        job.session = self._recorder.reopen(session_id)
                    job.ended = loop.create_future()
                    job.excused = loop.time() - job.began
                    job.begin_anew()
        finally:
            self._withdraw(job)

    async def judge(
        self, task: Task, attempts: Sequence[UnscoredRollout], *, name: str
    ) -> Sequence[Result]:
        """Scores attempts in a worker, see `AgentHost.judge`. Waits as `run` does."""
        written = json.dumps([asdict(attempt) for attempt in attempts])
        job = self._assignment(task, GroupName(name), attempts=written)
        return cast("Sequence[Result]", await self._ended(job))

    def excused(self, session_id: str) -> float:
        """See the port `AgentHost`. This is the time in line, in a worker that another agent blocks
        or that has no processor, and with workers that were lost. It is also the time in which
        programs of the rollout wait for a processor.
        """
        job = self._jobs.get(session_id)
        if job is None:
            return 0.0
        if job.worker is None:
            return job.excused + self._now() - job.since
        excused = job.excused + job.waits.seconds()
        if job.worker.culprit == session_id or job.waits.is_running:
            return excused
        return excused + self._silence(job.worker)

    def placement(self, session_id: str) -> RolloutPlacement:
        """The place of a rollout. One that is in line waits for a worker that has not joined or
        that does nothing, or else for any worker, because all have too many.
        """
        job = self._jobs.get(session_id)
        if job is None:
            return HERE
        if job.worker is not None:
            return RolloutPlacement(job.worker.name)
        missing = [name for name in self._names if name not in self._workers]
        idle = [
            worker.name
            for worker in self._workers.values()
            if worker.condemned or self._silence(worker)
        ]
        awaited = next(chain(missing, idle, self._workers), "")
        return RolloutPlacement(awaited, waits=True)

    def tool_seconds(self, session_id: str) -> float:
        """See the port `AgentHost`."""
        job = self._jobs.get(session_id)
        return 0.0 if job is None else job.tools.seconds()

    # --- What workers say -------------------------------------------------------------------------

    def join(self, name: str, outlet: WorkerOutlet) -> PoolWorker:
        words = Lateness(BEAT_SECONDS, memory_seconds=MEMORY * self._stall_seconds)
        worker = PoolWorker(name, outlet, self._now(), words)
        self._workers[name] = worker
        self._assign()
        return worker

    def hear(self, worker: PoolWorker) -> None:
        """Notes a message of the worker's loop, which ends a silence. The silence is excused for
        every rollout except one that is known to have blocked the loop. A late message says that
        the machine or this process was busy, and that time is excused too.
        """
        silence = self._silence(worker)
        late = max(0.0, self._now() - worker.heard - BEAT_SECONDS)
        for session_id, job in worker.jobs.items():
            if session_id != worker.culprit and not job.waits.is_running:
                job.excused += silence or late
        worker.words.came(self._now(), counts=worker.culprit is None)
        worker.heard = self._now()
        worker.culprit = None
        if silence:
            self._assign()

    def blocked(self, name: str, session_id: str | None, *, where: str, seconds: float) -> None:
        """Notes that the worker's watch, which is a thread, has seen its loop blocked, by the agent
        of this session if that is known.
        """
        worker = self._workers.get(name)
        if worker is None:
            return
        if session_id in worker.jobs or session_id in worker.left:
            worker.culprit = session_id
        job = worker.jobs.get(session_id or "")
        if job is not None:
            job.waits.stop()  # the message that a wait is over cannot come
        worker.where = where
        if seconds >= self._bound() and session_id is not None:
            self._all_alone(
                f"an agent blocks the event loop of {name} since {seconds:.0f} s, in {where}"
            )

    def spare(self, name: str) -> None:
        """Notes that the launcher is about to end the worker, for a reason that is no agent's
        fault.
        """
        worker = self._workers.get(name)
        if worker is not None:
            worker.condemned = True
            worker.spared = True

    def in_tools(self, worker: PoolWorker, session_id: str, limit: float | None) -> None:
        """Notes that the worker's agent has begun to run tools, for `limit` seconds at most. With
        None it has ended them.
        """
        job = worker.jobs.get(session_id)
        if job is None:
            return
        if limit is None:
            job.tools.end()
        else:
            job.tools.begin(limit)

    def wait_for_processor(self, worker: PoolWorker, session_id: str, *, waits: bool) -> None:
        """Notes that programs of the worker's agent wait for a processor, or that none waits any
        more.
        """
        job = worker.jobs.get(session_id)
        if job is None:
            return
        if waits:
            job.waits.start()
        else:
            job.waits.stop()

    def ended(
        self,
        worker: PoolWorker,
        session_id: str,
        *,
        result: object = None,
        error: Exception | None = None,
    ) -> None:
        """Notes that the worker's agent has ended with its result or an error, or that it was
        cancelled and nothing waits for it any more.
        """
        worker.left.pop(session_id, None)
        job = worker.jobs.pop(session_id, None)
        if job is not None and not job.ended.done():
            if error is None:
                job.ended.set_result(result)
            else:
                job.ended.set_exception(error)
        self._assign()

    def leave(self, worker: PoolWorker) -> None:
        """The worker is gone, and its agents with it."""
        if self._workers.get(worker.name) is worker:
            del self._workers[worker.name]
        for job in list(worker.jobs.values()):
            if not job.ended.done():
                job.ended.set_exception(self._loss(worker, job))
        worker.jobs.clear()

    def _loss(self, worker: PoolWorker, job: Assignment) -> AgentFailed | AgentLost:
        """Returns the error of a rollout whose worker is gone. The error says whether the rollout
        has failed or begins again.
        """
        if worker.spared:
            return AgentLost(f"{worker.name} was ended for what no agent did")
        is_guilty = worker.guilty() == job.session.session_id
        if worker.culprit is None:
            waited = self._waits_for_gateway(job)
            is_guilty = is_guilty and not waited
            job.alone = job.alone or not waited or job.num_lost > 0
            job.num_lost += 1
        if is_guilty or job.num_lost >= MAX_LOST:
            what = f"blocked it in {worker.where}" if worker.culprit is not None else "ran in it"
            return AgentFailed(
                f"WorkerDied: {worker.name} ended while this agent {what}; see logs/{worker.name}.log"
            )
        return AgentLost(f"{worker.name} ended with an agent that was not to blame")

    # --- What hangs -------------------------------------------------------------------------------

    def look(self) -> list[HungWorker]:
        """The workers to be ended now. Each is named once."""
        self._looks.came(self._now())
        words = (worker.words for worker in self._workers.values())
        self._delay = delay_of(self._looks, words, self._now())
        found: list[HungWorker] = []
        for worker in self._workers.values():
            why = None if worker.condemned else self._hangs(worker)
            if why is not None:
                found.append(HungWorker(worker.name, why))
        for hung in found:
            worker = self._workers[hung.name]
            worker.condemned = True
            if worker.culprit is not None:
                self._all_alone(hung.why)
        return found

    def _hangs(self, worker: PoolWorker) -> str | None:
        """Returns the reason for which the worker has to be ended, or None if it need not be."""
        silence = self._silence(worker)
        culprit = worker.culprit
        grace = GRACE_SECONDS + self._delay
        overdue = sum(self._now() - since > grace for since in worker.left.values())
        if silence and culprit in worker.left:
            if self._now() - worker.left[culprit] > grace:
                return (
                    f"{worker.name} was blocked for {silence:.0f} s, past the deadline of the "
                    f"rollout that did it, in {worker.where}"
                )
            return None
        if silence and culprit is not None:
            return self._holds_up(worker, culprit, silence)
        if silence > self._bound() + REST_SECONDS:
            return (
                f"{worker.name} was not heard of for {silence:.0f} s: its connection is lost, or "
                "an agent's code holds the interpreter"
            )
        if not silence and overdue >= MAX_LEFT:
            return f"{worker.name} has {overdue} agents that did not end with their rollouts"
        return None

    def _holds_up(self, worker: PoolWorker, culprit: str, silence: float) -> str | None:
        """Returns the reason for which the worker has to be ended, if an agent blocks it and holds
        up others, or None.
        """
        is_alone = len(worker.jobs) == 1
        if is_alone or silence < self._bound():
            return None  # alone in its worker, an agent has all of its deadline
        if culprit in worker.jobs and self._waits_for_gateway(worker.jobs[culprit]):
            return None  # it does nothing that could hang
        worker.spared = True
        for job in worker.jobs.values():
            job.alone = True
        others = len(worker.jobs) - 1
        return (
            f"an agent blocks the event loop of {worker.name} since {silence:.0f} s, in "
            f"{worker.where}, and holds up {others} others"
        )

    # --- Inside -----------------------------------------------------------------------------------

    def _put(self, job: Assignment) -> None:
        job.since = self._now()
        job.worker = None
        self._line.append(job)
        self._assign()

    def _withdraw(self, job: Assignment) -> None:
        session_id = job.session.session_id
        del self._jobs[session_id]
        if job.worker is None:
            if job in self._line:
                self._line.remove(job)
        elif session_id in job.worker.jobs:
            del job.worker.jobs[session_id]
            job.worker.left[session_id] = self._now()
            job.worker.outlet.cancel(session_id)

    def _assign(self) -> None:
        """Gives the waiting rollouts to the workers. A rollout that is to be alone waits for a
        worker without any, and one worker is kept free for it.
        """
        now = self._now()
        kept = deque[Assignment]()
        while self._line:
            job = self._line.popleft()
            worker = self._worker_for(job, kept)
            if worker is None:
                kept.append(job)
            else:
                job.worker = worker
                job.excused += now - job.since
                worker.jobs[job.session.session_id] = job
                worker.outlet.run(job)
        self._line = kept

    def _worker_for(self, job: Assignment, before: deque[Assignment]) -> PoolWorker | None:
        """The worker for a rollout, or None. `before` are the rollouts that wait before it."""
        free = [worker for worker in self._workers.values() if self._takes_more(worker)]
        free.sort(key=lambda worker: len(worker.jobs))
        if self.alone or job.alone:
            job.alone = True
            return free[0] if free and not free[0].jobs else None
        if any(other.alone for other in before):
            free = free[1:]  # the first worker that has no rollout is kept for those
        return free[0] if free else None

    def _takes_more(self, worker: PoolWorker) -> bool:
        if worker.condemned or self._silence(worker):
            return False
        return not any(job.alone for job in worker.jobs.values())

    def _all_alone(self, why: str) -> None:
        if not self.alone:
            self.alone = True
            self._say(
                f"{why}. From now on each rollout is alone in its worker, as many at once as there "
                "are workers. Await what waits, or write the agent as a plain `def`: each rollout "
                "then has a thread."
            )

    def _waits_for_gateway(self, job: Assignment) -> bool:
        return job.attempts is None and self._recorder.awaits(job.session.session_id)

    def _silence(self, worker: PoolWorker) -> float:
        """Seconds without a message, or 0 while they are few."""
        seconds = self._now() - worker.heard
        if seconds <= SILENT_BEATS * BEAT_SECONDS + self._delay:
            return 0.0
        return seconds

    def _bound(self) -> float:
        """Seconds of silence after which a worker hangs."""
        return self._stall_seconds + self._delay

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _written(task: Task) -> str:
    try:
        return json.dumps(dict(task.data))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(
            f"giving task {task.id} of {task.source} to a worker: {error}. Let its data be plain "
            "JSON, or set environment.workers = 0."
        ) from error
