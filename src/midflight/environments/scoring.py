"""What an environment returned, checked: a number, or a `Result`. Nothing unchecked becomes a reward (I10)."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from midflight.errors import BadReward
from midflight.types import Json, Result, Task

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Rewards travel as float32: beyond this they would arrive as infinity."""
MAX_TURNS = 10_000
"""Answers of one rollout that may be rewarded by themselves: each takes a number of every rollout in the batch."""
UNSCORED = Result(None)


async def result_of(returned: object, *, task: Task) -> Result:
    """Waits for a late reward, if there is one; ended by the deadline of its rollout. `BadReward` names the task, the value and the remedy."""
    if isinstance(returned, Result) and inspect.isawaitable(returned.reward):
        returned = Result(await returned.reward, returned.components, returned.metrics, returned.turns, returned.fields)
    return checked_result(returned, task=task)


def checked_result(returned: object, *, task: Task) -> Result:
    """With a number or None as its reward, and floats throughout. Components that do not apply are left out."""
    if not isinstance(returned, Result):
        return Result(checked_reward(returned, task=task))
    said = f"scoring task {task.id} of {task.source}: "
    components = {name: value for name, value in _named(returned.components, said + "components").items() if value is not None}
    turns = returned.turns
    if isinstance(turns, str) or not isinstance(turns, Sequence | np.ndarray) or len(turns) > MAX_TURNS:  # pyright: ignore[reportUnnecessaryIsInstance] (a user's)
        raise BadReward(f"{said}turns is {turns!r:.200}, expected a list of at most {MAX_TURNS} numbers, one for each answer.")
    return Result(
        checked_reward(returned.reward, task=task),
        {name: number_in(value, f"{said}component {name!r}") for name, value in components.items()},
        {name: number_in(value, f"{said}metric {name!r}") for name, value in _named(returned.metrics, said + "metrics").items()},
        tuple(number_in(value, f"{said}the reward of turn {number}") for number, value in enumerate(turns)),
        _json(_named(returned.fields, said + "fields"), said),
    )


def checked_reward(value: object, *, task: Task) -> float | None:
    """The reward as a float; `None` stays `None` (I10). Anything but a finite number is a `BadReward` that names the task."""
    return None if value is None else number_in(value, f"scoring task {task.id} of {task.source}: reward")


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
        f"{said} was {value!r:.1000}, expected a finite number or None; return a float, or None if the rollout cannot be scored."
    )


def shown(result: Result) -> Mapping[str, float]:
    """The metrics, and the fields that are numbers."""
    numbers = {f"fields/{name}": float(value) for name, value in result.fields.items() if isinstance(value, int | float)}
    return {**{name: value for name, value in numbers.items() if math.isfinite(value)}, **result.metrics}


def _named(value: object, said: str) -> Mapping[str, object]:
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in cast("Mapping[object, object]", value)):
        return cast("Mapping[str, object]", value)
    raise BadReward(f"{said} is {value!r:.200}, expected a dict from names to values.")


def _json(fields: Mapping[str, object], said: str) -> Mapping[str, Json]:
    """A copy as it is after a trip through JSON."""
    try:
        return cast("Mapping[str, Json]", json.loads(json.dumps(dict(fields), allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadReward(f"{said}fields cannot be written as JSON: {error}; let them be text, numbers, lists and dicts.") from error
