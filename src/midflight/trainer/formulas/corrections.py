"""Importance ratios and the weights made of them.

rho = proximal / behaviour, and every bound is on rho, never on its inverse. `log_rho` comes from `log_ratio`. What is returned
carries no gradient. Weights that look at a whole rollout take `sequence`, see `sequences`, and give a value per token.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from midflight.trainer.formulas import sequences

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is far beyond every cap, and still finite when squared in float32."""


def log_ratio(numerator: Float[Tensor, " T"], denominator: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """log(numerator / denominator) of two log-probabilities, clamped to +-20. A missing one (NaN) stays NaN: it is never made up."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_ratio(log_rho: Float[Tensor, " T"], sequence: Int[Tensor, " T"], *, num_sequences: int) -> Float[Tensor, " T"]:
    """The product of rho over all tokens of the rollout that a token is of; its logarithm is clamped to +-20."""
    product = sequences.sums(log_rho.detach(), sequence, num_sequences=num_sequences).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return product.exp()[sequence]


def interpolation_weight(since_proximal: Float[Tensor, " T"], *, since_policy: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """How far the proximal policy lies between the one that sampled a token (0) and the current one (1).

        alpha = clip((v_p - v_b) / (v_theta - v_b), 0, 1)

    A-3PO (2512.06547). The arguments are v_p - v_b and v_theta - v_b, in versions since the token was sampled. A token
    sampled by the current version has alpha = 1: its proximal policy is the current one, r = 1.
    """
    return torch.where(since_policy == 0, 1.0, since_proximal / since_policy).clamp(0, 1)


def interpolated_proximal(
    policy: Float[Tensor, " T"], behaviour: Float[Tensor, " T"], *, alpha: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Proximal log-probabilities without a forward of their own.

        log pi_p = log mu + alpha (sg(log pi_theta) - log mu)

    A-3PO (2512.06547); `alpha` from `interpolation_weight`.
    """
    return behaviour + alpha * (policy.detach() - behaviour)


def truncated_weight(ratio: Float[Tensor, " T"], *, cap: float) -> Float[Tensor, " T"]:
    """Token-level truncated importance sampling, under stop-gradient.

        w_t = sg(min(rho_t, C))

    Ionides 2008; for an engine's log-probabilities beside a trainer's, C = 2. Small ratios are kept as they are:
    the truncation bounds the variance and costs a bias on tokens that the proximal policy likes much more.
    """
    return ratio.detach().clamp(max=cap)


def truncated_sequence_weight(
    log_rho: Float[Tensor, " T"], sequence: Int[Tensor, " T"], *, num_sequences: int, cap: float
) -> Float[Tensor, " T"]:
    """Truncated importance sampling of whole rollouts: w = min(prod rho, C) on every token of the rollout.

    Unbiased below the cap, where the weight per token is not; its variance grows with length.
    """
    return sequence_ratio(log_rho, sequence, num_sequences=num_sequences).clamp(max=cap)


def self_normalised(weight: Float[Tensor, " T"], *, mean: Float[Tensor, ""]) -> Float[Tensor, " T"]:
    """w / mean(w), where the mean is over the tokens of the whole batch, on all ranks. Weights that are all 0 stay 0."""
    return weight / mean.clamp(min=torch.finfo(weight.dtype).tiny)


def masked_weight(ratio: Float[Tensor, " T"], *, low: float, high: float) -> Float[Tensor, " T"]:
    """MIS, masked importance sampling: w = rho where low <= rho <= high, else 0. Usual bounds 0.5 and 2."""
    ratio = ratio.detach()
    return torch.where((low <= ratio) & (ratio <= high), ratio, 0.0)


def masked_sequence_weight(
    log_rho: Float[Tensor, " T"], sequence: Int[Tensor, " T"], *, num_sequences: int, low: float, high: float
) -> Float[Tensor, " T"]:
    """MIS of whole rollouts: w = prod rho on every token of a rollout where it lies in [low, high], else 0."""
    return masked_weight(sequence_ratio(log_rho, sequence, num_sequences=num_sequences), low=low, high=high)


def icepop_weight(ratio: Float[Tensor, " T"], *, low: float, high: float) -> Float[Tensor, " T"]:
    """IcePop (2510.18855): w = rho where low <= rho <= high, else 0. `masked_weight` under its own name; usual bounds 0.5 and 5."""
    return masked_weight(ratio, low=low, high=high)


def age_weight(age: Int[Tensor, " T"], *, decay: float) -> Float[Tensor, " T"]:
    """w = decay^age per token, age in versions: a token of the version that begins the step has weight 1. `decay` in (0, 1]."""
    return torch.pow(decay, age)
