"""Sound code of a user: what drawn configurations name beside what is not there."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from midflight.trackers import Tracker


async def solve(task: Any, client: Any) -> float:
    answer = await client.chat.completions.create(model="policy", messages=task.messages)
    return float(len(answer.choices[0].message.content or "") % 3)


class Solver:
    async def __call__(self, task: Any, client: Any) -> float:
        return await solve(task, client)


def score(completion: str) -> float:
    return float(len(completion) % 3)


def best_of_all(completions: list[str], **columns: Any) -> list[float]:
    return [float(number % 2) for number, _ in enumerate(completions)]


def double(number: int) -> str:
    """Doubles a number."""
    return str(2 * number)


class Counting:
    """An environment with state, whose method is a tool."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, **columns: Any) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        """Adds a number.

        Args:
            number: What is added.
        """
        self.count += number
        return self.count


def rows(size: int = 12) -> list[dict[str, str]]:
    return [{"question": f"what is {number}?", "answer": str(number), "kind": "k"} for number in range(size)]


def loss(policy: Tensor, behaviour: Tensor, advantage: Tensor) -> Tensor:
    """REINFORCE with a ratio."""
    return -(policy - behaviour).exp() * advantage


class Silent(Tracker):
    pass
