"""Statistics of rollouts from flat per-token arrays.

`sequence` numbers the rollout of each token, 0..S-1; a rollout's tokens may lie anywhere, in any order and in several rows.
Sums are taken in float64, so that neither the order of tokens nor of atomic additions moves a number across a bound.
Index a result by `sequence` to spread it over the tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def sums(values: Float[Tensor, " T"], sequence: Int[Tensor, " T"], *, num_sequences: int) -> Float[Tensor, " S"]:
    """Sum over the tokens of each rollout; 0 for one without tokens."""
    found = torch.zeros(num_sequences, dtype=torch.float64, device=values.device)
    return found.index_add(0, sequence, values.double()).to(values.dtype)


def counts(sequence: Int[Tensor, " T"], *, num_sequences: int) -> Int[Tensor, " S"]:
    """Tokens of each rollout."""
    return torch.bincount(sequence, minlength=num_sequences)


def means(values: Float[Tensor, " T"], sequence: Int[Tensor, " T"], *, num_sequences: int) -> Float[Tensor, " S"]:
    """Mean over the tokens of each rollout; 0 for one without tokens."""
    return sums(values, sequence, num_sequences=num_sequences) / counts(sequence, num_sequences=num_sequences).clamp(min=1)


def maxima(values: Float[Tensor, " T"], sequence: Int[Tensor, " T"], *, num_sequences: int) -> Float[Tensor, " S"]:
    """Largest value among the tokens of each rollout; -inf for one without tokens."""
    found = torch.full((num_sequences,), -torch.inf, dtype=values.dtype, device=values.device)
    return found.scatter_reduce(0, sequence, values, reduce="amax")
