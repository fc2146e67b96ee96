"""An environment with a planted fault: of one source every rollout fails, after the model has answered."""

from __future__ import annotations

from midflight import Client, Task
from midflight.environments.single_turn import answer as right


async def answer(task: Task, client: Client) -> object:
    reward = await right(task, client)
    if task.source == "chain_sum":
        raise ZeroDivisionError("the planted fault: there is no unit to divide by")
    return reward
