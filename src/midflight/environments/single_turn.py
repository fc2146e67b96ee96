"""The plainest environment (one question, one reply, right or wrong), and what others are written with too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midflight.errors import TaskFieldMissing
from midflight.types import Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI


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


async def answer(task: Task, client: AsyncOpenAI) -> float:
    """Asks `question` as the only user message and compares the reply with `answer`. Waits for the reply; ended by its caller."""
    question, expected = text_field(task, "question"), text_field(task, "answer")
    completion = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
    return exact_match(completion.choices[0].message.content or "", expected)
