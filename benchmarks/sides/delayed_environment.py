"""The demo environment with a tail: after its reply each rollout takes a log-normal time before it
is scored.

It stands for tools and judges that answer now fast, now slowly; the tail makes synchronous training
wait. With the folder of the benchmarks on the path it is
`environment.entry = "sides.delayed_environment:answer"`. Its environment variables:

    MIDFLIGHT_DELAY_MEDIAN_SECONDS  median of the delay (default 0.5); 0 is no delay
    MIDFLIGHT_DELAY_SIGMA           standard deviation of its logarithm (default 1.0);
                                    larger is a longer tail
    MIDFLIGHT_DELAY_MAX_SECONDS     longest delay (default 20 times the median)
    MIDFLIGHT_DELAY_SEED            seed of the delays (default 0)

A task overrules the first three by fields `delay_median_seconds`, `delay_sigma`,
`delay_max_seconds` of its data.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from midflight.environments import single_turn
from midflight.environments.agent_program import environment
from midflight.types import Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass(frozen=True, slots=True)
class Delays:
    """Log-normal delays in seconds: median * exp(sigma * N(0, 1)), cut at `longest`."""

    median: float = 0.5
    sigma: float = 1.0
    longest: float | None = None
    seed: int = 0

    def of(self, task: Task, occurrence: int) -> float:
        """The delay of the n-th rollout of a task: the same in every run, in whatever order the
        rollouts come.
        """
        median = _number(task, "delay_median_seconds", self.median)
        sigma = _number(task, "delay_sigma", self.sigma)
        default = 20 * median if self.longest is None else self.longest
        longest = _number(task, "delay_max_seconds", default)
        normal = random.Random(f"{self.seed}|{task.source}|{task.id}|{occurrence}").gauss(0.0, 1.0)
        return min(median * math.exp(sigma * normal), longest)

    @classmethod
    def from_environment(cls) -> Delays:
        longest = os.environ.get("MIDFLIGHT_DELAY_MAX_SECONDS")
        return cls(
            median=float(os.environ.get("MIDFLIGHT_DELAY_MEDIAN_SECONDS", "0.5")),
            sigma=float(os.environ.get("MIDFLIGHT_DELAY_SIGMA", "1.0")),
            longest=None if longest is None else float(longest),
            seed=int(os.environ.get("MIDFLIGHT_DELAY_SEED", "0")),
        )


@environment(name="delayed answer")
class DelayedAnswer:
    """`single_turn.answer`, then the delay. Counts the rollouts of each task in this process to
    give each its own delay.
    """

    def __init__(self, delays: Delays | None = None) -> None:
        self._delays = delays or Delays.from_environment()
        self._occurrences: Counter[tuple[str, str]] = Counter()

    async def __call__(self, task: Task, client: AsyncOpenAI) -> float:
        """Waits for the reply and the delay; ended by the rollout's deadline."""
        delay = self._delays.of(task, self._occurrences[task.source, task.id])
        self._occurrences[task.source, task.id] += 1
        reward = await single_turn.answer(task, client)
        await asyncio.sleep(delay)
        return reward


answer = DelayedAnswer()


def _number(task: Task, name: str, default: float) -> float:
    value = task.data.get(name, default)
    assert isinstance(value, int | float), f"task {task.id}: {name} is {value!r}, expected seconds"
    return float(value)
