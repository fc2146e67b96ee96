"""The agents of `rollouts.py --parts faulty`: each does what its task says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from midflight.types import Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

LEAKED = 2**24
"""Bytes that an agent takes at a time."""


class SimulatorCrashed(Exception):
    """What a broken environment raises."""


async def rollout(task: Task, client: AsyncOpenAI) -> float:
    """One answer of the model, then an environment that takes its time; a faulty one shows what it
    is after half of that.
    """
    await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": str(task.data["question"])}]
    )
    seconds = float(str(task.data["seconds"]))
    await asyncio.sleep(seconds / 2)
    await FAULTS[str(task.data["fault"])]()
    await asyncio.sleep(seconds / 2)
    return 1.0


async def fine() -> None: ...


async def hang() -> None:
    await asyncio.Event().wait()


async def crash() -> None:
    raise SimulatorCrashed("the simulator is gone")


async def fork() -> None:
    """Starts processes that stay, as fast as it can."""
    while True:
        await asyncio.create_subprocess_exec("sleep", "600", stdout=asyncio.subprocess.DEVNULL)
        await asyncio.sleep(0.05)


async def leak() -> None:
    """Takes memory and keeps it, as fast as it can."""
    taken: list[bytearray] = []
    while True:
        taken.append(bytearray(LEAKED))
        await asyncio.sleep(0.05)


FAULTS = {"none": fine, "hang": hang, "raise": crash, "fork": fork, "leak": leak}
