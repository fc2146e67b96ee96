"""A tool, and conversations that show how it is called: what configs/calculator.toml trains a model with that cannot add.

python examples/calculator.py DATA.jsonl        writes the conversations of its warm start
"""

from __future__ import annotations

import ast
import json
import operator
import random
import sys
from collections.abc import Callable
from pathlib import Path

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calc(e: str) -> str:
    """Computes."""
    return str(_value(ast.parse(e.strip(), mode="eval").body))


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError(f"only whole numbers and + - * can be computed, not {ast.unparse(node)!r}")


def conversation(expression: str) -> dict[str, object]:
    """How an agent that can call the tool answers `expression =`."""
    call = {"id": "call_0", "type": "function", "function": {"name": "calc", "arguments": json.dumps({"e": expression})}}
    answer = calc(expression)
    messages = [
        {"role": "user", "content": f"{expression} ="},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "name": "calc", "content": answer},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages}


def expression(chance: random.Random, *, num_terms: int = 2, num_digits: int = 2) -> str:
    """As the dataset chain_sum writes them."""
    numbers = [chance.randint(10 ** (num_digits - 1), 10**num_digits - 1) for _ in range(num_terms)]
    return "".join(f" {chance.choice('+-')} {number}" for number in numbers)[3:]


if __name__ == "__main__":
    chance = random.Random(0)
    lines = [json.dumps(conversation(expression(chance))) for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 4000)]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n")
