"""A tool, and conversations that show how it is called: what configs/calculator.toml trains a model with that cannot add.

python examples/calculator.py DATA.jsonl        writes the conversations of its warm start
"""

from __future__ import annotations

import json
import operator
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATION = re.compile(r"\s*(-?\d+)\s*([+*-])\s*(-?\d+)\s*")


def calc(e: str) -> str:
    """Computes one operation."""
    found = OPERATION.fullmatch(e)
    if found is None:
        raise ValueError(f"{e!r} is no single + - or * of two whole numbers")
    left, sign, right = found.groups()
    return str(OPERATORS[sign](int(left), int(right)))


def conversation(expression: str) -> dict[str, object]:
    """How an agent that can call the tool answers `expression =`: one call for each sign, from the left."""
    first, *rest = expression.split()
    messages: list[dict[str, object]] = [{"role": "user", "content": f"{expression} ="}]
    answer = first
    for number, (sign, term) in enumerate(zip(rest[::2], rest[1::2], strict=True)):
        asked = f"{answer} {sign} {term}"
        answer = calc(asked)
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "calc", "arguments": json.dumps({"e": asked})}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "name": "calc", "content": answer})
    return {"messages": [*messages, {"role": "assistant", "content": answer}]}


def expression(chance: random.Random, *, num_terms: int = 2, num_digits: int = 2) -> str:
    """As the dataset chain_sum writes them."""
    numbers = [chance.randint(10 ** (num_digits - 1), 10**num_digits - 1) for _ in range(num_terms)]
    return "".join(f" {chance.choice('+-')} {number}" for number in numbers)[3:]


def conversations(number: int) -> Iterator[str]:
    """JSON lines; every other one has three numbers, and needs two calls."""
    chance = random.Random(0)
    for i in range(number):
        yield json.dumps(conversation(expression(chance, num_terms=3 if i % 2 else 2)))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join(conversations(int(sys.argv[2]) if len(sys.argv) > 2 else 4000)) + "\n")
