"""Rows that begin alike: the prompt of a group, the turns that rollouts have in common. Their shared tokens are computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Family:
    """Rows, by number, whose first `shared` tokens are equal; each has at least one token more. Of one row nothing is shared."""

    rows: tuple[int, ...]
    shared: int


def families(rows: Sequence[Tokens]) -> list[Family]:
    """Every row in one family, so that as many tokens as can be are shared.

    In the order of their tokens neighbours share most, so families are stretches of that order. n rows that begin with m equal
    tokens save (n - 1) m of them; the stretches that save most are found from the front, the last one by trying all its beginnings.
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i].astype(">u4").tobytes())
    common = np.array([_common(rows[i], rows[j]) for i, j in pairwise(order)], np.int64)
    saved, begins = [0], list[int]()
    for end in range(len(order)):
        shared = np.minimum.accumulate(common[:end][::-1])[::-1]  # of the rows from each beginning up to this end
        gains = np.array(saved) + np.append(shared * np.arange(end, 0, -1), 0)
        begins.append(int(gains.argmax()))
        saved.append(int(gains.max()))
    found: list[Family] = []
    end = len(order)
    while end > 0:
        begin = begins[end - 1]
        found.append(Family(tuple(order[begin:end]), int(common[begin : end - 1].min()) if end - begin > 1 else 0))
        end = begin
    return found[::-1]


def fill(found: Sequence[Family], lengths: Sequence[int], *, budget: int) -> Iterator[list[Family]]:
    """Parts of at most `budget` tokens, shared ones counted once. A family that is cut computes them in each part; a row that is
    longer than the budget goes alone."""
    part: list[Family] = []
    total = 0
    for family in found:
        held: list[int] = []
        total += family.shared
        for row in family.rows:
            own = lengths[row] - family.shared
            if (part or held) and total + own > budget:
                yield [*part, *_whole(held, family.shared)]
                part, held, total = [], [], family.shared
            held.append(row)
            total += own
        part += _whole(held, family.shared)
    if part:
        yield part


def _whole(rows: Sequence[int], shared: int) -> list[Family]:
    return [Family(tuple(rows), shared if len(rows) > 1 else 0)] if rows else []


def _common(a: Tokens, b: Tokens) -> int:
    """Length of the common beginning that leaves both a token."""
    n = min(len(a), len(b)) - 1
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
