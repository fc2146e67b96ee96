"""A tool, and conversations that show how it is called: what configs/calculator.toml trains a model
with that cannot add.

python examples/calculator.py DATA.jsonl [NUMBER]       writes the conversations of its warm start
"""

from __future__ import annotations

import argparse
import json
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
OPERATION = re.compile(r"\s*(-?\d+)\s*([+*-])\s*(-?\d+)\s*")


def calc(e: str) -> str:
    """Computes one operation."""
    found = OPERATION.fullmatch(e)
    if found is None:
        raise ValueError(f"{e!r} is no single + - or * of two whole numbers")
    left, sign, right = found.groups()
    return str(OPERATORS[sign](int(left), int(right)))


def conversation(expression: str, *, system: str = "") -> dict[str, object]:
    """How an agent that can call the tool answers `expression =`: one call for each sign, from the
    left.
    """
    first, *rest = expression.split()
    messages: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": f"{expression} ="})
    answer = first
    for number, (sign, term) in enumerate(zip(rest[::2], rest[1::2], strict=True)):
        asked = f"{answer} {sign} {term}"
        answer = calc(asked)
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "calc", "arguments": json.dumps({"e": asked})},
        }
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append(
            {"role": "tool", "tool_call_id": f"call_{number}", "name": "calc", "content": answer}
        )
    return {"messages": [*messages, {"role": "assistant", "content": answer}]}


def expression(chance: random.Random, *, num_terms: int = 2, num_digits: int = 2) -> str:
    """As the dataset chain_sum writes them."""
    numbers = [chance.randint(10 ** (num_digits - 1), 10**num_digits - 1) for _ in range(num_terms)]
    return "".join(f" {chance.choice('+-')} {number}" for number in numbers)[3:]


def conversations(
    number: int, *, terms: Sequence[int] = (2, 3), digits: int = 2, system: str = ""
) -> Iterator[str]:
    """JSON lines. They have so many numbers in turn; three need two calls."""
    chance = random.Random(0)
    for i in range(number):
        asked = expression(chance, num_terms=terms[i % len(terms)], num_digits=digits)
        yield json.dumps(conversation(asked, system=system))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="DATA.jsonl")
    parser.add_argument("number", type=int, nargs="?", default=4000, help="of conversations")
    parser.add_argument(
        "--terms", type=int, nargs="+", default=[2, 3], help="numbers of each sum, in turn"
    )
    parser.add_argument("--digits", type=int, default=2, help="of each number")
    parser.add_argument("--system", default="", help="a message that each conversation begins with")
    options = parser.parse_args()
    lines = conversations(
        options.number, terms=options.terms, digits=options.digits, system=options.system
    )
    options.file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
