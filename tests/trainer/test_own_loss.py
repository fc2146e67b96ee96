"""A loss of the user's own is found, tried on made-up tokens, and trained with; and a new row makes an objective of ours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from midflight.config import Config, load_config
from midflight.config.formulas import OBJECTIVES, ObjectiveFormula
from midflight.config.loss_text import effective_loss
from midflight.errors import ConfigError
from midflight.trainer.formulas import losses
from midflight.trainer.objective import Objective
from midflight.trainer.own_loss import described, objective_of
from midflight.trainer.trainer import trainer_of

from .fixtures import batch, tiny_model, weights

SPO = "objective.kind=examples.own_loss:spo"

# --- Losses that can be trained with ---------------------------------------------------------------------------------


def reinforce(policy: Tensor, advantage: Tensor) -> Tensor:
    return -policy * advantage


def of_rollouts(policy: Tensor, advantage: Tensor, *, sequence_ratio: Tensor, tau: float) -> Tensor:
    """Looks beyond a token."""
    return -policy * advantage * sequence_ratio.clamp(max=tau)


# --- And that cannot -------------------------------------------------------------------------------------------------


def misspelt(policy: Tensor, advantge: Tensor) -> Tensor:
    return -policy * advantge


def everything(*values: Tensor) -> Tensor:
    return values[0]


def averaged(policy: Tensor, advantage: Tensor) -> Tensor:
    return (-policy * advantage).mean()


def constant(policy: Tensor, advantage: Tensor) -> Tensor:
    return -policy.detach() * advantage


def infinite(ratio: Tensor, age: Tensor) -> Tensor:
    return ratio / age


def steep(policy: Tensor) -> Tensor:
    return (policy - policy.detach()).clamp(min=0).sqrt()


def normalised(policy: Tensor, advantage: Tensor) -> Tensor:
    return -policy * (advantage - advantage.mean())


def without_torch(advantage: Tensor) -> list[float]:
    return advantage.tolist()


def failing(policy: Tensor, proximal: Tensor) -> Tensor:
    return policy @ proximal[:2]


def against_behaviour(policy: Tensor, behaviour: Tensor) -> Tensor:
    return behaviour - policy


number = 3


def config(name: str, *overrides: str) -> Config:
    return load_config(None, [f"objective.kind={__name__}:{name}", *overrides])


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("reinforc", [], r"has no 'reinforc'\. Did you mean 'reinforce'\?"),
        ("number", [], r"is int 3; name a function"),
        ("misspelt", [], r"parameter 'advantge' is unknown\. Did you mean 'advantage'\?"),
        ("everything", [], r"parameter \*values: .* has no name"),
        ("averaged", [], r"gave torch\.float32 of shape \[\] for 6 tokens; return one loss per token"),
        ("constant", [], r"have no gradient; make them of policy, ratio or log_ratio"),
        ("infinite", [], r"losses were \[.*inf.*\]; they must be finite"),
        ("steep", [], r"gradient was \[.*(inf|nan).*\]; it must be finite"),
        ("normalised", [], r"another loss beside other tokens"),
        ("without_torch", [], r"returned list \[1\.0, .*\]; return a tensor"),
        ("failing", [], r"failed on 6 made-up tokens with RuntimeError: .*"),
        ("of_rollouts", [], r"needs objective\.tau, and that is not set; set it"),
        ("reinforce", ["objective.tau=1"], r"objective\.tau \(1\) does nothing .* which takes policy, advantage; remove it"),
        ("against_behaviour", ["correction.weight=tis"], r"correction\.weight = 'tis' would count the ratio to it twice"),
    ],
)
def test_a_loss_that_cannot_be_trained_with_is_refused_with_the_remedy(name: str, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        objective_of(config(name, *overrides))
    assert f"{__name__}:{name}" in str(caught.value)


def test_a_module_that_is_not_there_or_broken_is_told() -> None:
    with pytest.raises(ConfigError, match=r"objective\.kind is 'nowhere:loss': there is no module 'nowhere'"):
        objective_of(load_config(None, ["objective.kind=nowhere:loss"]))


def test_the_example_is_its_formula() -> None:
    policy = torch.tensor([math.log(0.9), math.log(0.2)]).requires_grad_()
    found = objective_of(load_config(None, [SPO, "objective.delta=0.25"])).function(
        ratio=policy.exp() / torch.tensor([0.6, 0.4]), advantage=torch.tensor([1.0, -2.0]), delta=0.25
    )
    # -(1.5 - 2 * .5^2) and -(-2 * .5 - 4 * .5^2)
    assert found.tolist() == pytest.approx([-1.0, 2.0])


@pytest.mark.parametrize(
    "overrides",
    [
        [SPO],
        [SPO, "correction.weight=tis", "trainer.updates_per_step=2"],
        [f"objective.kind={__name__}:of_rollouts", "objective.tau=2", "trainer.micro_batch_tokens=30"],
    ],
)
def test_a_step_is_made_with_a_loss_of_ones_own(overrides: list[str]) -> None:
    model = tiny_model(torch.float32)
    before = weights(model)
    report = trainer_of(load_config(None, [*overrides, "environment.max_tokens=24"]), model).step(batch())
    assert report.version == 1 and report.skipped is None and math.isfinite(report.loss)
    assert not torch.equal(weights(model), before)


def test_ones_own_copy_of_an_objective_trains_as_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = tiny_model(torch.float32), tiny_model(torch.float32)
    same = ["objective.clip_low=0.2", "objective.clip_high=0.28"]
    trainer_of(load_config(None, ["objective.kind=ppo", *same]), ours).step(batch())
    trainer_of(load_config(None, ["objective.kind=midflight.trainer.formulas.losses:clipped_surrogate", *same]), theirs).step(batch())
    assert torch.equal(weights(ours), weights(theirs))


def test_a_loss_of_ones_own_says_what_it_takes() -> None:
    said = described(load_config(None, [SPO, "objective.delta=0.3"]))
    assert said.startswith("examples.own_loss:spo(ratio, advantage, delta = 0.3): SPO (Xie et al. 2024, 2401.16025). Tried on 6 tokens")
    weighted = effective_loss(load_config(None, [SPO, "objective.delta=0.3", "correction.weight=tis"]))
    assert weighted[0] == "loss = sg[min(ρ, 2)] * (examples.own_loss:spo, delta = 0.3)"


def test_a_new_objective_is_one_function_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(policy: Tensor, advantage: Tensor, *, sequence_log_ratio: Tensor, tau: float) -> Tensor:
        return -policy * advantage * (sequence_log_ratio < tau) / 2

    row = ObjectiveFormula("bypass", "halved", "-A log π / 2 where s < {tau:g}", {"tau": 3.0})
    monkeypatch.setattr(losses, "halved", halved, raising=False)
    monkeypatch.setitem(OBJECTIVES, "halved", row)  # type: ignore[arg-type]
    made = load_config(None, ["objective.kind=halved", "environment.max_tokens=24"])
    assert effective_loss(made)[0] == "loss = -A log π / 2 where s < 3"
    assert Objective.of(made.objective, made.correction).needs_scores(updates_per_step=1)
    model = tiny_model(torch.float32)
    assert trainer_of(made, model).step(batch()).skipped is None
    with pytest.raises(ConfigError, match="count the ratio to the behaviour policy twice"):
        load_config(None, ["objective.kind=halved", "correction.weight=tis"])
    with pytest.raises(ConfigError, match=r"objective\.cap \(1\) does nothing"):
        load_config(None, ["objective.kind=halved", "objective.cap=1"])
