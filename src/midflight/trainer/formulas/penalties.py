"""What is added to a surrogate per token: divergence from a reference policy, a critic's loss, a teacher's advice.

Divergences estimate KL(policy, reference) on tokens that the policy sampled. They carry the gradient of `policy`, never of `reference`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from midflight.trainer.formulas.corrections import log_ratio


def k1_divergence(policy: Float[Tensor, " T"], reference: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """log pi_theta - log pi_ref: unbiased, of either sign. Schulman 2020. As a loss its gradient is 0 in expectation: for rewards."""
    return log_ratio(policy, reference)


def k2_divergence(policy: Float[Tensor, " T"], reference: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Half the square of k1: a biased value, and on policy the right gradient. Schulman 2020."""
    return log_ratio(policy, reference) ** 2 / 2


def k3_divergence(policy: Float[Tensor, " T"], reference: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """exp(-k1) - 1 + k1: an unbiased value, never negative. Schulman 2020; GRPO (2402.03300), eq. 4. Its gradient is that of
    KL(reference, policy)."""
    found = log_ratio(policy, reference)
    return (-found).exp() - 1 + found


def unbiased_divergence(
    policy: Float[Tensor, " T"], reference: Float[Tensor, " T"], *, behaviour: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """k3 weighted by R = pi_theta / behaviour, whose gradient counts too: value and gradient are unbiased, off policy as well.

        R_t k3(pi_theta, pi_ref)

    DeepSeek-V3.2 (2512.02556), eq. 7.
    """
    return log_ratio(policy, behaviour).exp() * k3_divergence(policy, reference)


def value_loss(
    value: Float[Tensor, " T"], old_value: Float[Tensor, " T"], returns: Float[Tensor, " T"], *, clip: float
) -> Float[Tensor, " T"]:
    """A critic's squared error, clipped to stay near the value that began the step.

        L_t = max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) / 2

    As in the implementation of PPO by its authors; `returns` G from `gae`.
    """
    near = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum((value - returns) ** 2, (near - returns) ** 2) / 2


def distillation_advantage(teacher: Float[Tensor, " T"], behaviour: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """A_t = log teacher - log behaviour on the student's own tokens: its policy gradient lowers KL(student, teacher), token by token.

    On-policy distillation (2306.13649 with reverse KL), with no discount over later tokens. In nats, clamped to +-20.
    """
    return log_ratio(teacher, behaviour).detach()
