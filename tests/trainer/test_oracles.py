"""Our losses against public implementations, values and gradients."""

from __future__ import annotations

import pytest
import torch

from midflight.trainer.advantages import dr_grpo_advantages, grpo_advantages
from midflight.trainer.corrections import log_ratio, truncated_weight
from midflight.trainer.objective import Objective, count_tokens

from . import oracles
from .oracles import ABSOLUTE, Known

# On `old` as the behaviour policy, bypass clips the ratio to `old`: PPO as the packages compute it.
PPO = {"loss": "bypass", "tis_cap": None}


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({**PPO, "clip_high": 0.2}, oracles.AREAL_PPO),
        (PPO, oracles.TRL_TOKEN_MEAN),
        ({**PPO, "reduction": "sequence_mean"}, oracles.TRL_SEQUENCE_MEAN),
        ({**PPO, "reduction": "constant", "constant_length": 12}, oracles.TRL_CONSTANT),
        ({**PPO, "dual_clip": 3.0}, oracles.VERL_VANILLA_TOKEN_MEAN),
        ({**PPO, "dual_clip": 3.0, "reduction": "sequence_mean"}, oracles.VERL_VANILLA_SEQUENCE_MEAN),
        ({**PPO, "dual_clip": 3.0, "reduction": "constant", "constant_length": 12}, oracles.VERL_VANILLA_CONSTANT),
        ({"clip_high": 0.2}, oracles.AREAL_DECOUPLED),
        ({}, oracles.TRL_TIS),
        ({"clip_high": 0.2, "dual_clip": 3.0}, oracles.VERL_TIS),
    ],
)
def test_losses_and_gradients_agree_with_public_implementations(options: dict, known: Known) -> None:
    data, objective = oracles.inputs(), Objective(**options)
    advantage = grpo_advantages(torch.tensor(oracles.REWARDS), torch.tensor(oracles.GROUPS))[data.rollout]
    behaviour = data.old if objective.loss == "bypass" else data.roll
    found = objective.token_losses(data.logp, data.old, behaviour=behaviour, advantage=advantage)
    loss = objective.reduce(found.loss, data.rollout, over=count_tokens(data.rollout, num_rollouts=6))
    loss.backward()
    gradient = data.logp.grad
    assert gradient is not None
    assert (float(loss.detach()), float(gradient.norm()), float(gradient.sum())) == pytest.approx(
        (known.value, known.grad_l2, known.grad_sum), abs=ABSOLUTE
    )


def test_advantages_agree_with_verl() -> None:
    rewards, groups = torch.tensor(oracles.REWARDS), torch.tensor(oracles.GROUPS)
    assert grpo_advantages(rewards, groups).tolist() == pytest.approx(oracles.VERL_GRPO_ADVANTAGES, abs=ABSOLUTE)
    assert dr_grpo_advantages(rewards, groups).tolist() == pytest.approx(oracles.VERL_DR_GRPO_ADVANTAGES, abs=ABSOLUTE)


def test_truncated_weights_agree_with_verl() -> None:
    data = oracles.inputs()
    weights = truncated_weight(log_ratio(data.old, data.roll).exp(), cap=2.0)
    assert weights[:12].tolist() == pytest.approx(oracles.VERL_TIS_WEIGHTS_OF_FIRST, abs=ABSOLUTE)
