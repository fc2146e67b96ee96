"""Rollouts until a policy reaches a given reward: tasks in turn, and chosen by pass rate
(`[curriculum]`), on the same mixed set.

    python benchmarks/curriculum.py

The stream of tasks and the pools are those of a run. The policy is a simulation: task i is passed
with probability 1 / (1 + exp(difficulty_i - skill - own_i)), the impossible ones never. A step
takes the policy gradient of its groups, with GRPO's advantages, for `skill`, which all tasks share,
and for what is the task's own.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence

import numpy as np
from smoke import options_of

from midflight.config.sources import CurriculumSection
from midflight.environments.seeded_stream import SeededStream
from midflight.environments.sources import Source
from midflight.types import GroupKey, Task

GROUP = 8
BATCH = 16
SHARED = 0.02
OWN = 0.5
"""Step sizes of what all tasks share, and of a task's own part."""
IMPOSSIBLE = float("inf")
WAYS = {
    "in turn": CurriculumSection(),
    "learnability": CurriculumSection(priority="learnability"),
    "learnability, target 0.9": CurriculumSection(priority="learnability", target=0.9),
    "uniform, target 0.9": CurriculumSection(target=0.9),
}


def difficulties(number: int) -> list[float]:
    """A third is easy (pass rate 0.95 and more at first), a third from even to one in a thousand, a
    third impossible.
    """
    third = number // 3
    easy = [-3.0 - i / third for i in range(third)]
    hard = [7.0 * i / third for i in range(third)]
    return easy + hard + [IMPOSSIBLE] * (number - 2 * third)


class Policy:
    """`chances` of all tasks to be passed."""

    def __init__(self, difficulty: Sequence[float]) -> None:
        self._difficulty = np.array(difficulty)
        self._own = np.zeros(len(difficulty))
        self._skill = 0.0

    @property
    def chances(self) -> np.ndarray:
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(self._difficulty - self._skill - self._own))

    def learn(self, groups: Sequence[tuple[int, np.ndarray]]) -> None:
        """From the rewards of the groups of a step. The score of a Bernoulli of logit x is reward -
        p.
        """
        chances = self.chances
        for task, rewards in groups:
            spread = rewards.std(ddof=1)
            if spread:
                gradient = float(
                    ((rewards - rewards.mean()) / spread * (rewards - chances[task])).mean()
                )
                self._own[task] += OWN * gradient
                self._skill += SHARED * gradient


def rollouts_until(
    reward: float, curriculum: CurriculumSection, *, tasks: int, seed: int, most: int
) -> int:
    """Of training, until the mean chance over all tasks that can be passed is `reward`; `most`
    where it is not reached.
    """
    difficulty = difficulties(tasks)
    policy = Policy(difficulty)
    dice = random.Random(seed)
    stream = SeededStream(
        [Source("mixed", 1.0, tuple(Task(str(i), "mixed") for i in range(tasks)))],
        seed=seed,
        curriculum=curriculum,
    )
    possible = np.isfinite(difficulty)
    for step in range(most // (GROUP * BATCH)):
        if policy.chances[possible].mean() >= reward:
            return step * GROUP * BATCH
        drawn = [begin(stream) for _ in range(BATCH)]
        ended = [
            (
                key,
                task,
                np.array([float(dice.random() < policy.chances[task]) for _ in range(GROUP)]),
            )
            for key, task in drawn
        ]
        for key, _, rewards in ended:
            stream.curriculum.ended(key, rewards.tolist())
        policy.learn([(task, rewards) for _, task, rewards in ended])
    return most


def begin(stream: SeededStream) -> tuple[GroupKey, int]:
    key, task = stream.next()
    stream.curriculum.begun(key)
    return key, int(task.id)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument(
        "--reward", type=float, default=0.9, help="mean chance over the tasks that can be passed"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--most", type=int, default=400_000, help="rollouts before it gives up")
    options = options_of(parser, tasks=60, seeds=1, most=4000)
    first: float | None = None
    print(
        f"rollouts until a mean reward of {options.reward:g} on the possible two thirds of "
        f"{options.tasks} tasks, {options.seeds} seeds"
    )
    for name, section in WAYS.items():
        found = [
            rollouts_until(
                options.reward, section, tasks=options.tasks, seed=seed, most=options.most
            )
            for seed in range(options.seeds)
        ]
        mean = statistics.mean(found)
        first = first or mean
        print(
            f"{name:26}{mean:10,.0f}  ({min(found):,} to {max(found):,})  tasks in turn take "
            f"{first / mean:.2f} times as many"
        )


if __name__ == "__main__":
    main()
