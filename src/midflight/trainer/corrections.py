"""Importance ratios and the weights made of them. Bounds are on the ratio rho = proximal / behaviour, never on its inverse."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is far beyond every cap, and still finite when squared in float32."""


def log_ratio(numerator: Float[Tensor, " T"], denominator: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """log(numerator / denominator) of two log-probabilities, clamped to +-20."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def truncated_weight(ratio: Float[Tensor, " T"], *, cap: float) -> Float[Tensor, " T"]:
    """Token-level truncated importance sampling, under stop-gradient.

        w_t = sg(min(rho_t, C))

    Ionides 2008; for an engine's log-probabilities beside a trainer's, C = 2. Small ratios are kept as they are:
    the truncation bounds the variance and costs a bias on tokens that the proximal policy likes much more.
    """
    return ratio.detach().clamp(max=cap)
