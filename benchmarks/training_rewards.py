"""Rewards of the races in `training_reward.py`, for both sides: needs neither Midflight nor trl. `REWARDS` is by race."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from midflight.types import Task


def exact(reply: str, expected: str) -> float:
    return float(reply.strip() == expected.strip())


def share_of_e(reply: str, expected: str) -> float:
    """Share of the letter E in the reply; what it has less than `expected` counts as other letters."""
    return reply.count("E") / max(len(reply), len(expected))


REWARDS: Mapping[str, Callable[[str, str], float]] = {"short": exact, "larger": exact, "vocabulary": exact, "long": share_of_e}


async def write_e(task: Task, client: AsyncOpenAI) -> float:
    """One question, one reply, scored by `share_of_e`."""
    question, expected = str(task.data["question"]), str(task.data["answer"])
    completion = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
    return share_of_e(completion.choices[0].message.content or "", expected)
