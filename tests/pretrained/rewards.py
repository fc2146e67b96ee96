"""A reward that hardly two answers have alike, so that every step has something to learn and every version has weights of its own."""

from __future__ import annotations


def variety(completion: str) -> float:
    """The share of the answer's words that are different."""
    words = completion.split()
    return len(set(words)) / max(1, len(words))
