"""Objectives per token, as losses to minimise. What ratio they get decides whether they are bypass or decoupled."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def clipped_surrogate(
    ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"], *, clip_low: float, clip_high: float
) -> Float[Tensor, " T"]:
    """PPO's clipped objective.

        L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    Schulman et al. 2017 (1707.06347), eq. 7. `clip_high > clip_low` is DAPO's clip-higher (2503.14476, eq. 10).
    On the ratio to the behaviour policy this is the bypass form; on the ratio to the proximal policy the decoupled one.
    """
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


def dual_clip(loss: Float[Tensor, " T"], advantage: Float[Tensor, " T"], *, ceiling: float) -> Float[Tensor, " T"]:
    """Bounds a clipped surrogate from above where the advantage is negative.

        L_t = min(L_t, -c A_t) where A_t < 0

    Ye et al. 2020 (1912.09729), eq. 5, with c > 1. Without it a token of negative advantage whose ratio has grown
    large has a loss without bound.
    """
    return torch.where(advantage < 0, torch.minimum(loss, -ceiling * advantage), loss)


def clipped_below(ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"], *, clip_low: float) -> Bool[Tensor, " T"]:
    """Where the lower clip takes the gradient away: A < 0 and r < 1 - clip_low."""
    return (advantage < 0) & (ratio < 1 - clip_low)


def clipped_above(ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"], *, clip_high: float) -> Bool[Tensor, " T"]:
    """Where the upper clip takes the gradient away: A > 0 and r > 1 + clip_high."""
    return (advantage > 0) & (ratio > 1 + clip_high)
