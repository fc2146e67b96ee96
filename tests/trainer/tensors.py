"""Small tensors for tests of numbers, and tokens of several rollouts in any order."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor


def of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def whole(*sequence: int) -> dict:
    """What functions of whole rollouts take beside their values."""
    return {"sequence": torch.tensor(sequence), "num_sequences": max(sequence) + 1}


@st.composite
def shuffled_tokens(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Values on a grid of 0.1 (so that many are equal), their rollouts of four, and another order to put both in."""
    count = draw(st.integers(1, 12))
    values = draw(st.lists(st.integers(-20, 20), min_size=count, max_size=count))
    sequence = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    order = draw(st.permutations(range(count)))
    return of(*values) / 10, torch.tensor(sequence), torch.tensor(order)
