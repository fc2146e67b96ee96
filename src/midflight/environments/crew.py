"""Rollouts that worker processes run: who runs which, what of their deadlines was not theirs, and what becomes of them when a worker
hangs or dies. Synchronous but for `run`, which waits for one agent.

A rollout waits in line until a worker takes it. If its worker is lost, either it is to blame and has failed, or it begins again with
another worker and is given its completed turns (I8): neither its retries nor its deadline have been used up. To blame is

- the rollout that blocked its worker's event loop, as the worker's own watch saw it;
- else the only one that the worker had, unless it was waiting for the gateway;
- else nobody yet. Those that were not waiting for the gateway begin again alone in a worker, so that the next time it is known.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol, cast

from midflight.environments.scoring import Unjudged
from midflight.errors import AgentFailed, AgentLost, EnvironmentFailed
from midflight.ports import SessionHandle
from midflight.types import Result, Task

SILENT_SECONDS = 3.0
"""A worker that beats every second and was not heard for so long is blocked, or stopped, or has no processor."""
GRACE_SECONDS = 5.0
"""For an agent whose rollout has ended to end too, and for its `finally` blocks."""
BLOCKING_SECONDS = 10.0
"""Once an agent has blocked its worker's loop for so long, every further rollout is alone in its worker."""
UNSEEN_SECONDS = 60.0
"""For a silent worker of which nobody knows what it does: it is stopped, or foreign code holds the interpreter."""
MAX_LEFT = 16
"""Agents of ended rollouts that a worker may have left running, such as threads that sleep; with more it is started anew."""
MAX_LOST = 3
"""Workers that a rollout may lose before it counts as their death's cause."""


class Recorder(Protocol):
    """The gateway, as far as agents that begin again need it."""

    def reopen(self, session_id: str) -> SessionHandle: ...
    def awaits(self, session_id: str) -> bool: ...


@dataclass(slots=True, eq=False)
class Assignment:
    """A rollout that a worker is to run, until it has ended."""

    task: Task
    data: str
    """The task's, as JSON."""
    session: SessionHandle
    began: float
    since: float
    """When it was put in line."""
    ended: asyncio.Future[object]
    alone: bool = False
    seat: Seat | None = None
    excused: float = 0.0
    num_lost: int = 0
    """Workers that it was with when they died, and that it may have ended."""
    attempts: str | None = None
    """Of a group that has ended and is to be scored, as JSON; then there is no agent, and `session` is only a name."""


@dataclass(frozen=True, slots=True)
class GroupName:
    """Stands where a session would: the name of a group that is scored."""

    session_id: str
    base_url: str = ""
    api_key: str = ""


class ToWorker(Protocol):
    """The way to one worker. Synchronous; what is sent to a worker that has gone is lost, like all that was there."""

    def run(self, job: Assignment) -> None: ...
    def cancel(self, session_id: str) -> None: ...


@dataclass(slots=True, eq=False)
class Seat:
    """One worker, for as long as it is connected."""

    name: str
    outlet: ToWorker
    heard: float
    jobs: dict[str, Assignment] = field(default_factory=dict[str, Assignment])
    left: dict[str, float] = field(default_factory=dict[str, float])
    """Sessions whose rollout has ended, and since when its agent has not."""
    culprit: str | None = None
    """The session whose agent blocks the loop."""
    where: str = ""
    condemned: bool = False

    def silence(self, now: float) -> float:
        """Seconds without a word, 0 while they are few."""
        return now - self.heard if now - self.heard > SILENT_SECONDS else 0.0

    def guilty(self) -> str | None:
        """The session that is to blame for a silence."""
        return self.culprit or (next(iter(self.jobs)) if len(self.jobs) == 1 and not self.left else None)


@dataclass(frozen=True, slots=True)
class HungWorker:
    """A worker to be ended, and why."""

    name: str
    why: str


class Crew:
    """Implements `AgentHost`. All connected workers, and the rollouts that they run or that wait for one."""

    def __init__(self, recorder: Recorder, *, say: Callable[[str], None] = lambda _: None) -> None:
        """`say` is told what people should know."""
        self._recorder, self._say = recorder, say
        self._line: deque[Assignment] = deque()
        self._seats: dict[str, Seat] = {}
        self._jobs: dict[str, Assignment] = {}
        self._num_judged = 0
        self.alone = False
        """Whether every rollout is alone in its worker, because one was seen to block its loop."""

    # --- AgentHost ---------------------------------------------------------------------------------------------------

    async def run(self, task: Task, session: SessionHandle) -> object:
        """As the port. Waits for a worker and for the agent there; ended also by the loss of workers, when the agent is to blame."""
        loop = asyncio.get_running_loop()
        return await self._ended(Assignment(task, _written(task), session, loop.time(), loop.time(), loop.create_future()))

    async def _ended(self, job: Assignment) -> object:
        """Waits for what the worker says of it; begins it again elsewhere while it is lost through no fault of its own."""
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
                    job.ended, job.excused = loop.create_future(), loop.time() - job.began
        finally:
            self._withdraw(job)

    async def judge(self, task: Task, attempts: Sequence[Unjudged]) -> Sequence[Result]:
        """As the port, in a worker. Waits as `run` does."""
        self._num_judged += 1
        name = GroupName(f"group-{self._num_judged}")
        loop = asyncio.get_running_loop()
        written = json.dumps([asdict(attempt) for attempt in attempts])
        job = Assignment(task, _written(task), name, loop.time(), loop.time(), loop.create_future(), attempts=written)
        return cast("Sequence[Result]", await self._ended(job))

    def excused(self, session_id: str) -> float:
        """See the port: the time in line, in a worker that somebody else blocks, and with workers that were lost."""
        job = self._jobs.get(session_id)
        if job is None:
            return 0.0
        if job.seat is None:
            return job.excused + self._now() - job.since
        return job.excused + (0.0 if job.seat.guilty() == session_id else job.seat.silence(self._now()))

    # --- What workers say --------------------------------------------------------------------------------------------

    def join(self, name: str, outlet: ToWorker) -> Seat:
        seat = self._seats[name] = Seat(name, outlet, self._now())
        self._assign()
        return seat

    def hear(self, seat: Seat) -> None:
        """Any word of the worker's loop: a silence is over, and nobody else's."""
        now = self._now()
        if silence := seat.silence(now):
            guilty = seat.guilty()
            for session_id, job in seat.jobs.items():
                job.excused += 0.0 if session_id == guilty else silence
        seat.heard, seat.culprit = now, None
        if silence:
            self._assign()

    def blocked(self, name: str, session_id: str | None, *, where: str, seconds: float) -> None:
        """The worker's watch, which is a thread, sees its loop blocked, by this session's agent if that is known."""
        seat = self._seats.get(name)
        if seat is None:
            return
        if session_id in seat.jobs or session_id in seat.left:
            seat.culprit = session_id
        seat.where = where
        if seconds >= BLOCKING_SECONDS and session_id is not None:
            self._all_alone(f"an agent blocks the event loop of {name} since {seconds:.0f} s, in {where}")

    def ended(self, seat: Seat, session_id: str, *, result: object = None, error: Exception | None = None) -> None:
        """The worker's agent has ended, with its result or an error; or was cancelled, and nobody waits for it any more."""
        seat.left.pop(session_id, None)
        job = seat.jobs.pop(session_id, None)
        if job is not None and not job.ended.done():
            job.ended.set_result(result) if error is None else job.ended.set_exception(error)
        self._assign()

    def leave(self, seat: Seat) -> None:
        """The worker is gone, and its agents with it."""
        if self._seats.get(seat.name) is seat:
            del self._seats[seat.name]
        for job in [job for job in seat.jobs.values() if not job.ended.done()]:
            job.ended.set_exception(self._loss(seat, job))
        seat.jobs.clear()

    def _loss(self, seat: Seat, job: Assignment) -> AgentFailed | AgentLost:
        """Whether a rollout has failed with its worker, or begins again."""
        is_guilty = seat.guilty() == job.session.session_id
        if seat.culprit is None:
            waited = job.attempts is None and self._recorder.awaits(job.session.session_id)
            is_guilty = is_guilty and not waited
            job.alone = job.alone or not waited or job.num_lost > 0
            job.num_lost += 1
        if is_guilty or job.num_lost >= MAX_LOST:
            what = f"blocked it in {seat.where}" if seat.culprit is not None else "ran in it"
            return AgentFailed(f"WorkerDied: {seat.name} ended while this agent {what}; see logs/{seat.name}.log")
        return AgentLost(f"{seat.name} ended with an agent that was not to blame")

    # --- What hangs --------------------------------------------------------------------------------------------------

    def look(self) -> list[HungWorker]:
        """The workers to be ended now. Each is named once."""
        now = self._now()
        found = [HungWorker(seat.name, why) for seat in self._seats.values() if not seat.condemned and (why := _hangs(seat, now))]
        for hung in found:
            self._seats[hung.name].condemned = True
            if self._seats[hung.name].culprit is not None:
                self._all_alone(hung.why)
        return found

    # --- Inside ------------------------------------------------------------------------------------------------------

    def _put(self, job: Assignment) -> None:
        job.seat, job.since = None, self._now()
        self._line.append(job)
        self._assign()

    def _withdraw(self, job: Assignment) -> None:
        session_id = job.session.session_id
        del self._jobs[session_id]
        if job.seat is None:
            if job in self._line:
                self._line.remove(job)
        elif session_id in job.seat.jobs:
            if job.seat.silence(self._now()):
                job.seat.culprit = job.seat.guilty()
            del job.seat.jobs[session_id]
            job.seat.left[session_id] = self._now()
            job.seat.outlet.cancel(session_id)

    def _assign(self) -> None:
        """Gives whoever waits to the workers. A rollout that is to be alone waits for a worker without any; one is kept free for it."""
        now, kept = self._now(), deque[Assignment]()
        while self._line:
            job = self._line.popleft()
            if (seat := self._seat_for(job, now, kept)) is None:
                kept.append(job)
            else:
                job.seat = seat
                job.excused += now - job.since
                seat.jobs[job.session.session_id] = job
                seat.outlet.run(job)
        self._line = kept

    def _seat_for(self, job: Assignment, now: float, before: deque[Assignment]) -> Seat | None:
        able = [seat for seat in self._seats.values() if not seat.condemned and not seat.silence(now)]
        free = sorted((seat for seat in able if not any(other.alone for other in seat.jobs.values())), key=lambda seat: len(seat.jobs))
        if self.alone or job.alone:
            job.alone = True
            return free[0] if free and not free[0].jobs else None
        kept = any(other.alone for other in before)  # the first that will have none is theirs
        return next(iter(free[kept:]), None)

    def _all_alone(self, why: str) -> None:
        if not self.alone:
            self.alone = True
            self._say(
                f"{why}. From now on each rollout is alone in its worker, as many at once as there are workers. Await what "
                "waits, or write the agent as a plain `def`: each rollout then has a thread."
            )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _written(task: Task) -> str:
    try:
        return json.dumps(dict(task.data))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(
            f"giving task {task.id} of {task.source} to a worker: {error}. Let its data be plain JSON, or set environment.workers = 0."
        ) from error


def _hangs(seat: Seat, now: float) -> str | None:
    """Why the worker is to be ended, if it is."""
    silence, guilty = seat.silence(now), seat.guilty()
    overdue = sum(now - since > GRACE_SECONDS for since in seat.left.values())
    if silence and guilty is not None:
        over = seat.left.get(guilty)
        if over is not None and now - over > GRACE_SECONDS:
            return f"{seat.name} was blocked for {silence:.0f} s, past the deadline of the rollout that did it, in {seat.where}"
        return None
    if silence > UNSEEN_SECONDS:
        return f"{seat.name} was not heard of for {silence:.0f} s: it is stopped, or an agent's code holds the interpreter"
    if not silence and overdue >= MAX_LEFT:
        return f"{seat.name} has {overdue} agents that did not end with their rollouts"
    return None
