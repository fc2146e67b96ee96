"""The plainest environment: one question, one reply, right or wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midflight.environments.rewards import exact_match, text_field
from midflight.types import Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI


async def answer(task: Task, client: AsyncOpenAI) -> float:
    """Asks `question` as the only user message and compares the reply with `answer`. Waits for the reply; ended by its caller."""
    question, expected = text_field(task, "question"), text_field(task, "answer")
    completion = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
    return exact_match(completion.choices[0].message.content or "", expected)
