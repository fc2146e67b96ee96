"""Objectives per token, as losses to minimise. What ratio they get decides whether they are bypass or decoupled.

`policy` is log pi_theta. It, and ratios made of it, carry the gradient; all else is a constant. R = pi_theta / behaviour,
r = pi_theta / proximal. Bounds `clip_low` and `clip_high` say how far a ratio may be from 1, except in `gmpo`.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from midflight.trainer import sequences


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


def cispo(
    policy: Float[Tensor, " T"], ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"], *, clip_low: float, clip_high: float
) -> Float[Tensor, " T"]:
    """Clips the importance weight, not the update: every token keeps a gradient.

        L_t = -sg(clip(R_t, 1 - clip_low, 1 + clip_high)) A_t log pi_theta

    MiniMax-M1 (2506.13585), eq. 4 and 5; ScaleRL (2510.13786). The usual range of R, [0, 5], is clip_low 1 and clip_high 4.
    """
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantage * policy


def rollout_is(
    policy: Float[Tensor, " T"], ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"], *, clip_low: float, clip_high: float
) -> Float[Tensor, " T"]:
    """Importance-weighted policy gradient on tokens whose ratio is near 1, and none on the others (`cispo` clips those).

        L_t = -sg(R_t [1 - clip_low < R_t < 1 + clip_high]) A_t log pi_theta

    2602.15763. Either sign of the advantage loses its gradient outside, unlike `clipped_surrogate`.
    """
    ratio = ratio.detach()
    inside = (1 - clip_low < ratio) & (ratio < 1 + clip_high)
    return -torch.where(inside, ratio, 0.0) * advantage * policy


def sapo(ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"], *, tau_positive: float, tau_negative: float) -> Float[Tensor, " T"]:
    """A soft gate in place of the clip.

        L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t,  tau = tau_positive where A_t > 0, else tau_negative

    SAPO (2511.20347), eq. 5 and 6. At r = 1 the gradient is that of r A; a larger tau lets it fade sooner. Usual: 1.0 and 1.05.
    """
    tau = torch.where(advantage > 0, tau_positive, tau_negative).to(ratio.dtype)
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage


def attached_ratio(policy: Float[Tensor, " T"], sequence_log_ratio: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """A rollout's ratio with the gradient of each of its tokens.

        s_t = sg(s) pi_theta / sg(pi_theta),  s = exp(sequence_log_ratio)

    GSPO-token (2507.18071), eq. 14; GSPO is `clipped_surrogate` of it, averaged per rollout, with s = exp(mean log r) over
    the rollout (eq. 7), usual clips 3e-4 and 4e-4.
    """
    return sequence_log_ratio.detach().exp() * _attached(policy)


def gmpo_log_ratio(
    log_ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    sequence: Int[Tensor, " T"],
    *,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, " T"]:
    """log of the geometric mean of the clipped ratios of the rollout that a token is of, without gradient.

    Each log r is clipped to [-clip_low, clip_high] on the pessimistic side only, before the mean. Over whole rollouts.
    """
    found = log_ratio.detach()
    clipped = torch.where(_gmpo_clipped(found, advantage, clip_low=clip_low, clip_high=clip_high), found.clamp(-clip_low, clip_high), found)
    return sequences.means(clipped, sequence, num_sequences=num_sequences)[sequence]


def gmpo(
    policy: Float[Tensor, " T"],
    log_ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    *,
    sequence_log_ratio: Float[Tensor, " T"],
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, " T"]:
    """Geometric-mean policy optimization, for a mean over tokens of a rollout, then over rollouts.

        L_t = -A g pi_theta / sg(pi_theta),  g = exp(sequence_log_ratio), and no gradient where log r_t is clipped

    GMPO (2507.20673), eq. 4: its mean over a rollout is -A prod_t clip(r_t)^(1/n), with that gradient. `sequence_log_ratio`
    comes from `gmpo_log_ratio`; clips are in logarithms, usual 0.4 and 0.4, for ratios within e^+-0.4.
    """
    clipped = _gmpo_clipped(log_ratio.detach(), advantage, clip_low=clip_low, clip_high=clip_high)
    attached = torch.where(clipped, torch.ones_like(policy), _attached(policy))
    return -sequence_log_ratio.detach().exp() * attached * advantage


def _gmpo_clipped(
    log_ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"], *, clip_low: float, clip_high: float
) -> Bool[Tensor, " T"]:
    return ((advantage > 0) & (log_ratio > clip_high)) | ((advantage < 0) & (log_ratio < -clip_low))


def _attached(policy: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """pi_theta / sg(pi_theta): 1, with the gradient of log pi_theta."""
    return (policy - policy.detach()).exp()


def topr(policy: Float[Tensor, " T"], sequence_ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Tapered off-policy REINFORCE: likes what went well at full weight, forgets what went badly only while it is still likely.

        L_t = -w A_t log pi_theta,  w = 1 where A_t > 0, else sg(clip(R_seq, 0, 1))

    TOPR (2503.14286), eq. 8. `sequence_ratio` is the product of R over the rollout, on each of its tokens. The paper sums over
    the tokens of a rollout; the reduction decides here.
    """
    weight = torch.where(advantage > 0, 1.0, sequence_ratio.detach().clamp(0, 1))
    return -weight * advantage * policy


def mirror_descent(
    policy: Float[Tensor, " T"], log_ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"], *, tau: float
) -> Float[Tensor, " T"]:
    """Policy gradient with a quadratic pull back to the behaviour policy.

        L_t = -A_t log pi_theta + tau / 2 log^2 R_t

    Kimi k1.5 (2501.12599), eq. 3, with A the reward minus its group's mean and `log_ratio` = log R with its gradient; usual
    tau 0.1. The paper squares the sum over a rollout, we square each token: no token answers for the others' drift.
    """
    return -advantage * policy + tau / 2 * log_ratio**2


def dppo_tv(
    policy: Float[Tensor, " T"], behaviour: Float[Tensor, " T"], advantage: Float[Tensor, " T"], *, delta: float, cap: float
) -> Float[Tensor, " T"]:
    """Trust region on the probabilities, not on their ratio: rare tokens may move, likely ones may not run off.

        L_t = -sg(min(R_t, cap) M_t) A_t log pi_theta
        M_t = [p_theta - p_b <= delta] where A_t > 0, else [p_theta - p_b >= -delta]

    DPPO with the binary total variation (2602.04879), section 4; usual delta 0.2 and cap 20. The gradient is that of M R A.
    """
    now = policy.detach()
    gap = now.exp() - behaviour.exp()
    kept = torch.where(advantage > 0, gap <= delta, gap >= -delta)
    # From the logarithm, so that no ratio overflows before it is capped.
    ratio = (now - behaviour).clamp(max=math.log(cap)).exp()
    return -torch.where(kept, ratio, 0.0) * advantage * policy


def kl_cov(
    log_ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"], *, chosen: Bool[Tensor, " T"], coefficient: float
) -> Float[Tensor, " T"]:
    """The unclipped surrogate, with a penalty on the tokens that `masks.kl_cov_selection` chose.

        L_t = -r_t A_t + beta |log r_t| where chosen

    KL-Cov (2505.22617), eq. 14; like its authors' code we estimate the divergence by |log r|. `log_ratio` = log r with its
    gradient; usual coefficient beta 1.
    """
    return -log_ratio.exp() * advantage + torch.where(chosen, coefficient * log_ratio.abs(), 0.0)
