"""The composition: objective, weight, masks and reduction as configured."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from midflight.config.formulas import OBJECTIVES
from midflight.config.loss import CorrectionSection, ObjectiveSection
from midflight.errors import ConfigError
from midflight.trainer.formulas.advantages import grpo_advantages
from midflight.trainer.objective import Objective, TokenValues, count_tokens

from . import oracles
from .oracles import ABSOLUTE


def known(policy: Tensor, behaviour: Tensor, advantage: Tensor, *, proximal: Tensor | None = None, age: int = 0) -> TokenValues:
    now = policy.detach()
    return TokenValues(
        now=now,
        proximal=now if proximal is None else proximal,
        behaviour=behaviour,
        advantage=advantage,
        age=torch.full(now.shape, age),
        sequence=torch.zeros(now.shape, dtype=torch.long),
        num_sequences=1,
    )


def of(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def losses(objective: Objective, policy: Tensor, given: TokenValues) -> Tensor:
    return objective.token_losses(policy, given, objective.factors(given)).loss


@pytest.mark.parametrize("kind", [kind for kind, found in OBJECTIVES.items() if found.form == "bypass"])
def test_counting_the_ratio_twice_is_refused_with_the_remedy(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"count the ratio to the behaviour policy twice; remove correction\.weight"):
        Objective.of(ObjectiveSection(kind=kind), CorrectionSection(weight="tis"))  # type: ignore[arg-type]


def test_the_default_is_policy_gradient_with_truncated_importance_sampling() -> None:
    policy = of(math.log(0.5), math.log(0.2)).requires_grad_()
    given = known(policy, of(math.log(0.1), math.log(0.4)), of(1.0, -1.0))
    loss = losses(Objective(), policy, given)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-2.0, 0.5])  # rho is 5, capped at 2, and 0.5
    assert policy.grad is not None and policy.grad.tolist() == pytest.approx([-2.0, 0.5])


def test_bypass_clips_the_ratio_to_the_behaviour_policy_and_weighs_by_nothing_else() -> None:
    policy = of(math.log(1.0), math.log(0.3)).requires_grad_()
    given = known(policy, of(math.log(0.1), math.log(0.2)), of(-1.0, 1.0))
    bypass = Objective.of(ObjectiveSection(kind="ppo", dual_clip=3.0, clip_high=0.2))
    assert losses(bypass, policy, given).tolist() == pytest.approx([3.0, -1.2])


@pytest.mark.parametrize("kind", sorted(OBJECTIVES))
def test_every_objective_on_fresh_tokens_is_the_policy_gradient(kind: str) -> None:
    """Where behaviour, proximal and policy agree nothing is corrected: the gradient of a token is -A, up to what the kind holds back."""
    policy = of(-0.5, -1.0, -2.0).requires_grad_()
    advantage = "dr_grpo" if kind == "mirror_descent" else "grpo"
    objective = Objective.of(ObjectiveSection(kind=kind, advantage=advantage))  # type: ignore[arg-type]
    given = known(policy, policy.detach().clone(), of(0.7, 0.7, 0.7))
    losses(objective, policy, given).sum().backward()
    assert policy.grad is not None
    held_back = 1 if kind == "clip_cov" else 0  # the share of 2e-4 is at least one token
    assert sum(abs(g + 0.7) > 1e-9 for g in policy.grad.tolist()) == held_back


@pytest.mark.parametrize(
    ("kind", "knobs"),
    [
        ("decoupled_ppo", {}),
        ("ppo", {"dual_clip": 1.4}),
        ("gspo", {}),
        ("gmpo", {"clip_low": 0.2, "clip_high": 0.2}),
        ("rollout_is", {}),
        ("ipo", {"delta": 0.05}),
    ],
)
@pytest.mark.parametrize("log_ratio", [-0.5, -0.1, 0.1, 0.5])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_token_counts_as_clipped_where_the_clip_takes_its_gradient(
    kind: str, knobs: dict[str, float], log_ratio: float, advantage: float
) -> None:
    behaviour = of(-2.0)
    policy = (behaviour + log_ratio).requires_grad_()
    given = known(policy, behaviour, of(advantage), proximal=behaviour)
    objective = Objective.of(ObjectiveSection(kind=kind, **knobs))  # type: ignore[arg-type]
    found = objective.token_losses(policy, given, objective.factors(given))
    found.loss.sum().backward()
    assert policy.grad is not None
    assert (bool(found.below), bool(found.above)) == (
        (policy.grad.item() == 0 and log_ratio < 0),
        (policy.grad.item() == 0 and log_ratio > 0),
    )


def test_masks_take_tokens_out_and_leave_the_denominator() -> None:
    policy = of(math.log(0.5), math.log(0.2)).requires_grad_()
    given = known(policy, of(math.log(0.1), math.log(0.19)), of(1.0, 1.0))
    objective = Objective.of(correction=CorrectionSection(k3_max=0.01))
    factors = objective.factors(given)
    assert factors.masked["k3"].tolist() == [True, False]
    found = objective.token_losses(policy, given, factors).loss
    over = count_tokens(given.sequence, num_rollouts=1)
    assert float(objective.reduce(found, given.sequence, over=over).detach()) == pytest.approx(-(0.2 / 0.19) / 2)


def test_each_version_of_age_multiplies_by_the_decay() -> None:
    policy = of(-1.0).requires_grad_()
    objective = Objective.of(correction=CorrectionSection(age_decay=0.5))
    assert float(losses(objective, policy, known(policy, of(-1.0), of(1.0), age=3)).detach()) == pytest.approx(-0.125)


def test_a_pull_to_the_behaviour_policy_stands_beside_any_objective_and_is_not_masked() -> None:
    # The first token is masked (k3 of 2.5 is .58): its loss is the pull alone, .5 log^2 2.5. The second has r A and the pull.
    policy = of(math.log(0.5), math.log(0.2)).requires_grad_()
    given = known(policy, of(math.log(0.2), math.log(0.19)), of(1.0, 1.0))
    objective = Objective.of(ObjectiveSection(behaviour_coefficient=0.5), CorrectionSection(k3_max=0.01))
    loss = losses(objective, policy, given)
    near = math.log(0.2 / 0.19)
    assert loss.tolist() == pytest.approx([0.5 * math.log(2.5) ** 2, -0.2 / 0.19 + 0.5 * near**2])
    loss.sum().backward()
    assert policy.grad is not None and policy.grad.tolist() == pytest.approx([math.log(2.5), -0.2 / 0.19 + near])
    assert not objective.needs_advantage


def test_the_decoupled_cispo_clips_the_ratio_to_the_proximal_policy_and_takes_a_weight() -> None:
    # rho = .2 / .1 = 2, at the cap of 1.5; r = .5 / .2 = 2.5, clipped to 1.2. The gradient is -1.5 * 1.2 A.
    policy = of(math.log(0.5)).requires_grad_()
    given = known(policy, of(math.log(0.1)), of(1.0), proximal=of(math.log(0.2)))
    objective = Objective.of(ObjectiveSection(kind="decoupled_cispo", clip_low=0.2, clip_high=0.2), CorrectionSection(cap=1.5))
    losses(objective, policy, given).sum().backward()
    assert policy.grad is not None and policy.grad.tolist() == pytest.approx([-1.8])


def test_a_product_mask_goes_with_a_loss_that_has_no_weight() -> None:
    # One rollout, rho 2 and 2: its product 4 is outside, and takes both tokens out of `ppo`, whose own clip would leave them one.
    policy = of(math.log(0.4), math.log(0.4)).requires_grad_()
    given = known(policy, of(math.log(0.2), math.log(0.2)), of(-1.0, -1.0))
    for high, expected in ((5.0, [2.0, 2.0]), (3.0, [0.0, 0.0])):
        objective = Objective.of(ObjectiveSection(kind="ppo"), CorrectionSection(product_low=0.2, product_high=high))
        assert objective.looks_beyond
        assert losses(objective, policy, given).tolist() == pytest.approx(expected)


def test_the_interpolated_proximal_policy_needs_no_forward_and_is_the_policy_for_tokens_of_the_step() -> None:
    objective = Objective.of(ObjectiveSection(proximal="interpolated"))
    assert not objective.needs_scores(updates_per_step=4) and Objective().needs_scores(updates_per_step=2)
    policy = of(-1.0, -1.0)
    given = known(policy, of(-3.0, -3.0), of(1.0, 1.0), age=1)
    # Half way through the step a token of age 1 is 1.5 versions behind: log proximal = -3 + (1 / 1.5) * 2.
    assert objective.factors(given, progress=0.5).proximal.tolist() == pytest.approx([-3 + 4 / 3] * 2)
    fresh = known(policy, of(-3.0, -3.0), of(1.0, 1.0), age=0)
    assert objective.factors(fresh).proximal.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("objective", "correction", "expected"),
    [
        ({"kind": "ppo", "clip_high": 0.2}, {}, "areal/ppo"),
        ({"kind": "ppo", "reduction": "sequence_mean"}, {}, "trl/loss_grpo"),
        ({"kind": "ppo", "dual_clip": 3.0}, {}, "verl/vanilla/token-mean"),
        ({}, {}, "trl/loss_dapo_tis_cap2"),
        ({"clip_high": 0.2, "dual_clip": 3.0}, {"weight": "tis"}, "verl/vanilla+tis_token_2.0"),
        ({"kind": "gspo", "clip_low": 0.2, "clip_high": 0.28}, {"weight": "off"}, "verl/gspo"),
        ({"kind": "gmpo", "clip_low": 0.2, "clip_high": 0.28}, {"weight": "off"}, "verl/geo_mean"),
        ({"kind": "sapo", "reduction": "sequence_mean"}, {"weight": "off"}, "verl/sapo"),
    ],
)
def test_what_is_configured_gives_what_public_implementations_give(
    objective: dict[str, object], correction: dict[str, object], expected: str
) -> None:
    data = oracles.inputs()
    ours = Objective.of(ObjectiveSection.model_validate(objective), CorrectionSection.model_validate(correction))
    advantage = grpo_advantages(torch.tensor(oracles.REWARDS), torch.tensor(oracles.GROUPS))[data.rollout]
    given = TokenValues(
        now=data.logp.detach(),
        proximal=data.old,
        behaviour=data.old if ours.loss.is_bypass else data.roll,
        advantage=advantage,
        age=torch.zeros_like(data.rollout),
        sequence=data.rollout,
        num_sequences=6,
    )
    found = ours.token_losses(data.logp, given, ours.factors(given))
    loss = ours.reduce(found.loss, data.rollout, over=count_tokens(data.rollout, num_rollouts=6))
    loss.backward()
    assert data.logp.grad is not None
    assert (float(loss.detach()), float(data.logp.grad.norm())) == pytest.approx(
        (oracles.KNOWN[expected].value, oracles.KNOWN[expected].grad_l2), abs=ABSOLUTE
    )
