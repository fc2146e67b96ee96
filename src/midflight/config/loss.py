"""The loss that a configuration asks for, with every default filled in, and the same as text.

The text is printed at the start, so that nothing is counted twice unseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from midflight.config import formulas
from midflight.config.formulas import MASKS, OBJECTIVES, WEIGHTS, ObjectiveFormula
from midflight.config.sections import Config, CorrectionSection, ObjectiveSection


@dataclass(frozen=True, slots=True)
class Loss:
    """Both sections with every default filled in."""

    formula: ObjectiveFormula
    options: Mapping[str, float]
    """The objective's options with their values, without those that are left out."""
    weight: str
    bounds: Mapping[str, float]
    """The weight's bounds."""
    masks: Mapping[str, Mapping[str, float]]
    """Bounds of each mask in force."""
    reduction: formulas.Reduction

    @property
    def is_bypass(self) -> bool:
        return self.formula.form == "bypass"


def loss_of(objective: ObjectiveSection, correction: CorrectionSection) -> Loss:
    """What the two sections ask for. They are free of `checks.loss_contradictions`."""
    formula, weight = formula_of(objective, correction), weight_of(objective, correction)
    given = {name: value for name in formula.all_options if (value := getattr(objective, name)) is not None}
    return Loss(
        formula=formula,
        options={**formula.options, **given},
        weight=weight,
        bounds=weight_bounds(weight, correction),
        masks=_masks(correction),
        reduction=objective.reduction or formula.reduction,
    )


def formula_of(objective: ObjectiveSection, correction: CorrectionSection) -> ObjectiveFormula:
    """The row of the objective. A loss of the user's own takes a weight if one is asked for, and any options."""
    if objective.kind in OBJECTIVES:
        return OBJECTIVES[objective.kind]
    return ObjectiveFormula(
        "bypass" if correction.weight in (None, "off") else "decoupled",
        objective.kind,
        objective.kind,
        at_will={name: f", {name} = {{{name}:g}}" for name in formulas.OBJECTIVE_OPTIONS},
        is_zero_without_advantage=False,
    )


def weight_of(objective: ObjectiveSection, correction: CorrectionSection) -> str:
    return correction.weight or ("off" if formula_of(objective, correction).form == "bypass" else "tis")


def weight_bounds(weight: str, correction: CorrectionSection) -> Mapping[str, float]:
    return {name: default if (given := getattr(correction, name)) is None else given for name, default in WEIGHTS[weight].options.items()}


def _masks(correction: CorrectionSection) -> Mapping[str, Mapping[str, float]]:
    found: dict[str, Mapping[str, float]] = {}
    for mask, row in MASKS.items():
        given: dict[str, float | None] = {name: getattr(correction, option) for name, option in row.bounds.items()}
        if any(value is not None for value in given.values()):
            found[mask] = {name: _open_end(name) if value is None else value for name, value in given.items()}
    return found


def _open_end(name: str) -> float:
    return 0.0 if name == "low" else float("inf")


# --- As text ---------------------------------------------------------------------------------------------------------


def effective_loss(config: Config) -> tuple[str, ...]:
    """Per-token loss, ratios, masks, advantage and reduction, one line each; µ is the behaviour policy, π the current one, sg stops the gradient."""
    return tuple(_lines(config))


def _lines(config: Config) -> Iterator[str]:
    o, loss = config.objective, loss_of(config.objective, config.correction)
    yield _token(config, loss)
    yield from _ratios(config, loss)
    for name, bounds in loss.masks.items():
        yield f"masked unless {MASKS[name].text.format(**bounds)}"
    if o.kl_coefficient:
        yield f"loss += {o.kl_coefficient:g} {formulas.DIVERGENCES[o.kl].text},  π_ref = the weights that the run began with"
    if o.entropy_coefficient:
        yield f"loss -= {o.entropy_coefficient:g} entropy of π"
    yield from _advantage(config)
    yield f"reduction: {formulas.REDUCTIONS[loss.reduction].text.format(length=config.environment.max_tokens)}"
    if o.overlong_buffer:
        start = config.environment.max_tokens - o.overlong_buffer
        yield f"reward -= {o.overlong_penalty:g} * (length - {start}) / {o.overlong_buffer} beyond {start} tokens"


def _token(config: Config, loss: Loss) -> str:
    numbers = {**loss.options, "low": 1 - loss.options.get("clip_low", 0), "high": 1 + loss.options.get("clip_high", 0)}
    token = "".join([loss.formula.text, *(text for name, text in loss.formula.at_will.items() if name in loss.options)]).format(**numbers)
    factors = [f"sg[{WEIGHTS[loss.weight].text.format(**loss.bounds)}]"] if loss.weight != "off" else []
    if config.correction.self_normalised:
        factors = [f"{factors[0]} / mean over the batch"]
    if config.correction.age_decay < 1:
        factors.append(f"{config.correction.age_decay:g}^age")
    return "loss = " + (" * ".join([*factors, f"({token})"]) if factors else token)


def _ratios(config: Config, loss: Loss) -> Iterator[str]:
    updates = config.trainer.updates_per_step
    if loss.is_bypass:
        yield "R = π / µ: the ratio to the behaviour policy, no further weight"
    elif config.objective.proximal == "interpolated":
        yield "ρ = π_prox / µ,  r = π / π_prox,  log π_prox between log µ and log sg[π] by the versions (A-3PO)"
    elif updates == 1:
        yield "ρ = sg[π] / µ,  r = π / sg[π]: one update per step, so r is 1 and no clip acts"
    else:
        yield "ρ = π_prox / µ,  r = π / π_prox,  π_prox from the start of the step"


def _advantage(config: Config) -> Iterator[str]:
    d, c = config.distillation, config.critic
    if d.teacher is None or d.rewards:
        yield formulas.ADVANTAGES[config.objective.advantage].text.format(discount=c.discount, trace=c.discount * c.trace_decay)
    if config.objective.advantage == "gae":
        yield f"critic: loss = max((V - G)², (clip(V, V_start ± {c.clip:g}) - G)²) / 2,  G = Â + V_start, mean over the batch's tokens"
    if d.teacher is not None:
        yield f"A {'+=' if d.rewards else '='} {d.weight:g} log(π_teacher / µ), token by token"
