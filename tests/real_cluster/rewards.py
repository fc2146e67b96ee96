"""Rewards of runs on machines of their own, which import this from the checkout that they stand in."""


def sum_of_letters(completion: str) -> float:
    """It differs between any two answers, so that every step has something to learn, and every version other weights."""
    return sum(map(ord, completion)) % 101 / 100
