"""What the rollout process is doing, for the launcher: who waits here for whom, which rollouts run,
which engines are away.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from midflight.buffer.books import FOR_TASKS
from midflight.buffer.queue import GroupQueue
from midflight.environments.claimed import Board
from midflight.environments.crew import HERE, Whereabouts
from midflight.environments.rollout import GRACE_SECONDS
from midflight.environments.rollout_time import RolloutTime
from midflight.observe.readable import unclaimed_words
from midflight.run.heart import ENDLESS, Absence, Doing, Situation
from midflight.run.rollout.serving import Agents, Serving

MAX_ROLLOUTS = 3
"""The oldest of those that run, which are what a batch waits for, and as many of those that wait
for a worker.
"""
PARTS = {"trainer": "trainer", "handover": "trainer"}
"""The process that ends a wait, where it is another one."""


class RunningRollout(NamedTuple):
    """A rollout that has begun, in the loop's time."""

    since: float
    key: str
    session: str
    part: str
    spent: RolloutTime


def _age(one: "RunningRollout") -> tuple[float, str]:
    return one.since, one.key


class RolloutStanding:
    """Read on the loop, every second. Its own times are the loop's; a beat's are
    CLOCK_MONOTONIC.
    """

    def __init__(self, serving: Serving, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._serving = serving
        self._clock = clock
        self._agents: Agents | None = None
        self._queue: GroupQueue | None = None
        self._absent: dict[str, Absence] = {}
        self._whereabouts: Callable[[str], Whereabouts] = lambda _: HERE
        self._board: Board | None = None
        self._grown: dict[str, tuple[tuple[int, int], float]] = {}
        """Of the oldest rollouts, how far their answers are, and since when."""

    def watch(
        self,
        agents: Agents,
        queue: GroupQueue | None = None,
        *,
        whereabouts: Callable[[str], Whereabouts] = lambda _: HERE,
        board: Board | None = None,
    ) -> None:
        """From now on there are rollouts too; `whereabouts` of each, by its session. `board`: where
        workers outside claim them.
        """
        self._agents = agents
        self._queue = queue
        self._whereabouts = whereabouts
        self._board = board

    def now(self) -> Situation:
        shift = self._clock() - asyncio.get_running_loop().time()
        self._serving.delay.turn()
        if self._queue is not None:
            self._queue.count_waits()
        return Situation(
            (*self._pause(shift), *self._waits(shift), *self._rollouts(shift)),
            self._absences(),
            self._counters(),
        )

    def _pause(self, shift: float) -> tuple[Doing, ...]:
        since = self._serving.control.paused_since
        return (
            ()
            if since is None
            else (Doing("stands paused by the operator", since + shift, limit=ENDLESS),)
        )

    def _waits(self, shift: float) -> list[Doing]:
        waits = {} if self._queue is None else self._queue.waits
        return [
            Doing(
                f"{who} waits for {one.wait.for_whom} ({one.wait.detail})",
                one.began + shift,
                whom=PARTS.get(one.wait.for_whom, ""),
                limit=ENDLESS if one.wait.for_whom == FOR_TASKS else None,
            )
            for who, one in waits.items()
        ]

    def _rollouts(self, shift: float) -> list[Doing]:
        """Each of the oldest, for as long as nothing of it need move. An engine that is away is
        another finding. In line for a worker it has no deadline: nothing of it moves but by that
        worker."""
        if self._agents is None:
            return []
        run, wait = self._parted()
        oldest = run[:MAX_ROLLOUTS]
        self._grown = {one.session: self._growth(one.session) for one in oldest}
        said = [self._running(one, shift) for one in oldest]
        return said + [
            Doing(f"rollout {one.key} waits for {one.part}", one.since + shift, whom=one.part)
            for one in wait[:MAX_ROLLOUTS]
        ]

    def _running(self, one: RunningRollout, shift: float) -> Doing:
        where = f" in {one.part}" if one.part else ""
        age = asyncio.get_running_loop().time() - one.since
        limit = age + self._may_stand(one.session, one.spent) + 2 * GRACE_SECONDS
        return Doing(
            f"runs rollout {one.key}{where}", one.since + shift, whom=one.part, limit=limit
        )

    def _parted(self) -> tuple[list[RunningRollout], list[RunningRollout]]:
        """The rollouts whose agents run, and those that wait for a worker, the oldest first."""
        run = list[RunningRollout]()
        wait = list[RunningRollout]()
        for runner in self._agents.runners if self._agents is not None else ():
            for session, spent in runner.times.items():
                key, since = runner.running[session]
                part, waits = self._whereabouts(session)
                (wait if waits else run).append(
                    RunningRollout(since, str(key), session, part, spent)
                )
        return sorted(run, key=_age), sorted(wait, key=_age)

    def _may_stand(self, session: str, spent: RolloutTime) -> float:
        """Seconds before nothing excuses any more that it does not move: its agent's own time, or
        that of an answer that does not grow.
        """
        if not spent.waits:
            return spent.left()
        grew = self._grown[session][1]
        seconds = self._serving.generator.request_seconds
        return grew + seconds - asyncio.get_running_loop().time()

    def _growth(self, session: str) -> tuple[tuple[int, int], float]:
        """How far its answers are, and since when."""
        now = asyncio.get_running_loop().time()
        asked = self._serving.gateway.registry.get(session)
        far = (asked.num_requests, asked.num_growing)
        known = self._grown.get(session)
        return known if known is not None and known[0] == far else (far, now)

    def _absences(self) -> tuple[Absence, ...]:
        away = {
            state.name: str(state.error)
            for state in self._serving.states()
            if state.error is not None
        }
        self._absent = {
            name: self._absent.get(name) or Absence(name, self._clock(), error)
            for name, error in away.items()
        }
        return tuple(self._absent.values())

    def _waits_for(self, session: str, spent: RolloutTime) -> str:
        """What a rollout waits for, with its progress."""
        asked = self._serving.gateway.registry.get(session)
        if not spent.waits:
            return f"is in its agent's hands, which took {spent.own:.0f} s by itself"
        if self._serving.outage.is_running:
            return "waits for an engine that takes requests"
        return (
            f"waits for the answer to request {asked.num_requests}, {asked.num_growing} tokens "
            "so far"
        )

    def _counters(self) -> str:
        fleet = self._serving.fleet
        counts = [
            f"{state.name} has {state.num_requests} requests at version {state.version}"
            for state in self._serving.states()
        ]
        if self._agents is not None:
            run, wait = self._parted()
            counts.append(
                f"{len(run)} rollouts run" + (f", {len(wait)} wait for a worker" if wait else "")
            )
            counts += [
                f"rollout {one.key} {self._waits_for(one.session, one.spent)}" for one in run[:1]
            ]
        if self._board is not None and (found := self._board.unclaimed()) is not None:
            counts.append(unclaimed_words(found))
        return ", ".join([*counts, f"{fleet.num_waiting} requests wait for an engine"])
