"""The state of the rollout process, for the launcher: the work that waits here for other parts, the
rollouts that run, and the engines that are away.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from midflight.buffer.books import FOR_TASKS
from midflight.buffer.queue import GroupQueue
from midflight.environments.claimed import Board
from midflight.environments.rollout import GRACE_SECONDS
from midflight.environments.rollout_time import RolloutTime
from midflight.environments.worker_pool import HERE, RolloutPlacement
from midflight.observe.readable import unclaimed_words
from midflight.run.heartbeat import ENDLESS, Absence, Doing, LoopReport
from midflight.run.rollout.serving import Agents, Serving

MAX_ROLLOUTS = 3
"""The number of the oldest rollouts that are shown, because a batch waits for these. As many of
those that wait for a worker are shown.
"""
PARTS = {"trainer": "trainer", "handover": "trainer"}
"""The process that ends a wait, if that is another process."""


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
    """Makes this process's `LoopReport` for the launcher: what it waits for, its oldest rollouts,
    its absent engines.

    It is called on the event loop, every second. Its own times are the loop's; those of a beat are
    CLOCK_MONOTONIC.
    """

    def __init__(self, serving: Serving, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._serving = serving
        self._clock = clock
        self._agents: Agents | None = None
        self._queue: GroupQueue | None = None
        self._absent: dict[str, Absence] = {}
        self._placement: Callable[[str], RolloutPlacement] = lambda _: HERE
        self._board: Board | None = None
        self._grown: dict[str, tuple[tuple[int, int], float]] = {}
        """The progress of the oldest rollouts' answers, and since when it stands there, by
        session.
        """

    def watch(
        self,
        agents: Agents,
        queue: GroupQueue | None = None,
        *,
        placement: Callable[[str], RolloutPlacement] = lambda _: HERE,
        board: Board | None = None,
    ) -> None:
        """From now on there are rollouts too. `placement` gives the place of a session's rollout.
        Workers outside claim rollouts at `board`, if there is one.
        """
        self._agents = agents
        self._queue = queue
        self._placement = placement
        self._board = board

    def now(self) -> LoopReport:
        shift = self._clock() - asyncio.get_running_loop().time()
        self._serving.delay.turn()
        if self._queue is not None:
            self._queue.count_waits()
        doing = self._pause(shift) + self._waits(shift) + self._rollouts(shift)
        return LoopReport(tuple(doing), self._absences(), self._counters())

    def _pause(self, shift: float) -> list[Doing]:
        since = self._serving.control.paused_since
        if since is None:
            return []
        return [Doing("stands paused by the operator", since + shift, limit=ENDLESS)]

    def _waits(self, shift: float) -> list[Doing]:
        if self._queue is None:
            return []
        found: list[Doing] = []
        for who, one in self._queue.waits.items():
            part = one.wait.for_whom
            doing = Doing(
                f"{who} waits for {part} ({one.wait.detail})",
                one.began + shift,
                whom=PARTS.get(part, ""),
                limit=ENDLESS if part == FOR_TASKS else None,
            )
            found.append(doing)
        return found

    def _rollouts(self, shift: float) -> list[Doing]:
        """The oldest rollouts, each with the time for which nothing of it need move. An engine that
        is away is another finding. A rollout in line for a worker has no deadline: it moves by that
        worker alone.
        """
        if self._agents is None:
            return []
        run, wait = self._parted()
        oldest = run[:MAX_ROLLOUTS]
        self._grown = {one.session: self._growth(one.session) for one in oldest}
        found = [self._running(one, shift) for one in oldest]
        for one in wait[:MAX_ROLLOUTS]:
            what = f"rollout {one.key} waits for {one.part}"
            found.append(Doing(what, one.since + shift, whom=one.part))
        return found

    def _running(self, one: RunningRollout, shift: float) -> Doing:
        where = f" in {one.part}" if one.part else ""
        age = asyncio.get_running_loop().time() - one.since
        limit = age + self._may_stand(one.session, one.spent) + 2 * GRACE_SECONDS
        return Doing(
            f"runs rollout {one.key}{where}", one.since + shift, whom=one.part, limit=limit
        )

    def _parted(self) -> tuple[list[RunningRollout], list[RunningRollout]]:
        """Returns the rollouts whose agents run, and those that wait for a worker, the oldest
        first.
        """
        run = list[RunningRollout]()
        wait = list[RunningRollout]()
        if self._agents is None:
            return run, wait
        for runner in self._agents.runners:
            for session, spent in runner.times.items():
                key, since = runner.running[session]
                part, waits = self._placement(session)
                rollout = RunningRollout(since, str(key), session, part, spent)
                if waits:
                    wait.append(rollout)
                else:
                    run.append(rollout)
        return sorted(run, key=_age), sorted(wait, key=_age)

    def _may_stand(self, session: str, spent: RolloutTime) -> float:
        """The seconds for which a rollout may still stand without a move: the rest of its agent's
        own time, or of the time of an answer that does not grow.
        """
        if not spent.waits:
            return spent.left()
        grew = self._grown[session][1]
        seconds = self._serving.generator.request_seconds
        return grew + seconds - asyncio.get_running_loop().time()

    def _growth(self, session: str) -> tuple[tuple[int, int], float]:
        """Returns the progress of the session's answers, and since when it stands there."""
        now = asyncio.get_running_loop().time()
        asked = self._serving.gateway.registry.get(session)
        far = (asked.num_requests, asked.num_growing)
        known = self._grown.get(session)
        if known is not None and known[0] == far:
            return known
        return far, now

    def _absences(self) -> tuple[Absence, ...]:
        turns = self._serving.turns
        if turns is not None and turns.is_trainers:
            self._absent = {}  # no engine can come back now
        absent: dict[str, Absence] = {}
        for state in self._serving.states():
            if state.error is None:
                continue
            known = self._absent.get(state.name)
            absent[state.name] = known or Absence(state.name, self._clock(), str(state.error))
        self._absent = absent
        return tuple(absent.values())

    def _waits_for(self, session: str, spent: RolloutTime) -> str:
        """Returns a sentence that says what a rollout waits for, with its progress."""
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
            counts.append(f"{len(run)} rollouts run")
            if wait:
                counts.append(f"{len(wait)} wait for a worker")
            if run:
                oldest = run[0]
                state = self._waits_for(oldest.session, oldest.spent)
                counts.append(f"rollout {oldest.key} {state}")
        unclaimed = None if self._board is None else self._board.unclaimed()
        if unclaimed is not None:
            counts.append(unclaimed_words(unclaimed))
        counts.append(f"{fleet.num_waiting} requests wait for an engine")
        return ", ".join(counts)
