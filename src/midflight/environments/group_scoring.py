"""Scores attempts of a group together: each waits until the others have ended, then one call scores
them all.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from midflight.allowance import Allowance, Expired
from midflight.environments.processor_waits import ProcessorWaits
from midflight.environments.result_checks import UnscoredRollout, checked_result
from midflight.errors import EnvironmentFailed, RolloutTimeout
from midflight.types import GroupKey, Result, RolloutKey, Task


class ScoresGroups(Protocol):
    """The part of an `AgentHost` that is used here."""

    async def judge(
        self, task: Task, attempts: Sequence[UnscoredRollout], *, name: str
    ) -> Sequence[Result]: ...
    def excused(self, session_id: str) -> float: ...
    def tool_seconds(self, session_id: str) -> float: ...


@dataclass(slots=True)
class _WaitingAttempt:
    """One attempt that waits. The `turn` of the first attempt is set when all are there: that
    attempt then has all of them scored.
    """

    sample: int
    attempt: UnscoredRollout
    turn: asyncio.Future[list[_WaitingAttempt]]
    result: asyncio.Future[Result]


@dataclass(slots=True)
class _OpenGroup:
    """A group whose rollouts have not all ended."""

    num_running: int = 0
    """Rollouts of the group that have not ended."""
    waiting: list[_WaitingAttempt] = field(default_factory=list[_WaitingAttempt])


class GroupScorer:
    """Gathers the attempts of the rollouts that one runner runs. A rollout that is tried again
    joins anew without a wait between, so that the others wait for it.
    """

    _numbers = itertools.count(1)
    """Numbers the groups that any runner of this process has scored."""

    def __init__(self, host: ScoresGroups, *, seconds: float) -> None:
        """`seconds` is the time that scoring a group may take: the functions themselves, without a
        wait for a place to run or of their programs for a processor.
        """
        self._host = host
        self._seconds = seconds
        self._of: defaultdict[GroupKey, _OpenGroup] = defaultdict(_OpenGroup)

    def joined(self, key: GroupKey) -> None:
        """A rollout begins. It must be `settled`, or `left`."""
        self._of[key].num_running += 1

    def left(self, key: GroupKey) -> None:
        """Notes that a rollout has ended, and is not to be scored beside the others."""
        gathering = self._of[key]
        gathering.num_running -= 1
        # The look comes a little later, because a rollout that is tried again joins anew.
        if not gathering.num_running:
            asyncio.get_running_loop().call_soon(self._look, key)

    async def settled(self, key: RolloutKey, task: Task, attempt: UnscoredRollout) -> Result:
        """Waits for the rollouts of the group to end, each of which has a deadline, and for their
        scores. It is ended by those, or by `seconds`.
        """
        loop = asyncio.get_running_loop()
        place = _WaitingAttempt(key.sample, attempt, loop.create_future(), loop.create_future())
        gathering = self._of[key.group]
        gathering.waiting.append(place)
        self.left(key.group)
        try:
            await asyncio.wait([place.turn, place.result], return_when=asyncio.FIRST_COMPLETED)
            if place.turn.done():
                await self._judge(task, place.turn.result())
            return place.result.result()
        finally:
            if place in gathering.waiting:
                gathering.waiting.remove(place)

    def _look(self, key: GroupKey) -> None:
        gathering = self._of.get(key)
        if gathering is None or gathering.num_running:
            return
        del self._of[key]
        there = sorted(gathering.waiting, key=lambda place: place.sample)
        if there:
            gathering.waiting.clear()
            there[0].turn.set_result(there)

    async def _judge(self, task: Task, places: list[_WaitingAttempt]) -> None:
        """Waits for the scores. In any case, every place gets a result or an error."""
        error: BaseException = EnvironmentFailed(
            "scoring the group ended with the rollout that had it done; it is tried again"
        )
        name = f"scored-group-{next(self._numbers)}"
        attempts = [place.attempt for place in places]
        waits = ProcessorWaits()

        def excused() -> float:
            return self._host.excused(name) + self._host.tool_seconds(name) + waits.seconds()

        try:
            with waits.counting():
                async with Allowance(self._seconds, excused=excused):
                    results = await self._host.judge(task, attempts, name=name)
            for place, result in zip(places, results, strict=True):
                place.result.set_result(checked_result(result, task=task))
        except Expired:
            error = RolloutTimeout(
                f"task {task.id} of {task.source}: scoring its {len(places)} completions took "
                f"{self._seconds:g} s by itself (the wait for a place to run left out), which is "
                "environment.rollout_seconds; raise it, or let the reward functions be quicker."
            )
        except Exception as failure:
            error = failure
        finally:
            for place in places:
                if not place.result.done():
                    place.result.set_exception(error)
                    # Marks the error as retrieved: the rollout may have been cancelled.
                    place.result.exception()
