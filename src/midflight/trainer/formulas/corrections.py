"""Importance ratios, the weights made of them, and the masks that say which tokens stay.

rho = proximal / behaviour, and every bound is on rho, never on its inverse. `log_rho` comes from
`log_ratio`. What is returned carries no gradient. A function that looks at whole rollouts takes
`sequence`, see `reductions`, and gives a value per token; one that looks at the whole batch says
so.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from midflight.trainer.formulas import reductions

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is far beyond every cap, and still finite when
squared in float32.
"""


def log_ratio(
    numerator: Float[Tensor, " T"], denominator: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """log(numerator / denominator) of two log-probabilities, clamped to +-20. A missing one (NaN)
    stays NaN: it is never made up.
    """
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_ratio(
    log_ratio: Float[Tensor, " T"], sequence: Int[Tensor, " T"], *, num_sequences: int
) -> Float[Tensor, " T"]:
    """The product of a ratio over all tokens of the rollout that a token is of; its logarithm is
    clamped to +-20.
    """
    product = reductions.sums(log_ratio.detach(), sequence, num_sequences=num_sequences).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    return product.exp()[sequence]


def interpolation_weight(
    since_proximal: Float[Tensor, " T"], *, since_policy: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """How far the proximal policy lies between the one that sampled a token (0) and the current one
    (1).

        alpha = clip((v_p - v_b) / (v_theta - v_b), 0, 1)

    A-3PO (2512.06547). The arguments are v_p - v_b and v_theta - v_b, in versions since the token
    was sampled. A token sampled by the current version has alpha = 1: its proximal policy is the
    current one, r = 1.
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


def unweighted(rho: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Nothing corrects for age."""
    return torch.ones_like(rho)


def truncated_weight(rho: Float[Tensor, " T"], *, cap: float) -> Float[Tensor, " T"]:
    """Token-level truncated importance sampling, under stop-gradient.

        w_t = sg(min(rho_t, C))

    For an engine's log-probabilities beside a trainer's, C = 2. The truncation bounds the variance
    and costs a bias on tokens that the proximal policy likes much more. Small ratios are kept as
    they are.

    Ionides 2008.
    """
    return rho.detach().clamp(max=cap)


def truncated_sequence_weight(
    log_rho: Float[Tensor, " T"], sequence: Int[Tensor, " T"], *, num_sequences: int, cap: float
) -> Float[Tensor, " T"]:
    """Truncated importance sampling of whole rollouts: w = min(prod rho, C) on every token of the
    rollout.

    Unbiased below the cap, unlike tis; its variance grows with length.
    """
    return sequence_ratio(log_rho, sequence, num_sequences=num_sequences).clamp(max=cap)


def self_normalised(weight: Float[Tensor, " T"], *, mean: Float[Tensor, ""]) -> Float[Tensor, " T"]:
    """w / mean(w), where the mean is over the tokens of the whole batch, on all ranks. Weights that
    are all 0 stay 0.
    """
    return weight / mean.clamp(min=torch.finfo(weight.dtype).tiny)


def masked_weight(rho: Float[Tensor, " T"], *, low: float, high: float) -> Float[Tensor, " T"]:
    """w = rho where low <= rho <= high, else 0. Usual bounds 0.5 and 2.

    Masked importance sampling.
    """
    rho = rho.detach()
    return torch.where((low <= rho) & (rho <= high), rho, 0.0)


def masked_sequence_weight(
    log_rho: Float[Tensor, " T"],
    sequence: Int[Tensor, " T"],
    *,
    num_sequences: int,
    low: float,
    high: float,
) -> Float[Tensor, " T"]:
    """w = prod rho on every token of a rollout where it lies in [low, high], else 0.

    The same of whole rollouts.
    """
    return masked_weight(
        sequence_ratio(log_rho, sequence, num_sequences=num_sequences), low=low, high=high
    )


def icepop_weight(rho: Float[Tensor, " T"], *, low: float, high: float) -> Float[Tensor, " T"]:
    """`masked_weight` under its own name; usual bounds 0.5 and 5.

    IcePop (2510.18855).
    """
    return masked_weight(rho, low=low, high=high)


def age_weight(age: Int[Tensor, " T"], *, decay: float) -> Float[Tensor, " T"]:
    """w = decay^age per token in float64, age in versions: a token of the version that begins the
    step has weight 1. `decay` in (0, 1].
    """
    return torch.pow(decay, age.double())


# --- Masks ----------------------------------------------------------------------------------------
#
# True keeps. A mask of whole rollouts gives every token of a rollout the same answer. A mask never
# changes a denominator: the caller multiplies the loss by it and divides by what the batch had
# before.


def k3(log_rho: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """rho - 1 - log rho per token: an unbiased estimate of KL(behaviour, proximal) that is never
    negative. Schulman 2020.
    """
    return log_rho.exp() - 1 - log_rho


def k3_mask(log_rho: Float[Tensor, " T"], *, bound: float) -> Bool[Tensor, " T"]:
    """Keeps tokens whose k3 is at most the bound. Stricter on large ratios than on small ones.

    Schulman 2020. Usual bounds 0.001 to 0.01.
    """
    return k3(log_rho.detach()) <= bound


def geometric_mask(
    log_rho: Float[Tensor, " T"],
    sequence: Int[Tensor, " T"],
    *,
    num_sequences: int,
    low: float,
    high: float,
) -> Bool[Tensor, " T"]:
    """Keeps rollouts whose geometric mean ratio is near 1: low <= exp(mean log rho) <= high.

    Unlike the product it does not depend on length.

    2512.23075. Usual bounds 0.99 and 1.01, as narrow as 0.999 and 1.001.
    """
    mean = reductions.means(log_rho.detach(), sequence, num_sequences=num_sequences).exp()
    return ((low <= mean) & (mean <= high))[sequence]


def product_mask(
    log_rho: Float[Tensor, " T"],
    sequence: Int[Tensor, " T"],
    *,
    num_sequences: int,
    low: float,
    high: float,
) -> Bool[Tensor, " T"]:
    """Keeps rollouts whose product of ratios has low <= prod rho <= high, and weighs them by
    nothing: `masked_sequence_weight` without its weight. The product wanders farther the longer a
    rollout is.

    Usual bounds 0.1 and 10, or wider.
    """
    product = sequence_ratio(log_rho, sequence, num_sequences=num_sequences)
    return (low <= product) & (product <= high)


def veto_mask(
    log_rho: Float[Tensor, " T"],
    sequence: Int[Tensor, " T"],
    *,
    num_sequences: int,
    low: float,
    high: float,
) -> Bool[Tensor, " T"]:
    """Keeps rollouts all of whose tokens have low <= rho <= high: only catastrophes are dropped.

    Usual bounds 1e-4 and 100.
    """
    rho = log_rho.detach().exp()
    outside = ((rho < low) | (rho > high)).to(rho.dtype)
    return (reductions.sums(outside, sequence, num_sequences=num_sequences) == 0)[sequence]


def m2po_mask(all_log_rho: Float[Tensor, " T"], *, bound: float) -> Bool[Tensor, " T"]:
    """Drops the tokens of largest log^2 rho until the mean of the rest is below the bound.
    `all_log_rho` is that of the whole batch.

    Tokens equal to the smallest that is dropped go with it, so that the answer does not depend on
    the order of tokens. In the paper the ratio is pi_theta / mu, which rho is at the first update
    of a step.

    M2PO (2510.01161). Usual bound 0.04.
    """
    squared = all_log_rho.detach().double() ** 2
    # numpy adds up in one order; on a GPU torch has no such running sum of floats.
    ascending = squared.sort().values.cpu().numpy()
    # The running mean of an ascending sequence never falls, so what can stay is a prefix.
    mean = ascending.cumsum() / np.arange(1, len(ascending) + 1)
    dropped = ascending[mean >= bound]
    if not len(dropped):
        return torch.ones_like(squared, dtype=torch.bool)
    return squared < float(dropped[0])


def opsm_mask(
    log_inverse: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    sequence: Int[Tensor, " T"],
    *,
    num_sequences: int,
    bound: float,
) -> Bool[Tensor, " T"]:
    """Off-policy sequence masking: drops a rollout of negative advantage that the current policy
    has moved away from.

        drop iff A < 0 and mean(log mu - log pi_theta) > bound

    `log_inverse` is log(mu / pi_theta): a distance in nats per token, the one place where a bound
    is not on rho.

    DeepSeek-V3.2 (2512.02556), section 3.1.
    """
    distance = reductions.means(log_inverse.detach(), sequence, num_sequences=num_sequences)
    return ~((advantage < 0) & (distance > bound)[sequence])
