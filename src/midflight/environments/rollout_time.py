"""The time of a rollout, by its uses: its agent's own work, which is limited, and all its waits. It
is synchronous.

    own    = seconds with no request under way, less what its host excuses:
             no place to run, a busy machine, programs that wait for a processor,
             tools within their limits
    whole  = all seconds, less those without a place to run,
             those in which programs wait for a processor,
             and those in which no engine took requests

A rollout is late when `own` has reached `rollout_seconds`, or when `whole` has reached the last
bound.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

from midflight.config.bounds import RolloutBound
from midflight.ports import RequestWatch


class HostOfAgents(Protocol):
    """The part of an `AgentHost` that is used here."""

    def excused(self, session_id: str) -> float: ...
    def tool_seconds(self, session_id: str) -> float: ...


def unbounded() -> RolloutBound:
    return RolloutBound(math.inf)


class RolloutTime:
    """The time of one rollout under way. Its own time grows between two events of the `watch`, or
    not at all.
    """

    def __init__(
        self,
        session_id: str,
        *,
        own_seconds: float,
        bound: Callable[[], RolloutBound],
        watch: RequestWatch,
        host: HostOfAgents,
        waited: Callable[[], float],
        delayed: Callable[[], float],
        outage: Callable[[], float],
    ) -> None:
        """`waited` gives the seconds so far in which the rollout's programs waited for a processor,
        if the agent runs in this process. `delayed` gives those in which this process had no
        processor, if the agent runs here. `outage` gives those in which no engine took requests.
        """
        self._session_id = session_id
        self._own_seconds = own_seconds
        self._bound = bound
        self._watch = watch
        self._host = host
        self._programs_waited = waited
        self._delayed = delayed
        self._outage = outage
        self._loop = asyncio.get_running_loop()
        self.began = self._loop.time()
        self._at = self.began
        self._own = 0.0
        self._waited = watch.waits
        self._num_restarts = watch.num_restarts
        """The number of restarts at the last look."""
        self._excused = self._now_excused()
        self._outage_before = outage()
        self.on_change: Callable[[], None] | None = None
        """It is called when the rollout's own time begins to be spent again."""
        watch.on_change = self._changed

    def close(self) -> None:
        """The rollout is over."""
        self._advance()
        self._watch.on_change = None
        self.on_change = None

    @property
    def own(self) -> float:
        self._advance()
        return self._own

    @property
    def whole(self) -> float:
        outage = self._outage() - self._outage_before
        excused = self._host.excused(self._session_id) + self._programs_waited() + outage
        return max(0.0, self._loop.time() - self.began - excused)

    def left(self) -> float:
        """Seconds that must pass before the rollout can be late. They are infinite while nothing
        that is limited is spent.
        """
        self._advance()
        own = math.inf if self._waited else self._own_seconds - self._own
        bound = self._bound().seconds
        if bound == math.inf:
            return own
        return min(own, bound - self.whole)

    @property
    def waits(self) -> bool:
        """True if a request is under way."""
        return self._watch.waits

    def why_late(self) -> str:
        """Returns a text with the limit that the rollout has reached, the seconds that counted,
        those that did not, and the remedy.
        """
        own = self.own
        requests = self._watch.read()
        tools = self._host.tool_seconds(self._session_id)
        asked = f"{requests.num_requests} request{'' if requests.num_requests == 1 else 's'}"
        if own >= self._own_seconds * (1 - 1e-6):
            left_out: list[str] = []
            if requests.num_requests:
                left_out.append(f"{requests.seconds:.0f} s of {asked}")
            if tools:
                left_out.append(f"{tools:.0f} s of tools")
            excused = self._excused - tools
            if excused >= 1:
                left_out.append(f"{excused:.0f} s without a place to run or a processor")
            counted = f"its agent took {own:.0f} s by itself"
            if left_out:
                counted += f" ({', '.join(left_out)} left out)"
            return (
                f"{counted}, and environment.rollout_seconds is {self._own_seconds:g}; raise "
                "it, or give the agent a limit of its own"
            )
        bound = self._bound()
        return (
            f"it took {self.whole:.0f} s with {asked}, and {bound.seconds:.0f} s are the last "
            f"bound: {bound.words}; set environment.max_rollout_seconds, or let the agent stop "
            "asking"
        )

    def _changed(self) -> None:
        self._advance()
        if self.on_change is not None and not self._waited:
            self.on_change()

    def _advance(self) -> None:
        """Adds the time since the last look. Time that was excused while a request was under way is
        not subtracted again.
        """
        now = self._loop.time()
        excused = self._now_excused()
        if not self._waited:
            self._own = max(0.0, self._own + (now - self._at) - (excused - self._excused))
        if self._watch.num_restarts != self._num_restarts:
            self._num_restarts = self._watch.num_restarts
            self._own = 0.0
        self._at = now
        self._excused = excused
        self._waited = self._watch.waits

    def _now_excused(self) -> float:
        return (
            self._host.excused(self._session_id)
            + self._programs_waited()
            + self._host.tool_seconds(self._session_id)
            + self._delayed()
        )
