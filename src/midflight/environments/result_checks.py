"""Checks the return value of an environment: a number, or a `Result`. Nothing unchecked becomes a
reward (I10).
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from midflight.errors import BadReward
from midflight.types import Json, Result, Row, SessionRecord, Task
from midflight.types.rollouts import RoleRecord

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Rewards travel as float32: beyond this they would arrive as infinity."""
MAX_TURNS = 10_000
"""The number of answers of one rollout that may have rewards of their own. Each takes a number for
every rollout in the batch.
"""
UNSCORED = Result(None)


@dataclass(frozen=True, slots=True)
class UnscoredRollout:
    """An attempt that functions score beside the others of its group, once all of them have
    ended.
    """

    messages: list[dict[str, Json]]
    num_prompt: int
    completion_ids: list[int]
    fields: dict[str, Json]
    metrics: dict[str, float]
    components: dict[str, float | None]
    """The components that are known already."""
    turns: tuple[float, ...] = ()
    roles: dict[str, float | None] = field(default_factory=dict[str, float | None])


async def result_of(returned: object, *, task: Task) -> Result | UnscoredRollout:
    """The checked result. Waits for a late reward, if there is one, until the deadline of its
    rollout. Raises `BadReward` with the task, the value and the remedy.
    """
    if isinstance(returned, UnscoredRollout):
        return returned
    if isinstance(returned, Result) and inspect.isawaitable(returned.reward):
        returned = replace(returned, reward=await returned.reward)
    return checked_result(returned, task=task)


def checked_result(returned: object, *, task: Task) -> Result:
    """A result with a number or None as its reward, and floats throughout. Components that do not
    apply are left out.
    """
    if not isinstance(returned, Result):
        return Result(checked_reward(returned, task=task))
    said = f"scoring task {task.id} of {task.source}: "
    given = _named(returned.components, said + "components")
    turns = _checked_turns(returned.turns, said)
    reward = checked_reward(returned.reward, task=task)
    components: dict[str, float] = {}
    for name, value in given.items():
        if value is not None:
            components[name] = number_in(value, f"{said}component {name!r}")
    metrics: dict[str, float] = {}
    for name, value in _named(returned.metrics, said + "metrics").items():
        metrics[name] = number_in(value, f"{said}metric {name!r}")
    turn_rewards: list[float] = []
    for number, value in enumerate(turns):
        turn_rewards.append(number_in(value, f"{said}the reward of turn {number}"))
    fields = _json(_named(returned.fields, said + "fields"), said)
    roles: dict[str, float | None] = {}
    for name, value in _named(returned.roles, said + "roles").items():
        roles[name] = None
        if value is not None:
            roles[name] = number_in(value, f"{said}the reward of role {name!r}")
    return Result(reward, components, metrics, tuple(turn_rewards), fields, roles)


def _checked_turns(turns: object, said: str) -> Sequence[object]:
    if isinstance(turns, Sequence | np.ndarray) and not isinstance(turns, str):
        found = cast("Sequence[object]", turns)
        if len(found) <= MAX_TURNS:
            return found
    raise BadReward(
        f"{said}turns is {turns!r:.200}, expected a list of at most {MAX_TURNS} numbers, one "
        "for each answer."
    )


def checked_reward(value: object, *, task: Task) -> float | None:
    """The reward as a float; `None` stays `None` (I10). Raises `BadReward`, which names the task,
    for anything except a finite number.
    """
    if value is None:
        return None
    return number_in(value, f"scoring task {task.id} of {task.source}: reward")


def number_in(value: object, said: str) -> float:
    """A finite number as a float. `said` begins the error, and names the value."""
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if abs(number) <= LARGEST_REWARD:
            return number + 0.0  # no -0.0, which no store keeps
    raise BadReward(
        f"{said} was {value!r:.1000}, expected a finite number or None; return a float, or None if "
        "the rollout cannot be scored."
    )


def shown_metrics(result: Result) -> Mapping[str, float]:
    """The metrics, the rewards of roles, and the fields that are numbers."""
    if not (result.fields or result.roles):
        return result.metrics
    found: dict[str, float] = {}
    for name, value in result.fields.items():
        if isinstance(value, int | float) and math.isfinite(float(value)):
            found[f"fields/{name}"] = float(value)
    for name, reward in result.roles.items():
        if reward is not None:
            found[f"roles/{name}"] = reward
    found.update(result.metrics)
    return found


def scored_roles(
    result: Result, record: SessionRecord
) -> tuple[Mapping[str, RoleRecord], tuple[Row, ...], tuple[Row, ...]]:
    """The roles that are trained, if there are any besides the session's own; the rows that are
    trained, and the rows that cannot be scored.

    Every role of the record must have a reward in the result, which may be None.
    """
    if result.reward is None or not (record.roles or result.roles):
        return {}, record.rows, ()
    rewards = {"": result.reward, **result.roles}
    asked = dict.fromkeys(result.roles, RoleRecord())
    if record.num_answers:
        asked[""] = RoleRecord(None, record.truncated, record.room)
    asked.update(record.roles)
    roles: dict[str, RoleRecord] = {}
    for name, of in asked.items():
        reward = rewards[name]
        if reward is not None:
            roles[name] = replace(of, reward=reward)
    trained = tuple(row for row in record.rows if rewards[row.role] is not None)
    lost = tuple(row for row in record.rows if rewards[row.role] is None)
    return roles, trained, lost


def unscored_role(result: Result, record: SessionRecord) -> str:
    """A role that asked the model and has no reward, not even None, or an empty string if there is
    none.
    """
    if result.reward is None or not record.roles:
        return ""
    unscored = record.roles.keys() - result.roles.keys() - {""}
    return min(unscored, default="")


def _named(value: object, said: str) -> Mapping[str, object]:
    if isinstance(value, Mapping):
        names = cast("Mapping[object, object]", value)
        if all(isinstance(name, str) for name in names):
            return cast("Mapping[str, object]", value)
    raise BadReward(f"{said} is {value!r:.200}, expected a dict from names to values.")


def _json(fields: Mapping[str, object], said: str) -> Mapping[str, Json]:
    """A copy of the fields as they are after a trip through JSON."""
    try:
        return cast("Mapping[str, Json]", json.loads(json.dumps(dict(fields), allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadReward(
            f"{said}fields cannot be written as JSON: {error}; let them be text, numbers, lists "
            "and dicts."
        ) from error
