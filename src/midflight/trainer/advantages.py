"""From rewards to advantages: one number per rollout, compared within its group."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def dr_grpo_advantages(rewards: Float[Tensor, " M"], groups: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
    """Reward minus the mean of its group.

        A_i = R_i - mean(R of the group of i)

    Liu et al. 2025 (2503.20783), section 3: without the division by the deviation, which favours tasks of little spread.
    A group of one has advantage 0, not its reward.
    """
    sums, counts = _sums(rewards, groups), _sums(torch.ones_like(rewards), groups)
    return rewards - (sums / counts)[groups]


def grpo_advantages(rewards: Float[Tensor, " M"], groups: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
    """Reward minus the mean of its group, in deviations of that group.

        A_i = (R_i - mean) / (std + 1e-6),  std = sqrt(sum (R - mean)^2 / (n - 1))

    Shao et al. 2024 (2402.03300), section 4.1.2. The deviation uses n - 1. A group of one has advantage 0.
    """
    centred = dr_grpo_advantages(rewards, groups)
    freedom = (_sums(torch.ones_like(rewards), groups) - 1).clamp(min=1)
    deviations = (_sums(centred**2, groups) / freedom).sqrt()
    return centred / (deviations[groups] + 1e-6)


def overlong_penalty(lengths: Int[Tensor, " M"], *, max_length: int, buffer: int, penalty: float) -> Float[Tensor, " M"]:
    """What DAPO adds to the reward of an answer that comes close to its limit; lengths in tokens.

        min(-(len - (L - buffer)) / buffer * penalty, 0)

    Yu et al. 2025 (2503.14476), eq. 13. `buffer = 0` is no penalty.
    """
    if buffer == 0:
        return torch.zeros(lengths.shape, dtype=torch.float64, device=lengths.device)
    excess = lengths.to(torch.float64) - (max_length - buffer)
    return (-excess / buffer * penalty).clamp(max=0)


def _sums(values: Float[Tensor, " M"], groups: Int[Tensor, " M"]) -> Float[Tensor, " G"]:
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    return torch.zeros(num_groups, dtype=values.dtype, device=values.device).index_add(0, groups, values)
