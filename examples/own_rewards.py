"""Rewards of one's own, as `configs/own-data.toml` names the first two and
`configs/pretrained-own.toml` the others. A function gets what its parameters name: `completion`,
the last answer as a text; the columns of the task's row; or `task` and `messages`, the whole
conversation.

midflight train configs/own-data.toml
"""

import re


def correct(completion: str, answer: str) -> float:
    """1 for the number that was asked for and nothing else."""
    return float(completion.strip() == answer)


def brief(completion: str) -> float:
    """1 for an answer that is a number at all."""
    return float(completion.strip().isdigit())


def ends_right(completion: str, answer: str) -> float:
    """1 for an answer whose last number is the one that was asked for, whatever stands before
    it.
    """
    numbers = re.findall(r"\d+", completion)
    return float(numbers[-1:] == [answer])


def short(completion: str) -> float:
    """1 for one word, a tenth less for each word more."""
    return max(0.0, 1.1 - 0.1 * max(1, len(completion.split())))
