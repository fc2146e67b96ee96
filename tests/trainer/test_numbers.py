"""The pure functions, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from midflight.errors import ConfigError
from midflight.trainer import diagnostics
from midflight.trainer.advantages import dr_grpo_advantages, grpo_advantages, overlong_penalty
from midflight.trainer.corrections import log_ratio, truncated_weight
from midflight.trainer.losses import clipped_surrogate, dual_clip
from midflight.trainer.objective import Objective
from midflight.trainer.reductions import constant, sequence_mean, token_mean
from midflight.trainer.schedule import Schedule


def of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("ratio", "advantage", "loss"), [(1.5, 1, -1.2), (0.5, 1, -0.5), (0.5, -1, 0.8), (10, -1, 10)])
def test_ppo_clips_on_the_pessimistic_side_only(ratio: float, advantage: float, loss: float) -> None:
    assert clipped_surrogate(of(ratio), of(advantage), clip_low=0.2, clip_high=0.2).tolist() == pytest.approx([loss])


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    # R = 10 at A = -1 would cost 10; c = 3 makes it 3. A positive advantage is left alone.
    assert dual_clip(of(10.0, -1.2), of(-1.0, 1.0), ceiling=3.0).tolist() == pytest.approx([3.0, -1.2])


def test_truncation_caps_the_ratio_and_never_its_inverse() -> None:
    assert truncated_weight(of(5.0, 0.3, 2.0), cap=2.0).tolist() == pytest.approx([2.0, 0.3, 2.0])


def test_weights_carry_no_gradient() -> None:
    assert not truncated_weight(of(1.0).requires_grad_(), cap=2.0).requires_grad


def test_log_ratios_are_clamped_to_twenty() -> None:
    assert log_ratio(of(-1.0, -9999.0), of(-9999.0, -1.0)).tolist() == [20.0, -20.0]


def test_grpo_divides_by_the_deviation_with_n_minus_one() -> None:
    # Rewards 1, 0, 0.5: mean 0.5, deviations .5, -.5, 0, variance (.25 + .25) / 2, std .5.
    found = grpo_advantages(of(1, 0, 0.5), torch.tensor([0, 0, 0]))
    assert found.tolist() == pytest.approx([0.5 / (0.5 + 1e-6), -0.5 / (0.5 + 1e-6), 0.0])


def test_a_group_without_spread_or_with_one_rollout_has_no_advantage() -> None:
    rewards, groups = of(1, 1, 1, 7), torch.tensor([0, 0, 0, 1])
    assert grpo_advantages(rewards, groups).tolist() == [0.0] * 4
    assert dr_grpo_advantages(rewards, groups).tolist() == [0.0] * 4


def test_overlong_penalty_grows_over_the_buffer() -> None:
    found = overlong_penalty(torch.tensor([90, 80, 100, 10]), max_length=100, buffer=20, penalty=1.0)
    assert found.tolist() == pytest.approx([-0.5, 0.0, -1.0, 0.0])
    assert overlong_penalty(torch.tensor([100]), max_length=100, buffer=0, penalty=1.0).tolist() == [0.0]


def test_effective_sample_size_of_equal_and_of_lonely_weights() -> None:
    assert float(diagnostics.effective_sample_size(of(1, 1, 1, 1))) == pytest.approx(1.0)
    assert float(diagnostics.effective_sample_size(of(4, 0, 0, 0))) == pytest.approx(0.25)


def test_divergences_by_hand() -> None:
    log_rho = of(math.log(1.1))
    assert float(diagnostics.k3(log_rho)) == pytest.approx(0.00469, abs=5e-6)
    assert float(diagnostics.k1(log_rho)) == pytest.approx(-math.log(1.1))
    assert float(diagnostics.chi2(log_rho)) == pytest.approx(0.21)  # 1.1^2 - 1
    # Two tokens of one rollout: rho of the sequence is 1.1 * 1.1; the other rollout's is 1.1.
    sequences = diagnostics.sequence_log_ratios(log_rho.expand(3), torch.tensor([4, 2, 4]))
    assert sequences.exp().tolist() == pytest.approx([1.1, 1.21])


def test_ages_are_counted_with_the_ratio_of_each() -> None:
    found = diagnostics.age_metrics(torch.tensor([0, 0, 0, 3]), of(0, 0, math.log(4), math.log(0.5)))
    assert found["age/0/share"] == 0.75 and found["age/3/share"] == 0.25
    assert found["age/0/rho_mean"] == pytest.approx(2.0) and found["age/3/rho_mean"] == pytest.approx(0.5)
    assert (found["age/max"], found["age/mean"]) == (3.0, 0.75)


def test_alarms_name_each_reading_out_of_bounds() -> None:
    quiet = {"rho/mean": 1.0, "rho/ess": 0.9, "rho/k1": 0.01, "rho/std": 0.1}
    loud = {"rho/mean": 2.5, "rho/ess": 0.2, "rho/k1": -0.2, "rho/std": 1.5}
    assert diagnostics.alarms(quiet) == ()
    assert len(diagnostics.alarms(loud)) == 4


def test_reductions_by_hand() -> None:
    # Rollout 0 has losses 1, 2, 3 and rollout 2 has 10; rollout 1 has no tokens.
    loss, rollout, counts = of(1, 2, 3, 10), torch.tensor([0, 0, 0, 2]), torch.tensor([3, 0, 1])
    assert float(token_mean(loss, num_tokens=4)) == 4.0
    assert float(sequence_mean(loss, rollout, tokens_of_rollout=counts, num_rollouts=2)) == 6.0  # (2 + 10) / 2
    assert float(constant(loss, num_rollouts=2, length=8)) == 1.0  # 16 / (2 * 8)


def test_reductions_of_parts_add_up_to_the_whole() -> None:
    loss, rollout, counts = of(1, 2, 3, 10), torch.tensor([0, 0, 0, 2]), torch.tensor([3, 0, 1])
    shares = [sequence_mean(loss[s], rollout[s], tokens_of_rollout=counts, num_rollouts=2) for s in (slice(0, 2), slice(2, 4))]
    assert float(sum(shares)) == pytest.approx(6.0)


def test_counting_the_ratio_twice_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"tis_cap = 2\.0 .*Remove tis_cap"):
        Objective(loss="bypass", tis_cap=2.0)


def test_a_decoupled_loss_that_would_correct_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="Set tis_cap"):
        Objective(loss="decoupled", tis_cap=None)


def test_the_gradient_of_the_default_is_truncated_importance_sampling() -> None:
    # One update: r = 1, so the loss is -w A and d loss / d log pi = -w A, with w = min(pi / mu, 2).
    policy, behaviour = of(math.log(0.9), math.log(0.2)).requires_grad_(), of(math.log(0.3), math.log(0.4))
    found = Objective().token_losses(policy, None, behaviour=behaviour, advantage=of(1.0, -1.0))
    found.loss.sum().backward()
    assert found.loss.tolist() == pytest.approx([-2.0, 0.5])
    assert policy.grad is not None and policy.grad.tolist() == pytest.approx([-2.0, 0.5])


def test_a_token_of_low_advantage_that_grew_is_bounded_by_the_dual_clip() -> None:
    policy, behaviour = of(0.0), of(-math.log(10))
    found = Objective(loss="bypass", tis_cap=None, dual_clip=3.0).token_losses(policy, None, behaviour=behaviour, advantage=of(-1.0))
    assert found.loss.tolist() == pytest.approx([3.0])


def test_the_effective_loss_is_printed_as_a_formula() -> None:
    assert Objective().describe() == (
        "L = -mean over tokens of sg min(rho, 2) min(r A, clip(r, 0.8, 1.28) A)\n"
        "    r = pi_theta / sg pi_theta: one update per step, r = 1 and no clip binds; this is TIS, token by token\n"
        "    rho = sg pi_theta / mu"
    )
    assert "rho = pi_proximal / mu" in Objective().describe(updates_per_step=2)
    assert "no further weight" in Objective(loss="bypass", tis_cap=None).describe()


def test_schedules_rise_then_fall_to_zero_after_the_last_step() -> None:
    linear = Schedule("linear", warmup_steps=2, total_steps=6)
    assert [linear.factor(s) for s in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = Schedule("cosine", warmup_steps=0, total_steps=4)
    assert [cosine.factor(s) for s in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])
    assert Schedule("constant", warmup_steps=1, total_steps=2).factor(100) == 1.0
