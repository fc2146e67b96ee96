"""What is done to logits before temperature, in this order: penalties, bias, grammar. Rows that ask for nothing are not touched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Of P of a step's rows. They are a function of the tokens so far, never of state, so that a resume changes nothing (I5)."""

    rows: Ints
    """[P]"""
    tokens: Ints
    """[P, L] prompt and output so far; what lies after them does not matter."""
    num_prompt: Ints
    """[P]"""
    length: Ints
    """[P] prompt and output together."""
    repetition: NDArray[np.float64]
    frequency: NDArray[np.float64]
    presence: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Biases:
    """Triples: to the logit of `token_ids` in `rows`, `values` is added."""

    rows: Ints
    token_ids: Ints
    values: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Rows with a grammar."""

    rows: Ints
    """[G]"""
    allowed: NDArray[np.bool_]
    """[G, V]; at least one id of each row."""

    def without(self, suppressed: Ints) -> tuple[Masks, NDArray[np.bool_]]:
        """Takes ids [G, W] (padded with -1) away; also which rows [G] stayed as they were because nothing would have been left."""
        fewer = self.allowed.copy()
        row, column = np.nonzero(suppressed >= 0)
        fewer[row, suppressed[row, column]] = False
        empty = np.asarray(~fewer.any(1))
        fewer[empty] = self.allowed[empty]
        return Masks(self.rows, fewer), empty


def penalised(logits: Tensor, penalties: Penalties) -> Tensor:
    """Logits [R, V] with, in the rows that ask for it,

        z_j <- z_j / r if z_j > 0 else z_j r    for every id j in prompt or output,
        z_j <- z_j - f n_j - p [n_j > 0]        where n_j counts j in the output alone.

    The first is Keskar et al. 2019 (CTRL), eq. 2, which divides negative logits too; they would become likelier.
    """
    rows, tokens = _on(penalties.rows, logits), _on(penalties.tokens, logits)
    index = torch.arange(tokens.shape[1], device=logits.device)
    before = index < _column(penalties.length, logits)
    output = before & (index >= _column(penalties.num_prompt, logits))
    part = logits[rows]
    seen = _counts(tokens, before, like=part) > 0
    repetition = _column(penalties.repetition, logits)
    part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
    counts = _counts(tokens, output, like=part)
    part = part - _column(penalties.frequency, logits) * counts - _column(penalties.presence, logits) * (counts > 0)
    return logits.index_copy(0, rows, part)


def biased(logits: Tensor, biases: Biases) -> Tensor:
    """Logits [R, V] with the biases added."""
    index = (_on(biases.rows, logits), _on(biases.token_ids, logits))
    return logits.index_put(index, _on(biases.values, logits).to(logits.dtype), accumulate=True)


def masked(logits: Tensor, masks: Masks) -> Tensor:
    """Logits [R, V], -inf where a row's grammar forbids the id."""
    rows = _on(masks.rows, logits)
    return logits.index_copy(0, rows, logits[rows].masked_fill(~_on(masks.allowed, logits), -torch.inf))


def _counts(tokens: Tensor, counted: Tensor, *, like: Tensor) -> Tensor:
    """How often each id [P, V] is among the `counted` [P, L] of `tokens` [P, L]."""
    return torch.zeros_like(like).scatter_add_(1, tokens, counted.to(like.dtype))


def _on(values: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


def _column(values: NDArray[np.generic], like: Tensor) -> Tensor:
    return _on(values, like)[:, None]
