"""What an environment returned, checked: a number, or a `Result`. Nothing unchecked becomes a
reward (I10).

And attempts that are scored together: each waits until the others of its group have ended, then one
call scores them all.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import numpy as np

from midflight.allowance import Allowance, Expired
from midflight.errors import BadReward, EnvironmentFailed, RolloutTimeout
from midflight.types import GroupKey, Json, Result, RolloutKey, Row, SessionRecord, Task
from midflight.types.rollouts import RoleRecord

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Rewards travel as float32: beyond this they would arrive as infinity."""
MAX_TURNS = 10_000
"""Answers of one rollout that may be rewarded by themselves: each takes a number of every rollout
in the batch.
"""
UNSCORED = Result(None)


@dataclass(frozen=True, slots=True)
class Unjudged:
    """An attempt that functions score beside the others of its group, once all of them have
    ended.
    """

    messages: list[dict[str, Json]]
    num_prompt: int
    completion_ids: list[int]
    fields: dict[str, Json]
    metrics: dict[str, float]
    components: dict[str, float | None]
    """What is known already."""
    turns: tuple[float, ...] = ()
    roles: dict[str, float | None] = field(default_factory=dict[str, float | None])


async def result_of(returned: object, *, task: Task) -> Result | Unjudged:
    """Waits for a late reward, if there is one; ended by the deadline of its rollout. `BadReward`
    names the task, the value and the remedy.
    """
    if isinstance(returned, Unjudged):
        return returned
    if isinstance(returned, Result) and inspect.isawaitable(returned.reward):
        returned = replace(returned, reward=await returned.reward)
    return checked_result(returned, task=task)


def checked_result(returned: object, *, task: Task) -> Result:
    """With a number or None as its reward, and floats throughout. Components that do not apply are
    left out.
    """
    if not isinstance(returned, Result):
        return Result(checked_reward(returned, task=task))
    said = f"scoring task {task.id} of {task.source}: "
    components = {
        name: value
        for name, value in _named(returned.components, said + "components").items()
        if value is not None
    }
    turns = returned.turns
    if (
        isinstance(turns, str)
        or not isinstance(turns, Sequence | np.ndarray)  # pyright: ignore[reportUnnecessaryIsInstance]
        or len(turns) > MAX_TURNS
    ):
        raise BadReward(
            f"{said}turns is {turns!r:.200}, expected a list of at most {MAX_TURNS} numbers, one "
            "for each answer."
        )
    return Result(
        checked_reward(returned.reward, task=task),
        {name: number_in(value, f"{said}component {name!r}") for name, value in components.items()},
        {
            name: number_in(value, f"{said}metric {name!r}")
            for name, value in _named(returned.metrics, said + "metrics").items()
        },
        tuple(
            number_in(value, f"{said}the reward of turn {number}")
            for number, value in enumerate(turns)
        ),
        _json(_named(returned.fields, said + "fields"), said),
        {
            name: None if value is None else number_in(value, f"{said}the reward of role {name!r}")
            for name, value in _named(returned.roles, said + "roles").items()
        },
    )


def checked_reward(value: object, *, task: Task) -> float | None:
    """The reward as a float; `None` stays `None` (I10). Anything but a finite number is a
    `BadReward` that names the task.
    """
    return (
        None
        if value is None
        else number_in(value, f"scoring task {task.id} of {task.source}: reward")
    )


def number_in(value: object, said: str) -> float:
    """A finite number as a float. `said` begins the error, and names the value."""
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if abs(number) <= LARGEST_REWARD:
            return number
    raise BadReward(
        f"{said} was {value!r:.1000}, expected a finite number or None; return a float, or None if "
        "the rollout cannot be scored."
    )


def shown(result: Result) -> Mapping[str, float]:
    """The metrics, the rewards of roles, and the fields that are numbers."""
    if not (result.fields or result.roles):
        return result.metrics
    numbers = {
        f"fields/{name}": float(value)
        for name, value in result.fields.items()
        if isinstance(value, int | float)
    }
    roles = {f"roles/{name}": value for name, value in result.roles.items() if value is not None}
    return {
        **{name: value for name, value in numbers.items() if math.isfinite(value)},
        **roles,
        **result.metrics,
    }


def scored_roles(
    result: Result, record: SessionRecord
) -> tuple[Mapping[str, RoleRecord], tuple[Row, ...], tuple[Row, ...]]:
    """The roles that are trained, where there are any but the session's own; the rows of what is
    trained, and of what cannot be scored.

    Every role of the record must have a reward in the result, which may be None.
    """
    if result.reward is None or not (record.roles or result.roles):
        return {}, record.rows, ()
    own = {"": RoleRecord(None, record.truncated, record.room)} if record.num_answers else {}
    rewards = {"": result.reward, **result.roles}
    asked = {**dict.fromkeys(result.roles, RoleRecord()), **own, **record.roles}
    roles = {
        name: replace(of, reward=rewards[name])
        for name, of in asked.items()
        if rewards[name] is not None
    }
    lost = tuple(row for row in record.rows if rewards[row.role] is None)
    return roles, tuple(row for row in record.rows if rewards[row.role] is not None), lost


def unscored_role(result: Result, record: SessionRecord) -> str:
    """One that asked the model and has no reward, not even None; empty where there is none."""
    return (
        ""
        if result.reward is None or not record.roles
        else min(record.roles.keys() - {"", *result.roles}, default="")
    )


def _named(value: object, said: str) -> Mapping[str, object]:
    if isinstance(value, Mapping) and all(
        isinstance(name, str) for name in cast("Mapping[object, object]", value)
    ):
        return cast("Mapping[str, object]", value)
    raise BadReward(f"{said} is {value!r:.200}, expected a dict from names to values.")


def _json(fields: Mapping[str, object], said: str) -> Mapping[str, Json]:
    """A copy as it is after a trip through JSON."""
    try:
        return cast("Mapping[str, Json]", json.loads(json.dumps(dict(fields), allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadReward(
            f"{said}fields cannot be written as JSON: {error}; let them be text, numbers, lists "
            "and dicts."
        ) from error


# --- Groups ---------------------------------------------------------------------------------------


class ScoresGroups(Protocol):
    """An `AgentHost`, as far as this needs it."""

    async def judge(
        self, task: Task, attempts: Sequence[Unjudged], *, name: str
    ) -> Sequence[Result]: ...
    def excused(self, session_id: str) -> float: ...
    def tool_seconds(self, session_id: str) -> float: ...


@dataclass(slots=True)
class _OfGroup:
    """One attempt that waits. `turn` is done when all are there: the first of them then has all of
    them scored.
    """

    sample: int
    attempt: Unjudged
    turn: asyncio.Future[list[_OfGroup]]
    result: asyncio.Future[Result]


@dataclass(slots=True)
class _Awaited:
    num_running: int = 0
    """Rollouts of the group that have not ended."""
    waiting: list[_OfGroup] = field(default_factory=list[_OfGroup])


class Judging:
    """Of the rollouts that one runner runs. A rollout that is tried again joins anew, without a
    wait between: the others wait for it.
    """

    _numbers = itertools.count(1)
    """Of the groups that any runner of this process has scored."""

    def __init__(self, host: ScoresGroups, *, seconds: float) -> None:
        """`seconds` that scoring a group may take: the functions themselves, without a wait for a
        place to run.
        """
        self._host = host
        self._seconds = seconds
        self._of: defaultdict[GroupKey, _Awaited] = defaultdict(_Awaited)

    def joined(self, key: GroupKey) -> None:
        """A rollout begins. It must be `settled`, or `left`."""
        self._of[key].num_running += 1

    def left(self, key: GroupKey) -> None:
        """It has ended, and is not to be scored beside the others."""
        gathering = self._of[key]
        gathering.num_running -= 1
        # looked at a little later: a rollout that is tried again joins anew
        if not gathering.num_running:
            asyncio.get_running_loop().call_soon(self._look, key)

    async def settled(self, key: RolloutKey, task: Task, attempt: Unjudged) -> Result:
        """Waits for the rollouts of the group to end, each of which has a deadline, and for their
        scores; ended by those, or by `seconds`.
        """
        loop = asyncio.get_running_loop()
        place = _OfGroup(key.sample, attempt, loop.create_future(), loop.create_future())
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
        if there := sorted(gathering.waiting, key=lambda place: place.sample):
            gathering.waiting.clear()
            there[0].turn.set_result(there)

    async def _judge(self, task: Task, places: list[_OfGroup]) -> None:
        """Waits for the scores. Whatever happens, every place gets a result or an error."""
        error: BaseException = EnvironmentFailed(
            "scoring the group ended with the rollout that had it done; it is tried again"
        )
        name = f"scored-group-{next(self._numbers)}"
        allowance = Allowance(
            self._seconds, excused=lambda: self._host.excused(name) + self._host.tool_seconds(name)
        )
        try:
            async with allowance:
                results = await self._host.judge(
                    task, [place.attempt for place in places], name=name
                )
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
                    place.result.exception()  # heard: its rollout may have been cancelled
