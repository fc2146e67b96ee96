"""What an environment is written with: reading the text of a task, comparing a reply; and what counts as a reward."""

from __future__ import annotations

import math

import numpy as np

from midflight.errors import BadReward, TaskFieldMissing
from midflight.types import Task

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Rewards travel as float32: beyond this they would arrive as infinity."""


def checked_reward(value: object, *, task: Task) -> float | None:
    """The reward as a float; `None` stays `None` (I10). Anything but a finite number is a `BadReward` that names the task."""
    if value is None:
        return None
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if abs(number) <= LARGEST_REWARD:
            return number
    raise BadReward(
        f"scoring task {task.id} of {task.source}: reward was {value!r}, expected a finite number or None; "
        "return a float, or None if the rollout cannot be scored."
    )


def exact_match(reply: str, answer: str) -> float:
    """1.0 if the reply is the answer, but for white space around either; else 0.0."""
    return float(reply.strip() == answer.strip())


def text_field(task: Task, name: str) -> str:
    """A field that must be there and hold text; `TaskFieldMissing` names the field, the task and what the task has."""
    value = task.data.get(name)
    if isinstance(value, str):
        return value
    has = ", ".join(sorted(task.data)) or "no field at all"
    what = f"holds {value!r} in field {name!r}, which is not text" if name in task.data else f"has no field {name!r}"
    raise TaskFieldMissing(f"task {task.id} of {task.source} {what} (it has: {has}); add the field to the task or use another environment.")
