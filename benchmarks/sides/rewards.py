"""The rewards of the races of `training.py`.

Both environments import it, so it needs neither Midflight nor trl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from midflight.types import Task


def exact(reply: str, expected: str) -> float:
    return float(reply.strip() == expected.strip())


def share_of_e(reply: str, expected: str) -> float:
    """Share of the letter E in the reply; what it has less than `expected` counts as other
    letters.
    """
    return reply.count("E") / max(len(reply), len(expected))


REWARDS: Mapping[str, Callable[[str, str], float]] = {
    "short": exact,
    "larger": exact,
    "vocabulary": exact,
    "long": share_of_e,
}
"""The reward of each race."""


async def write_e(task: Task, client: AsyncOpenAI) -> float:
    """One question, one reply, scored by `share_of_e`."""
    question = str(task.data["question"])
    expected = str(task.data["answer"])
    completion = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": question}]
    )
    return share_of_e(completion.choices[0].message.content or "", expected)
