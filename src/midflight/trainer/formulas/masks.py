"""Which tokens stay in the loss. True keeps. Masks of whole rollouts give every token of a rollout the same answer.

rho = proximal / behaviour, and bounds are on rho, never on its inverse. A mask never changes a denominator: the caller
multiplies the loss by it and divides by what the batch had before.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from midflight.trainer.formulas import sequences


def k2(log_rho: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """log^2 rho / 2 per token: an estimate of KL(behaviour, proximal) that is never negative. Schulman 2020."""
    return log_rho**2 / 2


def k3(log_rho: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """rho - 1 - log rho per token: an unbiased estimate of KL(behaviour, proximal) that is never negative. Schulman 2020."""
    return log_rho.exp() - 1 - log_rho


def k2_mask(log_rho: Float[Tensor, " T"], *, bound: float) -> Bool[Tensor, " T"]:
    """Keeps tokens whose k2 is at most the bound."""
    return k2(log_rho.detach()) <= bound


def k3_mask(log_rho: Float[Tensor, " T"], *, bound: float) -> Bool[Tensor, " T"]:
    """Keeps tokens whose k3 is at most the bound, usually 0.001 to 0.01. Stricter on large ratios than on small ones."""
    return k3(log_rho.detach()) <= bound


def sequence_divergence_mask(
    divergence: Float[Tensor, " T"],
    sequence: Int[Tensor, " T"],
    *,
    num_sequences: int,
    bound: float,
    over: Literal["mean", "max"],
) -> Bool[Tensor, " T"]:
    """Keeps rollouts whose mean (or largest) k2 or k3 is at most the bound."""
    statistic = sequences.means if over == "mean" else sequences.maxima
    return (statistic(divergence.detach(), sequence, num_sequences=num_sequences) <= bound)[sequence]


def geometric_mask(
    log_rho: Float[Tensor, " T"], sequence: Int[Tensor, " T"], *, num_sequences: int, low: float, high: float
) -> Bool[Tensor, " T"]:
    """Keeps rollouts whose geometric mean ratio is near 1: low <= exp(mean log rho) <= high.

    2512.23075. Usual bounds 0.99 and 1.01, as narrow as 0.999 and 1.001. Unlike the product it does not depend on length.
    """
    mean = sequences.means(log_rho.detach(), sequence, num_sequences=num_sequences).exp()
    return ((low <= mean) & (mean <= high))[sequence]


def veto_mask(
    log_rho: Float[Tensor, " T"], sequence: Int[Tensor, " T"], *, num_sequences: int, low: float, high: float
) -> Bool[Tensor, " T"]:
    """Keeps rollouts all of whose tokens have low <= rho <= high. Usual bounds 1e-4 and 100: only catastrophes are dropped."""
    rho = log_rho.detach().exp()
    outside = ((rho < low) | (rho > high)).to(rho.dtype)
    return (sequences.sums(outside, sequence, num_sequences=num_sequences) == 0)[sequence]


def m2po_mask(log_rho: Float[Tensor, " T"], *, bound: float) -> Bool[Tensor, " T"]:
    """Drops the tokens of largest log^2 rho until the mean of the rest is below the bound. `log_rho` is that of the whole batch.

    M2PO (2510.01161), usual bound 0.04; there on pi_theta / mu, which rho is at the first update of a step.
    Tokens equal to the smallest that is dropped go with it, so that the answer does not depend on the order of tokens.
    """
    squared = log_rho.detach().double() ** 2
    ascending = squared.sort().values
    # The running mean of an ascending sequence never falls, so what can stay is a prefix.
    mean = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=squared.device)
    dropped = ascending[mean >= bound]
    return squared < dropped[0] if len(dropped) else torch.ones_like(squared, dtype=torch.bool)


def opsm_mask(
    log_inverse: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    sequence: Int[Tensor, " T"],
    *,
    num_sequences: int,
    bound: float,
) -> Bool[Tensor, " T"]:
    """Off-policy sequence masking: drops a rollout of negative advantage that the current policy has moved away from.

        drop iff A < 0 and mean(log mu - log pi_theta) > bound

    DeepSeek-V3.2 (2512.02556), section 3.1. `log_inverse` is log(mu / pi_theta): a distance in nats per token, the one place
    where a bound is not on rho.
    """
    distance = sequences.means(log_inverse.detach(), sequence, num_sequences=num_sequences)
    return ~((advantage < 0) & (distance > bound)[sequence])
