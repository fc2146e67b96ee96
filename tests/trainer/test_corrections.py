"""Importance weights and rejection masks, against values worked out by hand. Every bound is on rho, never on its inverse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from midflight.trainer.formulas import corrections, reductions
from midflight.trainer.formulas.corrections import log_ratio

from .tensors import of, shuffled_tokens, whole


def test_log_ratios_are_clamped_to_twenty() -> None:
    assert log_ratio(of(-1.0, -9999.0), of(-9999.0, -1.0)).tolist() == [20.0, -20.0]


def test_a_missing_log_probability_is_never_made_up() -> None:
    assert log_ratio(of(math.nan), of(-1.0)).isnan().all()


def test_a_log_probability_written_as_minus_9999_would_take_its_rollout_along_and_leaving_it_out_does_not() -> None:
    # Why admission keeps such tokens out: one of four pins the mean at 20 / 4, whatever the others say.
    behaviour, proximal = of(-1.0, -1.0, -1.0, -9999.0), of(-1.0, -1.0, -1.0, -1.0)
    rho = log_ratio(proximal, behaviour)
    assert not corrections.geometric_mask(rho, **whole(0, 0, 0, 0), low=0.99, high=1.01).any()
    assert corrections.geometric_mask(rho[:3], **whole(0, 0, 0), low=0.99, high=1.01).all()


# --- Weights ---------------------------------------------------------------------------------------------------------


def test_truncation_caps_the_ratio_and_never_its_inverse() -> None:
    assert corrections.truncated_weight(of(5.0, 0.3, 2.0), cap=2.0).tolist() == pytest.approx([2.0, 0.3, 2.0])


def test_a_truncated_sequence_has_the_capped_product_on_all_its_tokens() -> None:
    # Rollout 0: 2 * 3 = 6, capped at 5. Rollout 1: .5 * .5 = .25, kept. Their tokens lie between each other's.
    found = corrections.truncated_sequence_weight(of(2, 0.5, 3, 0.5).log(), **whole(0, 1, 0, 1), cap=5.0)
    assert found.tolist() == pytest.approx([5.0, 0.25, 5.0, 0.25])


def test_a_product_beyond_every_float_stays_finite() -> None:
    found = corrections.sequence_ratio(torch.full((100,), 20.0), torch.zeros(100, dtype=torch.int64), num_sequences=1)
    assert found.isfinite().all() and found[0] == pytest.approx(math.exp(20))


def test_masked_and_icepop_weights_by_hand() -> None:
    assert corrections.masked_weight(of(3.0, 0.3, 1.5), low=0.5, high=2.0).tolist() == pytest.approx([0.0, 0.0, 1.5])
    assert corrections.icepop_weight(of(0.25, 3.0, 6.0, 0.5), low=0.5, high=5.0).tolist() == pytest.approx([0.0, 3.0, 0.0, 0.5])


def test_a_masked_sequence_is_masked_as_a_whole_by_its_product() -> None:
    # 1.5 * 1.5 = 2.25 leaves [.5, 2] though no token does; 4 * .25 = 1 stays though both tokens leave it.
    found = corrections.masked_sequence_weight(of(1.5, 1.5, 4, 0.25).log(), **whole(0, 0, 1, 1), low=0.5, high=2.0)
    assert found.tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0])


def test_self_normalised_weights_have_mean_one_over_the_whole_batch_and_not_over_its_parts() -> None:
    weight = of(1.0, 3.0, 0.5, 1.5)
    mean = weight.mean()
    parts = [corrections.self_normalised(part, mean=mean) for part in weight.split(2)]
    assert torch.cat(parts).tolist() == pytest.approx([1 / 1.5, 2.0, 1 / 3, 1.0])
    assert float(torch.cat(parts).mean()) == pytest.approx(1.0)
    assert float(parts[0].mean()) != pytest.approx(1.0)


def test_weights_that_are_all_zero_stay_zero_when_normalised() -> None:
    assert corrections.self_normalised(of(0.0, 0.0), mean=of(0.0, 0.0).mean()).tolist() == [0.0, 0.0]


def test_the_interpolated_proximal_lies_between_the_sampler_and_the_policy_by_version() -> None:
    # v_b 3, v_theta 5, v_p 4: alpha .5. v_b = v_theta: 1. A proximal policy older than the sampler is the sampler: 0.
    alpha = corrections.interpolation_weight(of(1, 0, -1, 9), since_policy=of(2, 0, 1, 3))
    assert alpha.tolist() == pytest.approx([0.5, 1.0, 0.0, 1.0])
    policy = of(-1.0, -1.0).requires_grad_()
    proximal = corrections.interpolated_proximal(policy, of(-2.0, -2.0), alpha=of(0.5, 1.0))
    assert proximal.tolist() == pytest.approx([-1.5, -1.0]) and not proximal.requires_grad


def test_a_token_of_the_current_version_has_a_ratio_of_one_to_its_interpolated_proximal() -> None:
    policy, zero = of(-1.3), of(0.0)
    proximal = corrections.interpolated_proximal(policy, of(-2.0), alpha=corrections.interpolation_weight(zero, since_policy=zero))
    assert log_ratio(policy, proximal).exp().tolist() == [1.0]


def test_age_decays_a_weight_version_by_version() -> None:
    assert corrections.age_weight(torch.tensor([0, 1, 3]), decay=0.5).tolist() == [1.0, 0.5, 0.125]


def test_the_age_weight_of_a_double_precision_loss_is_not_rounded_to_single() -> None:
    # .9^2 = .81; float32 has .81000000238.
    found = corrections.age_weight(torch.tensor([2]), decay=0.9)
    assert found.dtype == torch.float64 and found.tolist() == pytest.approx([0.81], abs=1e-15)


# --- Masks -----------------------------------------------------------------------------------------------------------


def test_a_geometric_mean_slightly_off_drops_the_rollout() -> None:
    # mean log rho .002 is a ratio of 1.002, beyond 1.001; .0005 is within.
    found = corrections.geometric_mask(of(0.004, 0.0, 0.001, 0.0), **whole(0, 0, 1, 1), low=0.999, high=1.001)
    assert found.tolist() == [False, False, True, True]


def test_a_divergence_by_hand_and_its_mask() -> None:
    log_rho = of(math.log(1.1), 0.0)
    assert corrections.k3(log_rho).tolist() == pytest.approx([0.00469, 0.0], abs=5e-6)
    assert corrections.k3_mask(log_rho, bound=0.0046).tolist() == [False, True]


def test_a_product_mask_keeps_by_the_product_and_weighs_nothing() -> None:
    # 1.5 * 1.5 = 2.25 leaves [.5, 2] though no token does; 4 * .25 = 1 stays though both tokens leave it; .45 leaves at the other end.
    found = corrections.product_mask(of(1.5, 1.5, 4, 0.25, 0.45).log(), **whole(0, 0, 1, 1, 2), low=0.5, high=2.0)
    assert found.tolist() == [False, False, True, True, False]


def test_one_catastrophic_token_vetoes_its_rollout() -> None:
    found = corrections.veto_mask(of(1.0, 1e-5, 1.0, 99.0, 101.0, 1.0).log(), **whole(0, 0, 1, 1, 2, 2), low=1e-4, high=100.0)
    assert found.tolist() == [False, False, True, True, False, False]


def test_m2po_drops_the_largest_until_the_rest_is_below_the_bound() -> None:
    # log^2 rho .01, .16, .01: mean .06; without .16 it is .01, below .04.
    assert corrections.m2po_mask(of(0.1, -0.4, -0.1), bound=0.04).tolist() == [True, False, True]
    assert corrections.m2po_mask(of(0.1, 0.1), bound=0.04).tolist() == [True, True]
    assert corrections.m2po_mask(of(1.0, -1.0), bound=0.04).tolist() == [False, False]


def test_m2po_over_parts_of_a_batch_is_another_filter() -> None:
    # Why it takes the whole batch: .3 stays beside five quiet tokens, and goes where it is judged alone.
    log_rho = of(0.3, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert corrections.m2po_mask(log_rho, bound=0.04).all()
    assert not corrections.m2po_mask(log_rho[:1], bound=0.04).any()


def test_off_policy_masking_drops_only_disliked_rollouts_that_the_policy_left() -> None:
    # mean log(mu / pi): .6, .6 and -.6, bound .5. Only the first, of negative advantage, goes; -.6 is no distance.
    log_inverse, advantage = of(0.4, 0.8, 0.6, -0.6), of(-1, -1, 1, -1)
    found = corrections.opsm_mask(log_inverse, advantage, **whole(0, 0, 1, 2), bound=0.5)
    assert found.tolist() == [False, False, True, True]


ASYMMETRIC: dict[str, Callable[[Tensor, dict], Tensor]] = {
    "masked_weight": lambda log_rho, _: corrections.masked_weight(log_rho.exp(), low=0.9, high=4.0) > 0,
    "masked_sequence_weight": lambda log_rho, of_whole: corrections.masked_sequence_weight(log_rho, **of_whole, low=0.9, high=4.0) > 0,
    "icepop_weight": lambda log_rho, _: corrections.icepop_weight(log_rho.exp(), low=0.9, high=4.0) > 0,
    "geometric_mask": lambda log_rho, of_whole: corrections.geometric_mask(log_rho, **of_whole, low=0.9, high=4.0),
    "product_mask": lambda log_rho, of_whole: corrections.product_mask(log_rho, **of_whole, low=0.9, high=4.0),
    "veto_mask": lambda log_rho, of_whole: corrections.veto_mask(log_rho, **of_whole, low=0.9, high=4.0),
}


@pytest.mark.parametrize("name", ASYMMETRIC)
def test_bounds_are_on_the_ratio_and_never_on_its_inverse(name: str) -> None:
    # rho = 3 lies in [.9, 4] and its inverse does not; rho = 1 / 3 the other way round.
    assert ASYMMETRIC[name](of(3.0, 1 / 3).log(), whole(0, 1)).tolist() == [True, False]


# Bounds off the grid of the drawn values, so that no rounding decides.
OF_WHOLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sequence_ratio": lambda x, s: corrections.sequence_ratio(x, s, num_sequences=4),
    "truncated_sequence_weight": lambda x, s: corrections.truncated_sequence_weight(x, s, num_sequences=4, cap=2.1),
    "geometric_mask": lambda x, s: corrections.geometric_mask(x, s, num_sequences=4, low=0.777, high=1.333),
    "product_mask": lambda x, s: corrections.product_mask(x, s, num_sequences=4, low=0.333, high=3.33),
    "veto_mask": lambda x, s: corrections.veto_mask(x, s, num_sequences=4, low=0.333, high=3.33),
    "opsm_mask": lambda x, s: corrections.opsm_mask(x, of(1, -1, 1, -1)[s], s, num_sequences=4, bound=0.111),
    "m2po_mask": lambda x, _: corrections.m2po_mask(x, bound=0.0777),
}


@pytest.mark.parametrize("name", OF_WHOLE)
@settings(deadline=None, max_examples=25)
@given(drawn=shuffled_tokens())
def test_no_weight_or_mask_depends_on_the_order_of_tokens(name: str, drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    log_rho, sequence, order = drawn
    found, shuffled = OF_WHOLE[name](log_rho, sequence), OF_WHOLE[name](log_rho[order], sequence[order])
    assert shuffled.double().tolist() == pytest.approx(found[order].double().tolist())


@settings(deadline=None, max_examples=30)
@given(shuffled_tokens())
def test_what_m2po_keeps_is_below_the_bound_and_no_larger_than_what_it_drops(drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    squared = drawn[0] ** 2
    kept = corrections.m2po_mask(drawn[0], bound=0.0777)
    assert not kept.any() or float(squared[kept].mean()) < 0.0777
    assert kept.all() or not kept.any() or squared[kept].max() < squared[~kept].min()


def test_no_weight_carries_a_gradient() -> None:
    log_rho = of(0.1, 0.2).requires_grad_()
    found = [
        corrections.truncated_weight(log_rho.exp(), cap=2.0),
        corrections.truncated_sequence_weight(log_rho, **whole(0, 0), cap=2.0),
        corrections.masked_weight(log_rho.exp(), low=0.5, high=2.0),
        corrections.masked_sequence_weight(log_rho, **whole(0, 0), low=0.5, high=2.0),
        corrections.icepop_weight(log_rho.exp(), low=0.5, high=5.0),
    ]
    assert not any(weight.requires_grad for weight in found)


# --- Sequences -------------------------------------------------------------------------------------------------------


def test_sequence_statistics_by_hand_for_tokens_in_any_place() -> None:
    values, of_whole = of(1, 10, 2, 6), whole(2, 0, 2, 0)
    assert reductions.sums(values, **of_whole).tolist() == [16.0, 0.0, 3.0]
    assert reductions.means(values, **of_whole).tolist() == [8.0, 0.0, 1.5]
    assert reductions.maxima(values, **of_whole).tolist() == [10.0, -math.inf, 2.0]
    assert reductions.counts(**of_whole).tolist() == [2, 0, 2]
