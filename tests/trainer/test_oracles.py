"""Our functions, composed, against every value of public implementations: values, gradients and arrays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from midflight.trainer.formulas import corrections, losses, reductions
from midflight.trainer.formulas.advantages import batch_normalised, dr_grpo_advantages, grpo_advantages, rloo_advantages
from midflight.trainer.formulas.corrections import log_ratio
from midflight.trainer.formulas.reductions import constant, sequence_mean, token_mean

from . import oracles
from .oracles import ABSOLUTE, Inputs

HIGH = {"clip_low": 0.2, "clip_high": 0.28}
EVEN = {"clip_low": 0.2, "clip_high": 0.2}


def advantage() -> Tensor:
    return grpo_advantages(torch.tensor(oracles.REWARDS), torch.tensor(oracles.GROUPS)).repeat_interleave(torch.tensor(oracles.LENGTHS))


def tokens(loss: Tensor, d: Inputs) -> Tensor:
    return token_mean(loss, num_tokens=len(d.rollout))


def rollouts(loss: Tensor, d: Inputs) -> Tensor:
    return sequence_mean(loss, d.rollout, tokens_of_rollout=torch.tensor(oracles.LENGTHS), num_rollouts=6)


def summed(loss: Tensor, d: Inputs, *, length: int) -> Tensor:
    return constant(loss, num_rollouts=6, length=length)


# --- Surrogates ------------------------------------------------------------------------------------------------------


def log_r(d: Inputs) -> Tensor:
    return log_ratio(d.logp, d.old)


def ppo(d: Inputs, clips: dict[str, float] = HIGH, *, ceiling: float | None = None) -> Tensor:
    loss = losses.clipped_surrogate(log_r(d).exp(), advantage(), **clips)
    return loss if ceiling is None else losses.dual_clipped(loss, advantage(), ceiling=ceiling)


def gspo(d: Inputs, clips: dict[str, float]) -> Tensor:
    return losses.clipped_surrogate(losses.attached_ratio(d.logp, losses.sequence_log_ratio(log_r(d), **d.whole)), advantage(), **clips)


def gmpo(d: Inputs) -> Tensor:
    mean = losses.geometric_mean_ratio(log_r(d), advantage(), **d.whole, **HIGH)
    return losses.gmpo(log_r(d), advantage(), mean_ratio=mean, **HIGH)


def sapo(d: Inputs) -> Tensor:
    return losses.sapo(log_r(d).exp(), advantage(), tau_positive=1.0, tau_negative=1.05)


def cispo(d: Inputs, *, low: float, high: float) -> Tensor:
    return losses.cispo(d.logp, log_r(d).exp(), advantage=advantage(), clip_low=low, clip_high=high)


def dppo_tv(d: Inputs) -> Tensor:
    """verl has a bound for each sign of the advantage, .28 and .2, where the paper and we have one; its cap was 3."""
    up, down = (losses.dppo_tv(d.logp, d.old, advantage=advantage(), delta=delta, cap=3.0) for delta in (0.28, 0.2))
    return torch.where(advantage() > 0, up, down)


def clip_cov(d: Inputs) -> Tensor:
    """verl draws one of the four tokens in the band at random, and here drew the largest, which we always take."""
    selected = losses.largest_covariance(d.logp, advantage(), share=2e-4, cov_low=1.0, cov_high=5.0)
    return losses.clip_cov(log_r(d).exp(), advantage(), selected=selected, **HIGH)


def kl_cov(d: Inputs) -> Tensor:
    selected = losses.largest_covariance(d.logp, advantage(), share=2e-4)
    return losses.kl_cov(log_r(d), advantage(), selected=selected, penalty=0.1)


# --- Corrections -----------------------------------------------------------------------------------------------------


def log_rho(d: Inputs) -> Tensor:
    return log_ratio(d.old, d.roll)


def rho(d: Inputs) -> Tensor:
    return log_rho(d).exp()


def geometric(d: Inputs) -> Tensor:
    return reductions.means(log_rho(d), **d.whole).exp()[d.rollout]


def k3_of_sequence(d: Inputs, *, bound: float, over: str) -> Tensor:
    statistic = {"mean": reductions.means, "max": reductions.maxima}[over]
    return (statistic(corrections.k3(log_rho(d)), **d.whole) <= bound)[d.rollout]


def k3_with_gradient_of_k2(d: Inputs) -> Tensor:
    k2, k3 = losses.k2_divergence(d.logp, d.ref), losses.k3_divergence(d.logp, d.ref)
    return k3.detach() + k2 - k2.detach()


COMPOSED: dict[str, Callable[[Inputs], Tensor]] = {
    "verl/vanilla/token-mean": lambda d: tokens(ppo(d, ceiling=3.0), d),
    "verl/vanilla/seq-mean-token-sum": lambda d: summed(ppo(d, ceiling=3.0), d, length=1),
    "verl/vanilla/seq-mean-token-mean": lambda d: rollouts(ppo(d, ceiling=3.0), d),
    "verl/vanilla/seq-mean-token-sum-norm": lambda d: summed(ppo(d, ceiling=3.0), d, length=12),
    "verl/vanilla+tis_token_2.0": lambda d: tokens(corrections.truncated_weight(rho(d), cap=2.0) * ppo(d, EVEN, ceiling=3.0), d),
    "verl/gspo": lambda d: rollouts(gspo(d, HIGH), d),
    "verl/sapo": lambda d: rollouts(sapo(d), d),
    "verl/gpg": lambda d: tokens(cispo(d, low=0.0, high=0.0), d),  # -A log pi: CISPO with every weight clipped to 1.
    "verl/cispo": lambda d: tokens(cispo(d, low=0.2, high=0.28), d),
    "verl/geo_mean": lambda d: rollouts(gmpo(d), d),
    "verl/dppo_tv": lambda d: tokens(dppo_tv(d), d),
    "verl/clip_cov": lambda d: tokens(clip_cov(d), d),
    "verl/kl_cov": lambda d: tokens(kl_cov(d), d),
    "verl/kl_kl": lambda d: tokens(log_ratio(d.logp, d.ref), d),
    "verl/kl_abs": lambda d: tokens(log_ratio(d.logp, d.ref).abs(), d),
    "verl/kl_mse": lambda d: tokens(losses.k2_divergence(d.logp, d.ref), d),
    "verl/kl_low_var_kl": lambda d: tokens(losses.k3_divergence(d.logp, d.ref), d),
    "verl/kl_k3+": lambda d: tokens(k3_with_gradient_of_k2(d), d),
    "areal/ppo": lambda d: tokens(ppo(d, EVEN), d),
    "areal/ppo_dual_hi0.28_c3": lambda d: tokens(ppo(d, ceiling=3.0), d),
    "areal/gspo_0.2": lambda d: tokens(gspo(d, EVEN), d),  # Averaged over tokens, where GSPO and we average over rollouts.
    # A mask without a lower bound is MIS with 0 below. Its denominator counts the dropped tokens too, like ours.
    "areal/decoupled_token_mask_ratio_mean_2.0_None": lambda d: tokens(corrections.masked_weight(rho(d), low=0, high=2) * ppo(d, EVEN), d),
    "areal/decoupled_token_clamp_ratio_mean_2.0_None": lambda d: tokens(corrections.truncated_weight(rho(d), cap=2) * ppo(d, EVEN), d),
    # A clamp from below lifts small weights; our truncation leaves them, so the test lifts them itself.
    "areal/decoupled_token_clamp_ratio_mean_2.0_0.5": lambda d: tokens(
        corrections.truncated_weight(rho(d), cap=2).clamp(min=0.5) * ppo(d, EVEN), d
    ),
    # Its weight of a sequence is the geometric mean of rho, where ours is the product (row 6) or that of the token.
    "areal/decoupled_sequence_mask_ratio_mean_1.1_0.9": lambda d: tokens(
        geometric(d) * corrections.geometric_mask(log_rho(d), **d.whole, low=0.9, high=1.1) * ppo(d, EVEN), d
    ),
    "areal/decoupled_sequence_mask_kl_k3_mean_0.05_None": lambda d: tokens(
        rho(d) * k3_of_sequence(d, bound=0.05, over="mean") * ppo(d, EVEN), d
    ),
    "areal/decoupled_sequence_mask_kl_k3_max_0.5_None": lambda d: tokens(
        rho(d) * k3_of_sequence(d, bound=0.5, over="max") * ppo(d, EVEN), d
    ),
    "areal/decoupled_sequence_clamp_ratio_mean_1.1_0.9": lambda d: tokens(geometric(d).clamp(0.9, 1.1) * ppo(d, EVEN), d),
    "areal/sapo_1.0_1.05": lambda d: tokens(sapo(d), d),
    "trl/loss_grpo": lambda d: rollouts(ppo(d), d),
    "trl/loss_bnpo": lambda d: tokens(ppo(d), d),
    "trl/loss_dr_grpo": lambda d: summed(ppo(d), d, length=12),
    "trl/loss_dapo": lambda d: tokens(ppo(d), d),
    "trl/loss_cispo": lambda d: tokens(cispo(d, low=1.0, high=4.0), d),  # Its bound of 5 is absolute, ours is 1 + clip_high.
    "trl/loss_sapo": lambda d: rollouts(sapo(d), d),
    "trl/loss_luspo": lambda d: summed(ppo(d), d, length=1),  # Sequence means times lengths: a constant length of 1.
    "trl/loss_grpo_beta0.1": lambda d: rollouts(ppo(d) + 0.1 * losses.k3_divergence(d.logp, d.ref), d),
    "trl/loss_dapo_delta2": lambda d: tokens(ppo(d, ceiling=2.0), d),  # A ratio of at most 2 is a dual clip at 2.
    "trl/gspo": lambda d: rollouts(gspo(d, HIGH), d),
    "trl/loss_grpo_offpolicymask0.1": lambda d: rollouts(
        ppo(d) * corrections.opsm_mask(-log_r(d), advantage(), **d.whole, bound=0.1), d
    ),  # No rollout is that far away.
    "trl/loss_dapo_tis_cap2": lambda d: tokens(corrections.truncated_weight(rho(d), cap=2) * ppo(d), d),
}

NOT_OURS = {"verl/dppo_kl": "bounds the divergence of a token against all others; we have the total variation, which the paper prefers"}


def test_every_known_loss_is_composed_or_said_not_to_be_ours() -> None:
    assert {*COMPOSED, *NOT_OURS} == {*oracles.KNOWN} and COMPOSED.keys().isdisjoint(NOT_OURS)


@pytest.mark.parametrize("name", COMPOSED)
def test_losses_and_gradients_agree_with_public_implementations(name: str) -> None:
    data, known = oracles.inputs(), oracles.KNOWN[name]
    loss = COMPOSED[name](data)
    loss.backward()
    gradient = data.logp.grad
    assert gradient is not None
    assert (float(loss.detach()), float(gradient.norm()), float(gradient.sum())) == pytest.approx(
        (known.value, known.grad_l2, known.grad_sum), abs=ABSOLUTE
    )


def rewards(compare: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return compare(torch.tensor(oracles.REWARDS), torch.tensor(oracles.GROUPS))


def first_tokens(values: Tensor) -> Tensor:
    """One value of each rollout."""
    return torch.stack([values[start] for start in (0, 12, 21, 26, 38, 39)])


def inverse(*, low: float, high: float) -> dict[str, float]:
    """verl's k1 bounds act on 1 / rho; ours on rho."""
    return {"low": 1 / high, "high": 1 / low}


ARRAYS_PER_ROLLOUT: dict[str, Callable[[Inputs], Tensor]] = {
    "tis_seq_2.0": lambda d: first_tokens(corrections.truncated_sequence_weight(log_rho(d), **d.whole, cap=2.0)),
    "rs_seq_sum_k1_0.5_2.0": lambda d: first_tokens(
        corrections.masked_sequence_weight(log_rho(d), **d.whole, **inverse(low=0.5, high=2.0)) > 0
    ),
    "rs_seq_mean_k1_0.8_1.25": lambda d: first_tokens(corrections.geometric_mask(log_rho(d), **d.whole, **inverse(low=0.8, high=1.25))),
    "rs_seq_mean_k3_0.05": lambda d: first_tokens(k3_of_sequence(d, bound=0.05, over="mean")),
    "rs_seq_max_k3_0.5": lambda d: first_tokens(k3_of_sequence(d, bound=0.5, over="max")),
    "adv_grpo": lambda _: rewards(grpo_advantages),
    "adv_drgrpo": lambda _: rewards(dr_grpo_advantages),
    "adv_rloo": lambda _: rewards(rloo_advantages),
    # verl normalises over tokens, so that long rollouts weigh more; `reinforce_pp_advantages` over rollouts.
    "adv_reinforce_plus_plus_baseline": lambda d: first_tokens(batch_normalised(rewards(dr_grpo_advantages)[d.rollout])),
    "adv_reinforce_plus_plus": lambda d: first_tokens(batch_normalised(torch.tensor(oracles.REWARDS)[d.rollout])),
}

ARRAYS_NOT_OURS = {
    "adv_opo": "its baseline weighs rewards by length, an estimator of its own",
    "adv_gpg": "reward minus mean, times the inverse share of groups with spread; we refill such groups instead",
}

ARRAYS_PER_TOKEN: dict[str, Callable[[Inputs], Tensor]] = {
    "tis_token_2.0": lambda d: corrections.truncated_weight(rho(d), cap=2.0),
    "icepop_token_0.5_2.0": lambda d: corrections.icepop_weight(rho(d), low=0.5, high=2.0),
    "rs_token_k1_0.5_2.0": lambda d: corrections.masked_weight(rho(d), **inverse(low=0.5, high=2.0)) > 0,
    "rs_token_k3_0.1": lambda d: corrections.k3_mask(log_rho(d), bound=0.1),
}


def test_every_known_array_is_computed_or_said_not_to_be_ours() -> None:
    assert {*ARRAYS_PER_ROLLOUT, *ARRAYS_NOT_OURS} == {*oracles.PER_ROLLOUT}
    assert {*ARRAYS_PER_TOKEN} == {*oracles.PER_TOKEN}


@pytest.mark.parametrize("name", ARRAYS_PER_ROLLOUT)
def test_numbers_of_rollouts_agree_with_verl(name: str) -> None:
    found = ARRAYS_PER_ROLLOUT[name](oracles.inputs())
    assert found.tolist() == pytest.approx(oracles.PER_ROLLOUT[name], abs=ABSOLUTE)


@pytest.mark.parametrize("name", ARRAYS_PER_TOKEN)
def test_numbers_of_tokens_agree_with_verl(name: str) -> None:
    found = ARRAYS_PER_TOKEN[name](oracles.inputs())
    assert found.tolist() == pytest.approx(oracles.PER_TOKEN[name], abs=ABSOLUTE)
