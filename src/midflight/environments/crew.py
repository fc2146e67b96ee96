"""Rollouts that worker processes run: who runs which, what of their deadlines was not theirs, and
what becomes of them when a worker hangs or dies. Synchronous but for `run`, which waits for one
agent.

A rollout waits in line until a worker takes it. If its worker is lost, either it is to blame and
has failed, or it begins again with another worker and is given its completed turns (I8): neither
its retries nor its deadline have been used up. To blame is

- nobody, where the launcher says so: the worker was stopped from outside;
- the rollout that blocked its worker's event loop, as the worker's own watch saw it;
- else the only one that the worker had, unless it was waiting for the gateway;
- else nobody yet. Those that were not waiting for the gateway begin again alone in a worker, so
  that the next time it is known.

Agents are judged here. Whether a worker lives is judged by the launcher's watchdog, which hears its
process; the crew hears its event loop, by the connection that rollouts come and go on. It asks the
launcher to end a worker

- whose loop an agent blocks that is past its rollout's deadline;
- whose loop an agent blocks for `stall_seconds`, not waiting for the gateway, while others are held
  up. All begin again, each alone, where the blocking one may go on to its deadline;
- of which nothing was heard for longer than `stall_seconds`: its connection is lost, or the
  launcher finds the same;
- with many agents that have not ended with their rollouts.

To all of these seconds comes the delay of words as it was measured, of this process or of half of
the workers.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Protocol, cast

from midflight.delays import Lateness, delay_of
from midflight.environments.scoring import Unjudged
from midflight.environments.tool_time import ToolTime
from midflight.errors import AgentFailed, AgentLost, EnvironmentFailed
from midflight.ports import SessionHandle
from midflight.types import Result, Task

BEAT_SECONDS = 1.0
"""Between two beats of a worker's event loop."""
LOOK_SECONDS = 1.0
"""Between two looks for workers that hang."""
SILENT_BEATS = 3
"""A worker that was not heard for so many beats is blocked, or stopped, or has no processor: it
gets nothing new, and its rollouts' time does not count, but for that of one that is known to block
it."""
REST_SECONDS = 2.0
"""Later than the launcher finds a worker's process stopped or silent: it knows why."""
MEMORY = 4
"""So many times `stall_seconds` a delay is remembered."""
GRACE_SECONDS = 5.0
"""For an agent whose rollout has ended to end too, and for its `finally` blocks."""
MAX_LEFT = 16
"""Agents of ended rollouts that a worker may have left running, such as threads that sleep; with
more it is started anew.
"""
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
    tools: ToolTime = field(default_factory=lambda: ToolTime())
    num_lost: int = 0
    """Workers that it was with when they died, and that it may have ended."""
    attempts: str | None = None
    """Of a group that has ended and is to be scored, as JSON; then there is no agent, and `session`
    is only a name.
    """


@dataclass(frozen=True, slots=True)
class GroupName:
    """Stands where a session would: the name of a group that is scored."""

    session_id: str
    base_url: str = ""
    api_key: str = ""


class Whereabouts(NamedTuple):
    """Where a rollout is that has begun."""

    part: str
    """The worker that has it, or that it waits for; empty where agents run in this process."""
    waits: bool = False
    """It is in line for a place there."""


HERE = Whereabouts("")


class ToWorker(Protocol):
    """The way to one worker. Synchronous; what is sent to a worker that has gone is lost, like all
    that was there.
    """

    def run(self, job: Assignment) -> None: ...
    def cancel(self, session_id: str) -> None: ...


@dataclass(slots=True, eq=False)
class Seat:
    """One worker, for as long as it is connected."""

    name: str
    outlet: ToWorker
    heard: float
    words: Lateness
    jobs: dict[str, Assignment] = field(default_factory=dict[str, Assignment])
    left: dict[str, float] = field(default_factory=dict[str, float])
    """Sessions whose rollout has ended, and since when its agent has not."""
    culprit: str | None = None
    """The session whose agent blocks the loop."""
    where: str = ""
    condemned: bool = False
    spared: bool = False
    """No agent is to blame for the worker's end."""

    def guilty(self) -> str | None:
        """The session that is to blame for the worker's death."""
        return self.culprit or (
            next(iter(self.jobs)) if len(self.jobs) == 1 and not self.left else None
        )


@dataclass(frozen=True, slots=True)
class HungWorker:
    """A worker to be ended, and why."""

    name: str
    why: str


class Crew:
    """Implements `AgentHost`. All connected workers, and the rollouts that they run or that wait
    for one.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        stall_seconds: float,
        names: Sequence[str] = (),
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`names` of the workers that there are to be. `say` is told what people should know."""
        self._recorder = recorder
        self._stall_seconds = stall_seconds
        self._names = names
        self._say = say
        self._looks = Lateness(LOOK_SECONDS, memory_seconds=MEMORY * stall_seconds)
        self._delay = 0.0
        """Of words, as of the last look."""
        self._line: deque[Assignment] = deque()
        self._seats: dict[str, Seat] = {}
        self._jobs: dict[str, Assignment] = {}
        self.alone = False
        """Whether every rollout is alone in its worker, because one was seen to block its loop."""

    # --- AgentHost --------------------------------------------------------------------------------

    async def run(self, task: Task, session: SessionHandle) -> object:
        """As the port. Waits for a worker and for the agent there; ended also by the loss of
        workers, when the agent is to blame.
        """
        loop = asyncio.get_running_loop()
        return await self._ended(
            Assignment(
                task, _written(task), session, loop.time(), loop.time(), loop.create_future()
            )
        )

    async def _ended(self, job: Assignment) -> object:
        """Waits for what the worker says of it; begins it again elsewhere while it is lost through
        no fault of its own.
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
                    job.tools = ToolTime()
        finally:
            self._withdraw(job)

    async def judge(
        self, task: Task, attempts: Sequence[Unjudged], *, name: str
    ) -> Sequence[Result]:
        """As the port, in a worker. Waits as `run` does."""
        loop = asyncio.get_running_loop()
        written = json.dumps([asdict(attempt) for attempt in attempts])
        job = Assignment(
            task,
            _written(task),
            GroupName(name),
            loop.time(),
            loop.time(),
            loop.create_future(),
            attempts=written,
        )
        return cast("Sequence[Result]", await self._ended(job))

    def excused(self, session_id: str) -> float:
        """See the port: the time in line, in a worker that somebody else blocks or that has no
        processor, and with workers that were lost.
        """
        job = self._jobs.get(session_id)
        if job is None:
            return 0.0
        if job.seat is None:
            return job.excused + self._now() - job.since
        return job.excused + (0.0 if job.seat.culprit == session_id else self._silence(job.seat))

    def whereabouts(self, session_id: str) -> Whereabouts:
        """Of one that is in line: the worker that has not joined, or that does nothing; else any,
        for all have too many.
        """
        job = self._jobs.get(session_id)
        if job is None:
            return HERE
        if job.seat is not None:
            return Whereabouts(job.seat.name)
        missing = [name for name in self._names if name not in self._seats]
        idle = [seat.name for seat in self._seats.values() if seat.condemned or self._silence(seat)]
        return Whereabouts(next(iter([*missing, *idle, *self._seats]), ""), waits=True)

    def tool_seconds(self, session_id: str) -> float:
        """See the port."""
        job = self._jobs.get(session_id)
        return 0.0 if job is None else job.tools.seconds()

    # --- What workers say -------------------------------------------------------------------------

    def join(self, name: str, outlet: ToWorker) -> Seat:
        words = Lateness(BEAT_SECONDS, memory_seconds=MEMORY * self._stall_seconds)
        seat = self._seats[name] = Seat(name, outlet, self._now(), words)
        self._assign()
        return seat

    def hear(self, seat: Seat) -> None:
        """Any word of the worker's loop: a silence is over, and nobody's but of whoever is known to
        have blocked it. A word that is late says that the machine or this process was busy, which
        is nobody's time either."""
        silence = self._silence(seat)
        late = max(0.0, self._now() - seat.heard - BEAT_SECONDS)
        for session_id, job in seat.jobs.items():
            job.excused += 0.0 if session_id == seat.culprit else (silence or late)
        seat.words.came(self._now(), counts=seat.culprit is None)
        seat.heard = self._now()
        seat.culprit = None
        if silence:
            self._assign()

    def blocked(self, name: str, session_id: str | None, *, where: str, seconds: float) -> None:
        """The worker's watch, which is a thread, sees its loop blocked, by this session's agent if
        that is known.
        """
        seat = self._seats.get(name)
        if seat is None:
            return
        if session_id in seat.jobs or session_id in seat.left:
            seat.culprit = session_id
        seat.where = where
        if seconds >= self._bound() and session_id is not None:
            self._all_alone(
                f"an agent blocks the event loop of {name} since {seconds:.0f} s, in {where}"
            )

    def spare(self, name: str) -> None:
        """The launcher is about to end the worker, for what no agent did."""
        if (seat := self._seats.get(name)) is not None:
            seat.condemned = seat.spared = True

    def in_tools(self, seat: Seat, session_id: str, limit: float | None) -> None:
        """The worker's agent runs tools, for `limit` seconds at most; None: no more."""
        if (job := seat.jobs.get(session_id)) is not None:
            job.tools.end() if limit is None else job.tools.begin(limit)

    def ended(
        self, seat: Seat, session_id: str, *, result: object = None, error: Exception | None = None
    ) -> None:
        """The worker's agent has ended, with its result or an error; or was cancelled, and nobody
        waits for it any more.
        """
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
        if seat.spared:
            return AgentLost(f"{seat.name} was ended for what no agent did")
        is_guilty = seat.guilty() == job.session.session_id
        if seat.culprit is None:
            waited = self._waits_for_gateway(job)
            is_guilty = is_guilty and not waited
            job.alone = job.alone or not waited or job.num_lost > 0
            job.num_lost += 1
        if is_guilty or job.num_lost >= MAX_LOST:
            what = f"blocked it in {seat.where}" if seat.culprit is not None else "ran in it"
            return AgentFailed(
                f"WorkerDied: {seat.name} ended while this agent {what}; see logs/{seat.name}.log"
            )
        return AgentLost(f"{seat.name} ended with an agent that was not to blame")

    # --- What hangs -------------------------------------------------------------------------------

    def look(self) -> list[HungWorker]:
        """The workers to be ended now. Each is named once."""
        self._looks.came(self._now())
        self._delay = delay_of(
            self._looks, (seat.words for seat in self._seats.values()), self._now()
        )
        found = [
            HungWorker(seat.name, why)
            for seat in self._seats.values()
            if not seat.condemned and (why := self._hangs(seat))
        ]
        for hung in found:
            self._seats[hung.name].condemned = True
            if self._seats[hung.name].culprit is not None:
                self._all_alone(hung.why)
        return found

    def _hangs(self, seat: Seat) -> str | None:
        """Why the worker is to be ended, if it is."""
        silence = self._silence(seat)
        culprit = seat.culprit
        grace = GRACE_SECONDS + self._delay
        overdue = sum(self._now() - since > grace for since in seat.left.values())
        if silence and culprit in seat.left:
            if self._now() - seat.left[culprit] > grace:
                return (
                    f"{seat.name} was blocked for {silence:.0f} s, past the deadline of the "
                    f"rollout that did it, in {seat.where}"
                )
            return None
        if silence and culprit is not None:
            return self._holds_up(seat, culprit, silence)
        if silence > self._bound() + REST_SECONDS:
            return (
                f"{seat.name} was not heard of for {silence:.0f} s: its connection is lost, or "
                "an agent's code holds the interpreter"
            )
        if not silence and overdue >= MAX_LEFT:
            return f"{seat.name} has {overdue} agents that did not end with their rollouts"
        return None

    def _holds_up(self, seat: Seat, culprit: str, silence: float) -> str | None:
        """An agent alone in its worker has all of its deadline. One that waits for the gateway does
        nothing that could hang.
        """
        if (
            len(seat.jobs) == 1
            or silence < self._bound()
            or (culprit in seat.jobs and self._waits_for_gateway(seat.jobs[culprit]))
        ):
            return None
        seat.spared = True
        for job in seat.jobs.values():
            job.alone = True
        others = len(seat.jobs) - 1
        return (
            f"an agent blocks the event loop of {seat.name} since {silence:.0f} s, in "
            f"{seat.where}, and holds up {others} others"
        )

    # --- Inside -----------------------------------------------------------------------------------

    def _put(self, job: Assignment) -> None:
        job.since = self._now()
        job.seat = None
        self._line.append(job)
        self._assign()

    def _withdraw(self, job: Assignment) -> None:
        session_id = job.session.session_id
        del self._jobs[session_id]
        if job.seat is None:
            if job in self._line:
                self._line.remove(job)
        elif session_id in job.seat.jobs:
            del job.seat.jobs[session_id]
            job.seat.left[session_id] = self._now()
            job.seat.outlet.cancel(session_id)

    def _assign(self) -> None:
        """Gives whoever waits to the workers. A rollout that is to be alone waits for a worker
        without any; one is kept free for it.
        """
        now = self._now()
        kept = deque[Assignment]()
        while self._line:
            job = self._line.popleft()
            if (seat := self._seat_for(job, kept)) is None:
                kept.append(job)
            else:
                job.seat = seat
                job.excused += now - job.since
                seat.jobs[job.session.session_id] = job
                seat.outlet.run(job)
        self._line = kept

    def _seat_for(self, job: Assignment, before: deque[Assignment]) -> Seat | None:
        able = [
            seat for seat in self._seats.values() if not seat.condemned and not self._silence(seat)
        ]
        free = sorted(
            (seat for seat in able if not any(other.alone for other in seat.jobs.values())),
            key=lambda seat: len(seat.jobs),
        )
        if self.alone or job.alone:
            job.alone = True
            return free[0] if free and not free[0].jobs else None
        kept = any(other.alone for other in before)  # the first that will have none is theirs
        return next(iter(free[kept:]), None)

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

    def _silence(self, seat: Seat) -> float:
        """Seconds without a word, 0 while they are few."""
        seconds = self._now() - seat.heard
        return seconds if seconds > SILENT_BEATS * BEAT_SECONDS + self._delay else 0.0

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
