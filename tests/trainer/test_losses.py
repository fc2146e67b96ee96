"""Objectives per token, and what is added to them, against values and gradients worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from midflight.trainer.formulas import losses, reductions
from midflight.trainer.formulas.advantages import distillation_advantage
from midflight.trainer.formulas.corrections import log_ratio, truncated_weight

from .tensors import of, shuffled_tokens, whole

CLIPS = {"clip_low": 0.2, "clip_high": 0.2}


def gradient(loss: Tensor, of_what: Tensor) -> list[float]:
    return torch.autograd.grad(loss.sum(), of_what, retain_graph=True)[0].tolist()


@pytest.mark.parametrize(("ratio", "advantage", "loss"), [(1.5, 1, -1.2), (0.5, 1, -0.5), (0.5, -1, 0.8), (10, -1, 10)])
def test_ppo_clips_on_the_pessimistic_side_only(ratio: float, advantage: float, loss: float) -> None:
    assert losses.clipped_surrogate(of(ratio), of(advantage), **CLIPS).tolist() == pytest.approx([loss])


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    # R = 10 at A = -1 would cost 10; c = 3 makes it 3. A positive advantage is left alone.
    assert losses.dual_clipped(of(10.0, -1.2), of(-1.0, 1.0), ceiling=3.0).tolist() == pytest.approx([3.0, -1.2])


def test_the_gradient_of_one_decoupled_update_is_truncated_importance_sampling() -> None:
    # r = 1, so the loss is -w A and d loss / d log pi = -w A, with w = min(pi / mu, 2).
    policy, behaviour, advantage = of(math.log(0.9), math.log(0.2)).requires_grad_(), of(math.log(0.3), math.log(0.4)), of(1.0, -1.0)
    weight = truncated_weight(log_ratio(policy, behaviour).exp(), cap=2.0)
    loss = weight * losses.clipped_surrogate(log_ratio(policy, policy.detach()).exp(), advantage, **CLIPS)
    assert loss.tolist() == pytest.approx([-2.0, 0.5])
    assert gradient(loss, policy) == pytest.approx([-2.0, 0.5])


def test_a_clip_binds_on_the_ratio_to_the_behaviour_policy_where_the_ratio_to_itself_is_one() -> None:
    policy, behaviour = of(math.log(0.9)), of(math.log(0.3))
    to_itself, to_behaviour = (log_ratio(policy, other).exp() for other in (policy, behaviour))
    assert losses.clipped(to_itself, of(1.0), **CLIPS)[1].tolist() == [False]
    assert losses.clipped(to_behaviour, of(1.0), **CLIPS)[1].tolist() == [True]


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    # R = 7 in the range [0, 5] weighs 5; the gradient of log pi is -5 A. PPO would have none there.
    policy = of(-0.5, -0.5).requires_grad_()
    ratio = log_ratio(policy, of(-0.5, -0.5) - of(7.0, 0.1).log()).exp()
    loss = losses.cispo(policy, ratio, advantage=of(1.0, 1.0), clip_low=1.0, clip_high=4.0)
    assert gradient(loss, policy) == pytest.approx([-5.0, -0.1])
    assert loss.tolist() == pytest.approx([2.5, 0.05])


def test_rollout_is_has_no_gradient_outside_whatever_the_sign_of_the_advantage() -> None:
    policy = of(-1.0, -1.0, -1.0, -1.0).requires_grad_()
    ratio = log_ratio(policy, -1 - of(1.1, 1.3, 0.7, 1.3).log()).exp()
    loss = losses.rollout_is(policy, ratio, advantage=of(1.0, 1.0, 1.0, -1.0), **CLIPS)
    assert gradient(loss, policy) == pytest.approx([-1.1, 0.0, 0.0, 0.0])


def test_sapo_by_hand() -> None:
    # tau 1: -4 sigmoid(0) = -2 and -4 sigmoid(1) = -2.924. A < 0 has its own tau: 4 / 2 sigmoid(2) = 1.762.
    found = losses.sapo(of(1.0, 2.0, 2.0), of(1.0, 1.0, -1.0), tau_positive=1.0, tau_negative=2.0)
    assert found.tolist() == pytest.approx([-2.0, -2.924, 1.762], abs=5e-4)


def test_sapo_has_the_gradient_of_the_ratio_at_one_and_fades_from_there() -> None:
    ratio = of(1.0, 3.0).requires_grad_()
    near, far = gradient(losses.sapo(ratio, of(1.0, 1.0), tau_positive=1.0, tau_negative=1.0), ratio)
    assert near == pytest.approx(-1.0) and -0.5 < far < 0


def test_a_token_of_gspo_has_the_ratio_of_its_rollout_and_a_gradient_of_its_own() -> None:
    # log r .2 and .4 in one rollout: s = e^.3 for both tokens; d s_t / d log pi_t = s.
    policy = of(-1.0, -2.0).requires_grad_()
    mean = losses.sequence_log_ratio(of(0.2, 0.4), **whole(0, 0))
    ratio = losses.attached_ratio(policy, mean)
    assert ratio.tolist() == pytest.approx([math.exp(0.3)] * 2)
    assert gradient(ratio, policy) == pytest.approx([math.exp(0.3)] * 2)


def geometric_mean_objective(log_r: Tensor, advantage: Tensor, sequence: Tensor) -> Tensor:
    """GMPO as its paper writes it: -A (prod of clipped r)^(1/n) of each rollout, then their mean."""
    found = []
    for i in sequence.unique():
        here = sequence == i
        a = advantage[here][0]
        clipped = log_r[here].clamp(max=0.6) if a > 0 else log_r[here].clamp(min=-0.4) if a < 0 else log_r[here]
        found.append(-a * clipped.mean().exp())
    return torch.stack(found).mean()


@settings(deadline=None, max_examples=30)
@given(shuffled_tokens())
def test_gmpo_has_the_value_and_gradient_of_the_geometric_mean_in_any_order_of_tokens(drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    values, sequence, order = drawn
    advantage = of(1.0, -0.5, 2.0, -1.0)[sequence]
    policy = torch.zeros_like(values).requires_grad_()
    expected = geometric_mean_objective(policy + values, advantage, sequence)
    shuffled, number, a = (policy + values)[order], sequence[order], advantage[order]
    clips = {"clip_low": 0.4, "clip_high": 0.6}
    mean = losses.geometric_mean_ratio(shuffled, a, number, num_sequences=4, **clips)
    per_token = losses.gmpo(shuffled, a, mean_ratio=mean, **clips)
    found = reductions.means(per_token, number, num_sequences=4).sum() / len(number.unique())
    assert float(found.detach()) == pytest.approx(float(expected.detach()))
    assert gradient(found, policy) == pytest.approx(gradient(expected, policy))


@settings(deadline=None, max_examples=30)
@given(shuffled_tokens())
def test_the_gradient_of_gspo_does_not_depend_on_the_order_of_tokens(drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    values, sequence, order = drawn
    policy, advantage = torch.zeros_like(values).requires_grad_(), of(1.0, -0.5, 2.0, -1.0)[sequence]
    found = []
    for at in (torch.arange(len(values)), order):
        log_r = (policy + values)[at]
        ratio = losses.attached_ratio(policy[at], losses.sequence_log_ratio(log_r, sequence[at], num_sequences=4))
        found.append(gradient(losses.clipped_surrogate(ratio, advantage[at], clip_low=0.25, clip_high=0.25), policy))
    assert found[0] == pytest.approx(found[1])


def test_topr_likes_at_full_weight_and_forgets_only_what_is_still_likely() -> None:
    # A > 0: weight 1 whatever the ratio. A < 0: the ratio of the rollout within [0, 1].
    policy = of(-1.0, -1.0, -1.0).requires_grad_()
    loss = losses.topr(policy, of(0.1, 0.1, 7.0), advantage=of(1.0, -1.0, -1.0))
    assert gradient(loss, policy) == pytest.approx([-1.0, 0.1, 1.0])


def test_mirror_descent_pulls_back_to_the_behaviour_policy() -> None:
    # log R = .5, tau .1: the gradient is -A + .1 * .5; without an advantage only the pull is left.
    policy = of(-1.0, -1.0).requires_grad_()
    loss = losses.mirror_descent(policy, log_ratio(policy, of(-1.5, -1.5)), advantage=of(1.0, 0.0), tau=0.1)
    assert loss.tolist() == pytest.approx([1.0 + 0.05 * 0.25, 0.05 * 0.25])
    assert gradient(loss, policy) == pytest.approx([-0.95, 0.05])


def test_dppo_bounds_the_change_of_probability_and_not_of_the_ratio() -> None:
    # p .5 -> .8 gains .3 > .2: no gradient for A > 0, one for A < 0. p .001 -> .01 has ratio 10 and gains .009: kept.
    now, before = of(0.8, 0.8, 0.01, 0.3).log().requires_grad_(), of(0.5, 0.5, 0.001, 0.6).log()
    loss = losses.dppo_tv(now, before, advantage=of(1.0, -1.0, 1.0, -1.0), delta=0.2, cap=5.0)
    assert gradient(loss, now) == pytest.approx([0.0, 1.6, -5.0, 0.0])


def test_ipo_masks_what_moved_too_far_on_either_side_whatever_the_advantage() -> None:
    # Gaps .3, .3, .009, -.3 and -.05, threshold .1. Where it is kept the gradient is -min(R, cap) A, R = .8 / .85 at the end.
    now, before = of(0.8, 0.8, 0.01, 0.3, 0.8).log().requires_grad_(), of(0.5, 0.5, 0.001, 0.6, 0.85).log()
    loss = losses.ipo(now, before, advantage=of(1.0, -1.0, 1.0, 1.0, -1.0), delta=0.1, cap=5.0)
    assert gradient(loss, now) == pytest.approx([0.0, 0.0, -5.0, 0.0, 0.8 / 0.85])
    assert loss.tolist() == pytest.approx([0.0, 0.0, -5.0 * math.log(0.01), 0.0, 0.8 / 0.85 * math.log(0.8)])
    below, above = losses.ipo_clipped(now, before, delta=0.1)
    assert (below.tolist(), above.tolist()) == ([False, False, False, True, False], [True, True, False, False, False])


def test_a_pull_to_the_behaviour_policy_by_hand() -> None:
    # log R = log 2: .4805, and its gradient is 2 log 2.
    policy = of(math.log(0.4)).requires_grad_()
    found = losses.squared_log_ratio(policy, of(math.log(0.2)))
    assert found.tolist() == pytest.approx([0.48045], abs=5e-6) and gradient(found, policy) == pytest.approx([2 * math.log(2)])


POINT = {
    "policy": of(-0.5, -1.4, -0.9, -2.2),
    "behaviour": of(-0.6, -1.1, -1.0, -2.1),
    "reference": of(-0.8, -1.2, -0.7, -2.5),
    "advantage": of(1.0, -1.0, 0.5, -0.5),
}
"""No token lies where a mask, a clip or a kink begins."""

WITH_GRADIENT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # As a surrogate M R A, whose gradient these have in value (`sg` holds R at the point where it is looked at).
    "dppo_tv": lambda p, at: losses.dppo_tv(p, POINT["behaviour"], advantage=POINT["advantage"], delta=0.06, cap=20.0),
    "ipo": lambda p, at: losses.ipo(p, POINT["behaviour"], advantage=POINT["advantage"], delta=0.05, cap=20.0),
    "decoupled_cispo": lambda p, at: losses.cispo(
        p, log_ratio(p, POINT["behaviour"]).exp(), advantage=POINT["advantage"], clip_low=0.2, clip_high=0.02
    ),
    "squared_log_ratio": lambda p, at: losses.squared_log_ratio(p, POINT["behaviour"]),
    "k1": lambda p, at: losses.k1_divergence(p, POINT["reference"]),
    "abs_k1": lambda p, at: losses.abs_k1_divergence(p, POINT["reference"]),
    "clip_cov": lambda p, at: losses.clip_cov(
        log_ratio(p, POINT["behaviour"]).exp(),
        POINT["advantage"],
        selected=losses.largest_covariance(at, POINT["advantage"], share=0.5, cov_low=0.1, cov_high=0.5),
        **CLIPS,
    ),
}

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    # p - mu: .0577, -.0863, .0387, -.0117 by the probabilities of POINT; the second falls and A < 0 pushes it on.
    "dppo_tv": lambda p: -of(1, 0, 1, 1) * (p - POINT["behaviour"]).exp() * POINT["advantage"],
    "ipo": lambda p: -of(0, 0, 1, 1) * (p - POINT["behaviour"]).exp() * POINT["advantage"],
    # R: 1.105, .741, 1.105, .905, clipped to [.8, 1.02] as a weight.
    "decoupled_cispo": lambda p: -of(1.02, 0.8, 1.02, math.exp(-0.1)) * POINT["advantage"] * p,
    "squared_log_ratio": lambda p: (p - POINT["behaviour"]) ** 2,
    "k1": lambda p: p - POINT["reference"],
    "abs_k1": lambda p: of(1, -1, -1, 1) * (p - POINT["reference"]),
    # mean log pi -1.25, mean A 0: covariances .75, .15, .175, .475; in the band the last three, of which half of four are the largest two.
    "clip_cov": lambda p: (
        -of(1, 1, 0, 0)
        * torch.minimum(
            (p - POINT["behaviour"]).exp() * POINT["advantage"], (p - POINT["behaviour"]).exp().clamp(0.8, 1.2) * POINT["advantage"]
        )
    ),
}


@pytest.mark.parametrize("name", sorted(WITH_GRADIENT))
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    policy = POINT["policy"].clone().requires_grad_()
    found = gradient(WITH_GRADIENT[name](policy, policy.detach()), policy)
    at, step = policy.detach(), 1e-6
    differences = [(PLAIN[name](at + d).sum() - PLAIN[name](at - d).sum()) / (2 * step) for d in torch.eye(4, dtype=torch.float64) * step]
    assert found == pytest.approx([float(d) for d in differences], abs=1e-8)


def test_the_tokens_of_largest_covariance_are_selected_from_the_whole_batch() -> None:
    # mean log pi -2, mean A 0: covariances (log pi + 2) A = 1, -1, 0, 2, -2 of which 40 % are two tokens.
    policy, advantage = of(-1, -1, -2, -4, -2 + 0.0), of(1, -1, 0, -1, 1)
    assert losses.largest_covariance(policy, advantage, share=0.4).tolist() == [True, False, False, True, False]
    assert losses.largest_covariance(policy, advantage, share=1e-4).tolist() == [False, False, False, True, False]
    banded = losses.largest_covariance(policy, advantage, share=0.4, cov_low=0.5, cov_high=1.5)
    assert banded.tolist() == [True, False, False, False, False]


def test_clip_cov_takes_selected_tokens_out_and_kl_cov_holds_them_back() -> None:
    log_r, selected = of(0.1, 0.1).requires_grad_(), torch.tensor([True, False])
    dropped = losses.clip_cov(log_r.exp(), of(1.0, 1.0), selected=selected, **CLIPS)
    assert dropped.tolist() == pytest.approx([0.0, -math.exp(0.1)]) and gradient(dropped, log_r)[0] == 0
    held = losses.kl_cov(log_r, of(1.0, 1.0), selected=selected, penalty=2.0)
    assert held.tolist() == pytest.approx([-math.exp(0.1) + 0.2, -math.exp(0.1)])
    assert gradient(held, log_r) == pytest.approx([-math.exp(0.1) + 2.0, -math.exp(0.1)])


def test_divergences_from_a_reference_by_hand() -> None:
    # log pi - log ref = log 2: k1 .693, k2 .240, k3 = 1/2 - 1 + .693.
    policy, reference = of(math.log(0.4)), of(math.log(0.2))
    estimators = (losses.k1_divergence, losses.abs_k1_divergence, losses.k2_divergence, losses.k3_divergence)
    assert [float(k(policy, reference)) for k in estimators] == pytest.approx([0.6931, 0.6931, 0.2402, 0.1931], abs=5e-5)
    assert [float(k(reference, policy)) for k in estimators] == pytest.approx([-0.6931, 0.6931, 0.2402, 0.3069], abs=5e-5)


def distributions() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, and log-probabilities of policy, reference and behaviour over four tokens."""
    logits = of(0.3, -0.2, 0.9, 0.0).requires_grad_()
    return logits, logits.log_softmax(0), of(0.1, 0.2, 0.3, 0.4).log(), of(0.4, 0.3, 0.2, 0.1).log()


def test_the_unbiased_divergence_has_the_value_and_gradient_of_the_divergence_off_policy() -> None:
    logits, policy, reference, behaviour = distributions()
    exact = policy.exp() * (policy - reference)
    expected = behaviour.exp() * losses.unbiased_divergence(policy, reference, behaviour=behaviour)
    assert float(expected.sum().detach()) == pytest.approx(float(exact.sum().detach()))
    assert gradient(expected, logits) == pytest.approx(gradient(exact, logits))


def test_the_gradients_of_the_plain_estimators_are_those_their_docstrings_say() -> None:
    logits, policy, reference, _ = distributions()
    on_policy = policy.detach().exp()
    forward, reverse = gradient(policy.exp() * (policy - reference), logits), gradient(-reference.exp() * policy, logits)
    assert gradient(on_policy * losses.k1_divergence(policy, reference), logits) == pytest.approx([0.0] * 4)
    assert gradient(on_policy * losses.k2_divergence(policy, reference), logits) == pytest.approx(forward)
    assert gradient(on_policy * losses.k3_divergence(policy, reference), logits) == pytest.approx(reverse)


def test_a_critic_is_not_rewarded_for_leaving_the_value_it_began_with() -> None:
    # G = 1, V_old = 0, clip .2. V = .5 is nearer to G than its clip .2: the larger error (.8)^2 / 2 counts, without gradient.
    value = of(0.5, -0.5).requires_grad_()
    loss = losses.value_loss(value, of(0.0, 0.0), of(1.0, 1.0), clip=0.2)
    assert loss.tolist() == pytest.approx([0.32, 1.125])  # The second is worse than its clip: (1.5)^2 / 2.
    assert gradient(loss, value) == pytest.approx([0.0, -1.5])


def test_distillation_likes_tokens_that_the_teacher_finds_likelier() -> None:
    found = distillation_advantage(of(math.log(0.4), -9999.0), of(math.log(0.2), -1.0))
    assert found.tolist() == pytest.approx([math.log(2), -20.0])
