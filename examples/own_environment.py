"""An environment of your own: the agent has two tries, and hears after the first one what was wrong
with it.

    midflight train configs/demo.toml --folder runs/own \\
        --set environment.entry=examples.own_environment:spell_with_a_hint

Everything the client sends belongs to one session. The second request repeats the first answer in
its messages; its recorded tokens are used again as they were sampled, so both tries are trained on,
with the one reward of the rollout.
"""

from __future__ import annotations

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from midflight.environments.agent_program import environment
from midflight.environments.single_turn import text_field
from midflight.types import Task


@environment(name="spelling with a hint")
async def spell_with_a_hint(task: Task, client: AsyncOpenAI) -> float:
    """1 for a right first try, 0.5 for a right second one, else 0."""
    expected = text_field(task, "answer")
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": text_field(task, "question")}
    ]
    for reward in (1.0, 0.5):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        reply = completion.choices[0].message.content or ""
        if reply.strip() == expected:
            return reward
        messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": hint(reply.strip(), expected)})
    return 0.0


def hint(reply: str, expected: str) -> str:
    """Says how many letters from the start were right."""
    right = next(
        (i for i, (a, b) in enumerate(zip(reply, expected, strict=False)) if a != b),
        min(len(reply), len(expected)),
    )
    return f"No: {right} right, then wrong. Again:"
