"""Code of a user that a run cannot work with, by what is wrong with it. `wrong_configurations` names it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

from midflight.environments.sandboxes.port import Sandbox

NUM_ROWS = 60

# --- Environments -------------------------------------------------------------------------------------------------------

a_number = 7


def of_one_argument(task: Any) -> float:
    return 1.0


async def a_stream(task: Any, client: Any) -> AsyncIterator[float]:
    yield 1.0


class WithArguments:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, task: Any, client: Any) -> float:
        return 1.0


async def sound(task: Any, client: Any) -> float:
    return 1.0


# --- Rewards and tools --------------------------------------------------------------------------------------------------


def by_position(completion: str, /) -> float:
    return 1.0


def of_an_absent_column(completion: str, absent: str) -> float:
    return 1.0


def reward(completion: str) -> float:
    return 1.0


def in_a_sandbox(completion: str, sandbox: Sandbox) -> float:
    return 1.0


def untyped(number) -> str:  # type: ignore[no-untyped-def]
    return ""


def typed(number: int) -> str:
    return ""


def of_odd_type(number: Iterator[object]) -> str:
    return ""


# --- Sources ------------------------------------------------------------------------------------------------------------


def row(number: int) -> dict[str, str]:
    return {"question": f"{number}", "answer": f"{number}"}


def raises() -> list[dict[str, str]]:
    raise LookupError("no such table")


def ends() -> list[dict[str, str]]:
    raise SystemExit(0)


def breaks_off() -> Iterator[dict[str, str]]:
    for number in range(NUM_ROWS):
        if number == 50:
            raise OSError("connection reset")
        yield row(number)


class Breaking:
    """Gives rows by number, and fails at one."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, number: int) -> dict[str, str]:
        if number == 50:
            raise OSError("connection reset")
        return row(number)


breaking = Breaking()


class LosesItsEnd(Breaking):
    """Says that it has more rows than it gives."""

    def __getitem__(self, number: int) -> dict[str, str]:
        return [row(each) for each in range(50)][number]


short = LosesItsEnd()


def shuffled() -> list[dict[str, str]]:
    rows = [row(number) for number in range(NUM_ROWS)]
    random.SystemRandom().shuffle(rows)
    return rows


def from_a_set() -> list[dict[str, str]]:
    """The order of a set of texts is another one in each process."""
    return [{"question": text, "answer": text} for text in {f"{number}" for number in range(NUM_ROWS)}]


_calls = 0


def more_each_time() -> list[dict[str, str]]:
    global _calls
    _calls += 1
    return [row(number) for number in range(NUM_ROWS + random.SystemRandom().randrange(10**6, 10**7) % 997 + _calls)]


def numbers() -> list[int]:
    return [1, 2, 3]


def text() -> str:
    return "rows"


def nothing() -> list[dict[str, str]]:
    return []


def of_objects() -> list[dict[str, object]]:
    return [{"question": "1", "answer": object()}]


# --- Losses, trackers, sandboxes ----------------------------------------------------------------------------------------


def mean_loss(policy: Any, advantage: Any) -> Any:
    return (policy * advantage).mean()


def no_gradient(policy: Any, advantage: Any) -> Any:
    return (policy * advantage).detach()


class NoTracker:
    pass


class NoSandbox:
    def __init__(self) -> None:
        pass
