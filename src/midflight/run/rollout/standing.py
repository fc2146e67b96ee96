"""What the rollout process is doing, for the launcher: who waits here for whom, which rollouts run, which engines are away."""

import asyncio
import time
from collections.abc import Callable

from midflight.buffer.books import FOR_TASKS
from midflight.buffer.queue import GroupQueue
from midflight.environments.rollout import GRACE_SECONDS
from midflight.run.heart import ENDLESS, Absence, Doing, Situation
from midflight.run.rollout.serving import Agents, Serving

MAX_ROLLOUTS = 3
"""The oldest of those that run, which are what a batch waits for."""
PARTS = {"trainer": "trainer", "handover": "trainer"}
"""The process that ends a wait, where it is another one."""


class RolloutStanding:
    """Read on the loop, every second. Its own times are the loop's; a beat's are CLOCK_MONOTONIC."""

    def __init__(self, serving: Serving, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._serving, self._clock = serving, clock
        self._agents: Agents | None = None
        self._queue: GroupQueue | None = None
        self._absent: dict[str, Absence] = {}

    def watch(self, agents: Agents, queue: GroupQueue | None = None) -> None:
        """From now on there are rollouts too."""
        self._agents, self._queue = agents, queue

    def now(self) -> Situation:
        shift = self._clock() - asyncio.get_running_loop().time()
        if self._queue is not None:
            self._queue.count_waits()
        return Situation((*self._pause(shift), *self._waits(shift), *self._rollouts(shift)), self._absences(), self._counters())

    def _pause(self, shift: float) -> tuple[Doing, ...]:
        since = self._serving.control.paused_since
        return () if since is None else (Doing("stands paused by the operator", since + shift, limit=ENDLESS),)

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
        """Each may last as long as its deadline, the graces and all pauses; an engine that is away is another finding."""
        if self._agents is None:
            return []
        host = self._agents.host
        running = sorted((since, str(key), session) for r in self._agents.runners for session, (key, since) in r.running.items())
        limit = self._agents.config.environment.rollout_seconds + 2 * GRACE_SECONDS + self._serving.control.paused_seconds()
        return [Doing(f"runs rollout {key}", since + shift, limit=limit + host.excused(s)) for since, key, s in running[:MAX_ROLLOUTS]]

    def _absences(self) -> tuple[Absence, ...]:
        away = {state.name: str(state.error) for state in self._serving.states() if state.error is not None}
        self._absent = {name: self._absent.get(name) or Absence(name, self._clock(), error) for name, error in away.items()}
        return tuple(self._absent.values())

    def _counters(self) -> str:
        fleet = self._serving.fleet
        counts = [f"{state.name} has {state.num_requests} requests at version {state.version}" for state in self._serving.states()]
        if self._agents is not None:
            counts.append(f"{sum(len(runner.running) for runner in self._agents.runners)} rollouts run")
        return ", ".join([*counts, f"{fleet.num_waiting} requests wait for an engine"])
