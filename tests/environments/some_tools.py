"""Tools and rewards of tests: good ones, and one of each kind that is refused."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import midflight
from midflight.errors import EnvironmentFailed

HELD = threading.Event()


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b (int): the second,
            which may be left out
    """
    return a + b


async def shout(text: str) -> str:
    """Says it loudly.

    Parameters
    ----------
    text : str
        what to say
    """
    await asyncio.sleep(2)
    return text.upper()


async def rests() -> str:
    await asyncio.sleep(0.3)
    return "rested"


def breaks(text: str) -> str:
    raise KeyError(text)


def hangs() -> str:
    HELD.wait(30)
    return "late"


async def waits_for_ever() -> str:
    return await asyncio.get_running_loop().create_future()


def offline() -> str:
    raise EnvironmentFailed("the database is gone")


def untyped(a, b: int):
    return a


def odd_type(lock: threading.Event) -> str:
    return str(lock)


def any_number(*numbers: int) -> int:
    return sum(numbers)


NOT_CALLABLE = 3


class Counter:
    """Counts up to a number."""

    def __init__(self) -> None:
        self.count = 0

    async def reset(self, goal: int = 3) -> str:
        self.goal = goal
        return f" Count to {goal}."

    def up(self, by: int) -> str:
        """Counts up."""
        self.count += by
        return f"now {self.count}"

    def reward(self, completion: str) -> dict[str, float]:
        return {"there": float(self.count == self.goal), "said": float("done" in completion)}


class NeedsAnArgument:
    def __init__(self, size: int) -> None:
        self.size = size

    def reset(self) -> None:
        """Nothing to do."""


# --- Rewards ----------------------------------------------------------------------------------------------------------


def correct(completion: str, answer: str) -> float:
    return float(completion == answer)


async def tokens(messages: list[dict[str, Any]], task: midflight.Task, weight: float = 1.0) -> dict[str, float | None]:
    return {"messages": weight * len(messages), "source": None if task.source == "spell" else 1.0}


def text(completion: str) -> str:
    return "good"


def silent(completion: str) -> None:
    return None


def wants_more(completion: str, difficulty: int) -> float:
    return difficulty


async def passes(completion: str, tests: str, sandbox: Any) -> float:
    return float((await sandbox.python(f"{completion}\n{tests}")).ok)


def of_group(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    GROUPS.append(list(completions))
    return [float(said == right) + 0.5 * (said == max(completions)) for said, right in zip(completions, answer, strict=True)]


def too_few(completions: list[str]) -> list[float]:
    return [1.0]


GROUPS: list[list[str]] = []
