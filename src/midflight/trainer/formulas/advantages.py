"""From rewards to advantages: one number per rollout, compared within its group.

A reward that is not finite says that its rollout was not scored: its advantage is 0, and it counts
in no mean and no deviation.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from midflight.trainer.formulas import reductions
from midflight.trainer.formulas.corrections import log_ratio


def dr_grpo_advantages(
    rewards: Float[Tensor, " M"], groups: Int[Tensor, " M"]
) -> Float[Tensor, " M"]:
    """Reward minus the mean of its group.

        A_i = R_i - mean(R of the group of i)

    A group of one has advantage 0, not its reward; so has a group of equal rewards, whatever their
    mean rounds to.

    Dr.GRPO (2503.20783), section 3. Dividing by the deviation favours tasks of little spread.
    """
    scored = rewards.isfinite()
    least, most = (
        _extremes(rewards.where(scored, empty), groups, how=how)
        for how, empty in (("amin", torch.inf), ("amax", -torch.inf))
    )
    return (rewards - _means(rewards, groups)[groups]).where(scored & (least < most)[groups], 0)


def grpo_advantages(rewards: Float[Tensor, " M"], groups: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
    """Reward minus the mean of its group, in deviations of that group.

        A_i = (R_i - mean) / (std + 1e-6),  std = sqrt(sum (R - mean)^2 / (n - 1))

    A group of one has advantage 0.

    GRPO (2402.03300), section 4.1.2. The deviation uses n - 1.
    """
    centred = dr_grpo_advantages(rewards, groups)
    freedom = (_counts(rewards, groups) - 1).clamp(min=1)
    deviations = (_sums(centred**2, groups) / freedom).sqrt()
    return centred / (deviations[groups] + 1e-6)


def rloo_advantages(rewards: Float[Tensor, " M"], groups: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
    """Reward minus the mean of the others in its group.

        A_i = R_i - sum_{j != i} R_j / (n - 1) = n / (n - 1) (R_i - mean)

    A group of one has no others, and advantage 0.

    REINFORCE leave-one-out (2402.14740).
    """
    n = _counts(rewards, groups)
    return dr_grpo_advantages(rewards, groups) * (n / (n - 1).clamp(min=1))[groups]


def reinforce_pp_advantages(
    rewards: Float[Tensor, " M"], groups: Int[Tensor, " M"]
) -> Float[Tensor, " M"]:
    """Reward minus the mean of its group, in deviations of the whole batch.

        A_i = B((R_i - mean of the group)),  B = batch_normalised

    A group whose rewards are all alike would otherwise be lifted by a large deviation of its own.
    Every rollout counts once, however long.

    REINFORCE++ with a baseline (2501.03262).
    """
    return batch_normalised(dr_grpo_advantages(rewards, groups), counted=rewards.isfinite())


def maxrl_advantages(
    rewards: Float[Tensor, " M"], groups: Int[Tensor, " M"]
) -> Float[Tensor, " M"]:
    """Reward minus the mean of its group, in means of that group.

        A_i = (R_i - mean) / mean;  0 where the mean is 0

    The policy gradient is that of the log-likelihood of success, to the order that the group
    allows. A mean near 0 of negative rewards would blow up its group. A group of one has advantage 0.

    MaxRL (2602.02710). A task that is seldom solved weighs more. Rewards must not be negative.
    """
    means = _means(rewards, groups)[groups]
    return torch.where(means > 0, dr_grpo_advantages(rewards, groups) / means, 0)


def rewards_as_they_are(
    rewards: Float[Tensor, " M"], groups: Int[Tensor, " M"]
) -> Float[Tensor, " M"]:
    """For a critic, which makes an advantage of each token from them by `gae`.

    1506.02438, eq. 16. Nothing is compared within groups.
    """
    return rewards


def batch_normalised(
    values: Float[Tensor, " N"], *, counted: Bool[Tensor, " N"] | None = None
) -> Float[Tensor, " N"]:
    """Values minus their mean, in deviations: (x - mean) / (std + 1e-8), where std uses n - 1; 0
    for what is not counted.

    REINFORCE++ (2501.03262), of the values of a whole batch: of rewards per rollout, or spread over
    tokens.
    """
    counted = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
    n = counted.sum()
    centred = (values - values.where(counted, 0).sum() / n.clamp(min=1)).where(counted, 0)
    deviation = ((centred**2).sum() / (n - 1).clamp(min=1)).sqrt()
    return centred / (deviation + 1e-8)


def decoupled_advantages(
    components: Float[Tensor, "M C"], groups: Int[Tensor, " M"], *, weights: Float[Tensor, " C"]
) -> Float[Tensor, " M"]:
    """Each component of the reward compared within its group by itself, so that one of large spread
    does not drown the others.

        A_i = B(sum_c w_c A_ic),  A_ic = grpo_advantages of component c,  B = batch_normalised

    GDPO: Liu et al. 2026 (2601.05242), section 3. A component that is NaN does not apply to its
    rollout: it counts in no mean of that component, and adds nothing to the rollout. One without
    any finite component has advantage 0, and counts in no deviation.
    """
    found = torch.stack([grpo_advantages(column, groups) for column in components.unbind(1)], dim=1)
    return batch_normalised(found @ weights, counted=components.isfinite().any(1))


def turn_advantages(
    compared: Callable[[Float[Tensor, " M"]], Float[Tensor, " M"]],
    rewards: Float[Tensor, " M"],
    earned: Float[Tensor, "M K"],
) -> Float[Tensor, "M K+1"]:
    """One advantage for each answer: rewards to come, compared with those of the group's rollouts
    at the same answer.

        A_ik = compared(G_k)_i,  G_ik = R_i - sum_{j < k} r_ij

    Return-based advantages of turns, without a discount: GTPO, Ding et al. 2025 (2511.14846),
    section 3; reward to go with a baseline: Williams 1992. R is the rollout's whole reward, r_ij
    what its answer j earned of it; `compared` is any function of this file. Answers from K on have
    the last column. A rollout that ended before keeps what it has left to the end as its part of
    the baseline, so that where no answer earned anything all columns are `compared(R)`.
    """
    before = torch.cat([rewards.new_zeros(len(rewards), 1), earned.cumsum(1)], dim=1)
    return torch.stack([compared(rewards - column) for column in before.unbind(1)], dim=1)


def gae(
    rewards: Float[Tensor, " T"],
    values: Float[Tensor, " T"],
    *,
    sequence: Int[Tensor, " T"],
    position: Int[Tensor, " T"],
    num_sequences: int,
    discount: float,
    decay: float,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Generalised advantage estimation: advantages, and returns (advantage + value) for the critic.

        A_t = delta_t + discount decay A_{t+1},  delta_t = R_t + discount V_{t+1} - V_t

    Schulman et al. 2016 (1506.02438), eq. 16. `position` orders the tokens of a rollout. Its
    trained tokens alone are steps: t + 1 is the next of them, whatever a tool wrote between. A
    rollout ends after its last one, where V and A are 0. A rollout with a reward that is not finite
    has advantage 0, and its values for returns.
    """
    scored = (
        reductions.sums(
            (~rewards.isfinite()).to(values.dtype), sequence, num_sequences=num_sequences
        )[sequence]
        == 0
    )
    rank = _ranks(sequence, position, num_sequences=num_sequences)
    # V and A of the step after this one.
    ahead = torch.zeros(2, num_sequences, dtype=values.dtype, device=values.device)
    advantages = torch.zeros_like(values)
    for at in reversed(rank.argsort().split(rank.bincount().tolist())):
        next_value, next_advantage = ahead[:, sequence[at]]
        delta = rewards[at] + discount * next_value - values[at]
        advantages[at] = delta + discount * decay * next_advantage
        ahead[:, sequence[at]] = torch.stack((values[at], advantages[at]))
    advantages = advantages.where(scored, 0)
    return advantages, advantages + values


def overlong_penalty(
    room: Int[Tensor, " M"], *, buffer: int, penalty: float
) -> Float[Tensor, " M"]:
    """The term that DAPO adds to the reward of an answer that comes close to its limit L, in
    tokens. At the limit it is the whole penalty.

        -clip((len - (L - buffer)) / buffer, 0, 1) * penalty
            = -clip(1 - room / buffer, 0, 1) * penalty,   room = L - len

    Yu et al. 2025 (2503.14476), eq. 13, where a rollout is one answer. With several turns `room` is
    that of the answer that came nearest to its own limit, so that many short answers cost nothing.
    `buffer = 0` is no penalty.
    """
    if buffer == 0:
        return torch.zeros(room.shape, dtype=torch.float64, device=room.device)
    return -(1 - room.to(torch.float64) / buffer).clamp(0, 1) * penalty


def distillation_advantage(
    teacher: Float[Tensor, " T"], behaviour: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """A_t = log teacher - log behaviour on the student's own tokens: its policy gradient lowers
    KL(student, teacher), token by token.

    On-policy distillation (2306.13649 with reverse KL), with no discount over later tokens. In
    nats, clamped to +-20.
    """
    return log_ratio(teacher, behaviour).detach()


def _ranks(
    sequence: Int[Tensor, " T"], position: Int[Tensor, " T"], *, num_sequences: int
) -> Int[Tensor, " T"]:
    """How many tokens of its own rollout come before each token."""
    by_position = position.argsort(stable=True)
    order = by_position[sequence[by_position].argsort(stable=True)]
    lengths = reductions.counts(sequence, num_sequences=num_sequences)
    starts = (lengths.cumsum(0) - lengths)[sequence[order]]
    ranks = torch.empty_like(sequence)
    ranks[order] = torch.arange(len(sequence), device=sequence.device) - starts
    return ranks


def _sums(values: Float[Tensor, " M"], groups: Int[Tensor, " M"]) -> Float[Tensor, " G"]:
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    return torch.zeros(num_groups, dtype=values.dtype, device=values.device).index_add(
        0, groups, values
    )


def _extremes(
    values: Float[Tensor, " M"], groups: Int[Tensor, " M"], *, how: str
) -> Float[Tensor, " G"]:
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    return torch.zeros(num_groups, dtype=values.dtype, device=values.device).scatter_reduce(
        0, groups, values, reduce=how, include_self=False
    )


def _means(rewards: Float[Tensor, " M"], groups: Int[Tensor, " M"]) -> Float[Tensor, " G"]:
    """Means over the scored rollouts of each group; 0 where there are none."""
    return _sums(rewards.where(rewards.isfinite(), 0), groups) / _counts(rewards, groups)


def _counts(rewards: Float[Tensor, " M"], groups: Int[Tensor, " M"]) -> Float[Tensor, " G"]:
    """Scored rollouts of each group, at least 1."""
    return _sums(rewards.isfinite().to(rewards.dtype), groups).clamp(min=1)
