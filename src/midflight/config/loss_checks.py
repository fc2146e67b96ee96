"""Options of the loss that contradict each other."""

from collections.abc import Iterator
from pathlib import Path

from midflight.config.formulas import (
    OBJECTIVE_OPTIONS,
    OBJECTIVES,
    WEIGHT_OPTIONS,
    WEIGHTS,
    Demand,
)
from midflight.config.loss import (
    CorrectionSection,
    CriticSection,
    ObjectiveSection,
    formula_of,
    weight_bounds,
    weight_of,
)
from midflight.config.sections import Config


def loss_contradictions(
    objective: ObjectiveSection, correction: CorrectionSection
) -> Iterator[str]:
    """One sentence for each pair of options that cannot both hold, above all those that would weigh
    by one ratio twice.
    """
    formula = formula_of(objective, correction)
    weight = correction.weight
    if formula.form == "bypass" and weight not in (None, "off"):
        yield (
            f'objective.kind = "{objective.kind}" with correction.weight = "{weight}" would count '
            "the ratio to the behaviour policy twice; remove correction.weight, or choose an "
            "objective that takes a weight, such as decoupled_ppo"
        )
    for name in OBJECTIVE_OPTIONS:
        value = getattr(objective, name)
        if value is not None and name not in formula.all_options:
            takers = [kind for kind, other in OBJECTIVES.items() if name in other.all_options]
            yield (
                f"objective.{name} ({value:g}) does nothing with "
                f'objective.kind = "{objective.kind}"; remove it, or choose one of '
                f"{', '.join(takers)}"
            )
    yield from _weight_contradictions(objective, correction)
    if formula.demand is not None:
        yield from _demand_contradictions(objective, formula.demand)
    yield from _token_contradictions(objective, correction)
    if objective.normalise == "component" and objective.advantage != "grpo":
        yield (
            'objective.normalise = "component" compares each component as GRPO does, and '
            f'objective.advantage is "{objective.advantage}"; '
            'set objective.advantage = "grpo", or objective.normalise = "reward"'
        )
    yield from _added_contradictions(objective)
    if objective.proximal == "interpolated" and formula.form == "bypass":
        yield (
            'objective.proximal = "interpolated" does nothing with objective.kind = '
            f'"{objective.kind}", which has no proximal policy; remove it'
        )


def length_contradictions(objective: ObjectiveSection, *, max_tokens: int) -> Iterator[str]:
    """`max_tokens` are the tokens of an answer."""
    if objective.overlong_buffer > max_tokens:
        yield (
            f"objective.overlong_buffer ({objective.overlong_buffer}) is more than "
            f"environment.max_tokens ({max_tokens}); lower it"
        )


def _demand_contradictions(objective: ObjectiveSection, demand: Demand) -> Iterator[str]:
    given = getattr(objective, demand.option)
    if given not in (None, demand.value):
        yield (
            f'objective.kind = "{objective.kind}" {demand.why}, so objective.{demand.option} = '
            f'"{given}" cannot be; set objective.{demand.option} = "{demand.value}"'
        )


def _added_contradictions(objective: ObjectiveSection) -> Iterator[str]:
    if objective.behaviour_coefficient and objective.kind == "mirror_descent":
        yield (
            f"objective.behaviour_coefficient ({objective.behaviour_coefficient:g}) adds what "
            "mirror_descent has already, log² R; remove it, and set objective.tau to twice of "
            "both together"
        )
    low = objective.cov_low
    high = objective.cov_high
    if low is not None and high is not None and low >= high:
        yield f"objective.cov_low ({low:g}) must be less than objective.cov_high ({high:g})"
    if objective.advantage == "maxrl" and objective.overlong_buffer:
        yield (
            f"objective.overlong_buffer ({objective.overlong_buffer}) may make a reward negative, "
            'and objective.advantage = "maxrl" divides by their mean; remove it '
            "(objective.mask_truncated leaves such rollouts out), or choose another advantage"
        )


def _token_contradictions(
    objective: ObjectiveSection, correction: CorrectionSection
) -> Iterator[str]:
    if objective.advantage != "gae":
        return
    if formula_of(objective, correction).is_per_rollout:
        yield (
            f'objective.kind = "{objective.kind}" takes one advantage for a whole rollout, and '
            'objective.advantage = "gae" gives one to each token; change one'
        )
    if correction.opsm is not None:
        yield (
            f"correction.opsm ({correction.opsm:g}) goes by the sign of a whole rollout's "
            'advantage, and objective.advantage = "gae" gives one to each token; remove it'
        )


def _weight_contradictions(
    objective: ObjectiveSection, correction: CorrectionSection
) -> Iterator[str]:
    weight = weight_of(objective, correction)
    for name in WEIGHT_OPTIONS:
        value = getattr(correction, name)
        if value is not None and name not in WEIGHTS[weight].options:
            yield (
                f'correction.{name} ({value:g}) does nothing with the weight "{weight}"; remove '
                "it, or set correction.weight"
            )
    if correction.self_normalised and weight == "off":
        yield (
            "correction.self_normalised does nothing without a weight; remove it, or set "
            "correction.weight"
        )
    bounds = weight_bounds(weight, correction)
    pairs = {
        "low": (bounds.get("low"), bounds.get("high")),
        "geometric_low": (correction.geometric_low, correction.geometric_high),
        "product_low": (correction.product_low, correction.product_high),
        "veto_low": (correction.veto_low, correction.veto_high),
    }
    for name, (below, above) in pairs.items():
        if below is not None and above is not None and below >= above:
            yield f"correction.{name} ({below:g}) must be less than its upper bound ({above:g})"


def critic_contradictions(config: Config) -> Iterator[str]:
    advantage = config.objective.advantage
    if advantage == "gae":
        if config.distillation.teacher is not None:
            yield (
                'objective.advantage = "gae" has no place for what distillation.teacher says of '
                "a token; choose another advantage, or remove the teacher"
            )
        return
    for name, value in config.critic:
        if value != getattr(CriticSection(), name):
            yield (
                f"critic.{name} ({value:g}) does nothing with objective.advantage = "
                f'"{advantage}"; remove it, or set objective.advantage = "gae"'
            )


def distillation_contradictions(config: Config) -> Iterator[str]:
    d = config.distillation
    if not d.rewards and d.teacher is None:
        yield (
            "distillation.rewards = false without distillation.teacher leaves nothing to learn "
            "from; name a teacher, or remove it"
        )
    if not d.rewards and not config.warm_start.is_made and _is_start(config, d.teacher):
        yield (
            f"distillation.teacher ({d.teacher}) is the model that the run begins with, so with "
            "distillation.rewards = false it agrees with the student and there is nothing to "
            "learn; let rewards count, or name another teacher"
        )
    if not d.rewards and d.teacher is not None and d.weight == 0:
        yield (
            "distillation.rewards = false with distillation.weight = 0 leaves nothing to learn "
            "from; raise the weight"
        )
    if d.teacher is not None and formula_of(config.objective, config.correction).is_per_rollout:
        yield (
            f'objective.kind = "{config.objective.kind}" takes one advantage for a whole rollout, '
            "and distillation.teacher gives one to each token; choose another objective, or remove "
            "the teacher"
        )
    if d.teacher is not None and config.correction.opsm is not None:
        yield (
            "correction.opsm goes by the sign of a whole rollout's advantage, and "
            "distillation.teacher gives one to each token; remove it"
        )
    if not d.rewards and config.rollout.drop_zero_spread:
        yield (
            "rollout.drop_zero_spread chooses groups by their rewards, which "
            "distillation.rewards = false ignores; remove one of them"
        )


def _is_start(config: Config, folder: Path | None) -> bool:
    """True if the run begins with the model in this folder."""
    if config.model.path is None or folder is None:
        return False
    return Path(config.model.path).resolve() == folder.resolve()
