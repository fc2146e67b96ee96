"""Objectives per token, as losses to minimise. `config.formulas.OBJECTIVES` has a row for each.

`policy` is log pi_theta. It, and ratios made of it, carry the gradient; all else is a constant. R =
pi_theta / behaviour, r = pi_theta / proximal; the row says which of them is the `ratio`. Bounds
`clip_low` and `clip_high` say how far a ratio may be from 1, except in GMPO.

A function is called with the values that its parameters name (`trainer.objective` lists the names).
For some objectives a second function says where the clip takes the gradient away, below and above.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from midflight.trainer.formulas import corrections, reductions

Clipped = tuple[Bool[Tensor, " T"], Bool[Tensor, " T"]]
"""Below and above."""


def clipped_surrogate(
    ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"], *, clip_low: float, clip_high: float
) -> Float[Tensor, " T"]:
    """PPO's clipped objective.

        L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    `clip_high > clip_low` is DAPO's clip-higher. On the ratio to the behaviour policy this is the bypass form; on the ratio
    to the proximal policy the decoupled one.
    """
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


def ppo(
    ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Float[Tensor, " T"]:
    """`clipped_surrogate`, and `dual_clipped` where a ceiling is given.

    PPO (1707.06347), eq. 7; decoupled 2110.00641; clip-higher 2503.14476, eq. 10; dual clip
    1912.09729, eq. 5.
    """
    loss = clipped_surrogate(ratio, advantage, clip_low=clip_low, clip_high=clip_high)
    return loss if dual_clip is None else dual_clipped(loss, advantage, ceiling=dual_clip)


def dual_clipped(
    loss: Float[Tensor, " T"], advantage: Float[Tensor, " T"], *, ceiling: float
) -> Float[Tensor, " T"]:
    """Bounds a clipped surrogate from above where the advantage is negative.

        L_t = min(L_t, -c A_t) where A_t < 0

    Ye et al. 2020 (1912.09729), eq. 5, with c > 1. Without it a token of negative advantage whose
    ratio has grown large has a loss without bound.
    """
    return torch.where(advantage < 0, torch.minimum(loss, -ceiling * advantage), loss)


def clipped(
    ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Clipped:
    """Where `ppo` is clipped: below A < 0 and r < 1 - clip_low; above A > 0 and r > 1 + clip_high,
    or A < 0 and r > dual_clip.
    """
    above = (advantage > 0) & (ratio > 1 + clip_high)
    if dual_clip is not None:
        above |= (advantage < 0) & (ratio > dual_clip)
    return (advantage < 0) & (ratio < 1 - clip_low), above


def cispo(
    policy: Float[Tensor, " T"],
    ratio: Float[Tensor, " T"],
    *,
    advantage: Float[Tensor, " T"],
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, " T"]:
    """Clips the importance weight, not the update: every token keeps a gradient.

        L_t = -sg(clip(R_t, 1 - clip_low, 1 + clip_high)) A_t log pi_theta

    The usual range of R, [0, 5], is clip_low 1 and clip_high 4. On the ratio to the proximal policy
    this is the decoupled form.

    MiniMax-M1 (2506.13585), eq. 4 and 5; ScaleRL (2510.13786). With r and `correction.weight =
    "off"` it is verl's.
    """
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantage * policy


def rollout_is(
    policy: Float[Tensor, " T"],
    ratio: Float[Tensor, " T"],
    *,
    advantage: Float[Tensor, " T"],
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, " T"]:
    """Importance-weighted policy gradient on tokens whose ratio is near 1, and none on the others
    (`cispo` clips those), whichever sign the advantage has.

        L_t = -sg(R_t [1 - clip_low < R_t < 1 + clip_high]) A_t log pi_theta

    2602.15763.
    """
    ratio = ratio.detach()
    inside = (1 - clip_low < ratio) & (ratio < 1 + clip_high)
    return -torch.where(inside, ratio, 0.0) * advantage * policy


def outside(ratio: Float[Tensor, " T"], *, clip_low: float, clip_high: float) -> Clipped:
    """Where `rollout_is` leaves a token out, whichever way its advantage points."""
    return ratio <= 1 - clip_low, ratio >= 1 + clip_high


def sapo(
    ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    *,
    tau_positive: float,
    tau_negative: float,
) -> Float[Tensor, " T"]:
    """A soft gate in place of the clip.

        L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t
        tau = tau_positive where A_t > 0, else tau_negative

    At r = 1 the gradient is that of r A; a larger tau lets it fade sooner. Usual: 1.0 and 1.05.

    SAPO (2511.20347).
    """
    positive = 4 / tau_positive * torch.sigmoid(tau_positive * (ratio - 1))
    negative = 4 / tau_negative * torch.sigmoid(tau_negative * (ratio - 1))
    return -torch.where(advantage > 0, positive, negative) * advantage


def sequence_log_ratio(
    log_ratio: Float[Tensor, " T"], sequence: Int[Tensor, " T"], *, num_sequences: int
) -> Float[Tensor, " T"]:
    """log of GSPO's ratio, mean log r over the whole rollout that a token is of, without gradient.
    2507.18071, eq. 7.
    """
    return reductions.means(log_ratio.detach(), sequence, num_sequences=num_sequences)[sequence]


def attached_ratio(
    policy: Float[Tensor, " T"], sequence_log_ratio: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """A rollout's ratio with the gradient of each of its tokens.

        s_t = sg(s) pi_theta / sg(pi_theta),  s = exp(sequence_log_ratio)

    GSPO-token (2507.18071), eq. 14.
    """
    return sequence_log_ratio.detach().exp() * (policy - policy.detach()).exp()


def gspo(
    policy: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    *,
    sequence_log_ratio: Float[Tensor, " T"],
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, " T"]:
    """`clipped_surrogate` of the `attached_ratio`, for a mean over each rollout; usual clips 3e-4
    and 4e-4.

    GSPO (2507.18071), eq. 7 and 14.
    """
    return clipped_surrogate(
        attached_ratio(policy, sequence_log_ratio),
        advantage,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def gspo_clipped(
    sequence_log_ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Clipped:
    return clipped(sequence_log_ratio.exp(), advantage, clip_low=clip_low, clip_high=clip_high)


def geometric_mean_ratio(
    log_ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    sequence: Int[Tensor, " T"],
    *,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, " T"]:
    """Geometric mean of the clipped r of the whole rollout that a token is of, without gradient.

    Each log r is clipped to [-clip_low, clip_high] on the pessimistic side only, before the mean.
    GMPO (2507.20673).
    """
    clipped = _clip_logarithm(log_ratio.detach(), advantage, clip_low=clip_low, clip_high=clip_high)
    return reductions.means(clipped, sequence, num_sequences=num_sequences).exp()[sequence]


def gmpo(
    log_ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    *,
    mean_ratio: Float[Tensor, " T"],
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, " T"]:
    """Geometric-mean policy optimization, for a mean over the tokens of a rollout, then over
    rollouts.

        L_t = -A g c_t / sg(c_t),  g = mean_ratio
        c_t = clip(r_t, e^-clip_low, e^clip_high) on the pessimistic side

    The mean over a rollout is -A prod_t c_t^(1/n), in value and gradient. `mean_ratio` comes from
    `geometric_mean_ratio`. Clips are in logarithms, usual 0.4 and 0.4.

    GMPO (2507.20673).
    """
    clipped = _clip_logarithm(log_ratio, advantage, clip_low=clip_low, clip_high=clip_high)
    return -mean_ratio.detach() * (clipped - clipped.detach()).exp() * advantage


def gmpo_clipped(
    log_ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Clipped:
    # its bounds are of the logarithm
    return clipped(1 + log_ratio, advantage, clip_low=clip_low, clip_high=clip_high)


def _clip_logarithm(
    log_ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, " T"]:
    above = torch.where(advantage > 0, log_ratio.clamp(max=clip_high), log_ratio)
    return torch.where(advantage < 0, log_ratio.clamp(min=-clip_low), above)


def topr(
    policy: Float[Tensor, " T"],
    sequence_ratio: Float[Tensor, " T"],
    *,
    advantage: Float[Tensor, " T"],
) -> Float[Tensor, " T"]:
    """Tapered off-policy REINFORCE: likes what went well at full weight, forgets what went badly
    only while it is still likely.

        L_t = -w A_t log pi_theta,  w = 1 where A_t > 0, else sg(clip(R_seq, 0, 1))

    `sequence_ratio` is the product of R over the rollout, on each of its tokens.

    TOPR (2503.14286). The paper sums over the tokens of a rollout; here the reduction decides.
    """
    weight = torch.where(advantage > 0, 1.0, sequence_ratio.detach().clamp(0, 1))
    return -weight * advantage * policy


def mirror_descent(
    policy: Float[Tensor, " T"],
    log_ratio: Float[Tensor, " T"],
    *,
    advantage: Float[Tensor, " T"],
    tau: float,
) -> Float[Tensor, " T"]:
    """Policy gradient with a quadratic pull back to the behaviour policy.

        L_t = -A_t log pi_theta + tau / 2 log^2 R_t

    A is the reward minus its group's mean, and `log_ratio` log R with its gradient; usual tau 0.1.
    No token answers for the others' drift.

    Kimi k1.5 (2501.12599), eq. 3. The paper squares the sum over a rollout, we square each token.
    """
    return -advantage * policy + tau / 2 * log_ratio**2


def dppo_tv(
    policy: Float[Tensor, " T"],
    behaviour: Float[Tensor, " T"],
    *,
    advantage: Float[Tensor, " T"],
    delta: float,
    cap: float,
) -> Float[Tensor, " T"]:
    """Trust region on the probabilities, not on their ratio: rare tokens may move, likely ones may
    not run off.

        L_t = -sg(min(R_t, cap) M_t) A_t log pi_theta
        M_t = [p_theta - p_b <= delta] where A_t > 0, else [p_theta - p_b >= -delta]

    Usual delta 0.2 and cap 20. The gradient is that of R A, where a token is kept.

    DPPO with the binary total variation (2602.04879).
    """
    below, above = dppo_clipped(policy, behaviour, advantage=advantage, delta=delta)
    return _weighted_within(policy, behaviour, advantage=advantage, kept=~(below | above), cap=cap)


def dppo_clipped(
    policy: Float[Tensor, " T"],
    behaviour: Float[Tensor, " T"],
    *,
    advantage: Float[Tensor, " T"],
    delta: float,
) -> Clipped:
    """Where `dppo_tv` leaves a token out: its probability has moved too far already, and A would
    move it on.
    """
    below, above = ipo_clipped(policy, behaviour, delta=delta)
    return below & (advantage <= 0), above & (advantage > 0)


def ipo(
    policy: Float[Tensor, " T"],
    behaviour: Float[Tensor, " T"],
    *,
    advantage: Float[Tensor, " T"],
    delta: float,
    cap: float,
) -> Float[Tensor, " T"]:
    """`dppo_tv` with a mask on both sides, whichever way the advantage points: a token that went
    too far has no gradient back either.

        L_t = -sg(min(R_t, cap) [|p_theta - p_b| <= delta]) A_t log pi_theta

    IPO of prime-rl, without a paper; there R has no cap, and `behaviour_coefficient` is 0.001.
    """
    below, above = ipo_clipped(policy, behaviour, delta=delta)
    return _weighted_within(policy, behaviour, advantage=advantage, kept=~(below | above), cap=cap)


def ipo_clipped(
    policy: Float[Tensor, " T"], behaviour: Float[Tensor, " T"], *, delta: float
) -> Clipped:
    """Where a token's probability has moved beyond the bounds."""
    gap = policy.detach().exp() - behaviour.exp()
    return gap < -delta, gap > delta


def _weighted_within(
    policy: Float[Tensor, " T"],
    behaviour: Float[Tensor, " T"],
    *,
    advantage: Float[Tensor, " T"],
    kept: Bool[Tensor, " T"],
    cap: float,
) -> Float[Tensor, " T"]:
    # From the logarithm, so that no ratio overflows before it is capped.
    ratio = (policy.detach() - behaviour).clamp(max=math.log(cap)).exp()
    return -torch.where(kept, ratio, 0.0) * advantage * policy


def largest_covariance(
    policy: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    *,
    share: float,
    cov_low: float = -math.inf,
    cov_high: float = math.inf,
) -> Bool[Tensor, " T"]:
    """True on the share of the batch's tokens, at least one, that add most to cov(log pi, A):
    entropy falls fastest there.

        cov_t = (log pi_t - mean) (A_t - mean), cov_low < cov_t < cov_high

    Cui et al. 2025 (2505.22617), Clip-Cov and KL-Cov; usual share 2e-4, and for Clip-Cov a band
    from 1 to 5. Over the tokens of the whole batch. Clip-Cov draws from its band at random; we take
    the largest, so that ranks and resumed runs agree.
    """
    policy = policy.detach()
    covariance = (policy - policy.mean()) * (advantage - advantage.mean())
    eligible = torch.where((cov_low < covariance) & (covariance < cov_high), covariance, -torch.inf)
    selected = torch.zeros_like(eligible, dtype=torch.bool)
    selected[eligible.topk(min(len(policy), max(1, int(share * len(policy))))).indices] = True
    return selected & (eligible > -torch.inf)


def clip_cov(
    ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    *,
    selected: Bool[Tensor, " T"],
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, " T"]:
    """The clipped surrogate, and 0 on the tokens that `largest_covariance` selected.

    Clip-Cov (2505.22617), there with a band from 1 to 5.
    """
    return clipped_surrogate(ratio, advantage, clip_low=clip_low, clip_high=clip_high).masked_fill(
        selected, 0
    )


def kl_cov(
    log_ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    *,
    selected: Bool[Tensor, " T"],
    penalty: float,
) -> Float[Tensor, " T"]:
    """The unclipped surrogate, with a penalty on the tokens that `largest_covariance` selected.

        L_t = -r_t A_t + beta |log r_t| where selected

    `log_ratio` is log r with its gradient; usual penalty beta 1. Like the authors' code we estimate
    the divergence by |log r|.

    KL-Cov (2505.22617). The gradient of the penalty is 0 at r = 1.
    """
    return -log_ratio.exp() * advantage + torch.where(selected, penalty * log_ratio.abs(), 0.0)


# --- What is added to a surrogate -----------------------------------------------------------------
#
# Divergences estimate KL(policy, reference) on tokens that the policy sampled. They carry the
# gradient of `policy`, never of `reference`.


def k1_divergence(
    policy: Float[Tensor, " T"], reference: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """log(pi / pi_ref), in nats. Its gradient is that of log pi alone, which on policy is 0 in
    expectation. `k2_divergence` has the gradient that k1 in the reward has.

    Schulman 2020. Unbiased, of either sign. On policy it pulls nowhere: read it, learn from k2.
    """
    return corrections.log_ratio(policy, reference)


def abs_k1_divergence(
    policy: Float[Tensor, " T"], reference: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """|log(pi / pi_ref)|, in nats: a pull to the reference of the same strength near and far. Its
    gradient is +-1, and 0 at the reference.

    `abs` in verl.
    """
    return corrections.log_ratio(policy, reference).abs()


def k2_divergence(
    policy: Float[Tensor, " T"], reference: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Half the square of k1.

    Schulman 2020. Biased, and on policy with the right gradient.
    """
    return corrections.log_ratio(policy, reference) ** 2 / 2


def k3_divergence(
    policy: Float[Tensor, " T"], reference: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """exp(-k1) - 1 + k1.

    Schulman 2020; GRPO (2402.03300), eq. 4. Unbiased, never negative. Its gradient is that of
    KL(reference, policy).
    """
    found = corrections.log_ratio(policy, reference)
    return (-found).exp() - 1 + found


def unbiased_divergence(
    policy: Float[Tensor, " T"], reference: Float[Tensor, " T"], *, behaviour: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """k3 weighted by R = pi_theta / behaviour, whose gradient counts too.

        R_t k3(pi_theta, pi_ref)

    DeepSeek-V3.2 (2512.02556), eq. 7. Value and gradient are unbiased, off policy too.
    """
    return corrections.log_ratio(policy, behaviour).exp() * k3_divergence(policy, reference)


def squared_log_ratio(
    policy: Float[Tensor, " T"], behaviour: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """A pull back to the policy that sampled the token, masked or not; weighs nothing.

        log^2(pi_theta / mu)

    Kimi K2.5 (2602.02276), and beside DPPO in prime-rl, there at 0.001. Its gradient is 2 log R.
    """
    return corrections.log_ratio(policy, behaviour) ** 2


def value_loss(
    value: Float[Tensor, " T"],
    old_value: Float[Tensor, " T"],
    returns: Float[Tensor, " T"],
    *,
    clip: float,
) -> Float[Tensor, " T"]:
    """A critic's squared error, clipped to stay near the value that began the step.

        L_t = max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) / 2

    As in the implementation of PPO by its authors; `returns` G from `gae`.
    """
    near = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum((value - returns) ** 2, (near - returns) ** 2) / 2
