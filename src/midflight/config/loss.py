"""The sections of a token's loss (objective, correction, critic, distillation), and the loss that
they ask for. Nothing here imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from midflight.config.formulas import (
    MASKS,
    OBJECTIVE_OPTIONS,
    OBJECTIVES,
    WEIGHTS,
    Advantage,
    Divergence,
    ObjectiveFormula,
    Reduction,
    WeightKind,
)
from midflight.config.section import Above0, Count, Fraction, NonNegative, Rate, Section
from midflight.entries import ENTRY


def _objective_kind(value: str) -> str:
    if value not in OBJECTIVES and not ENTRY.fullmatch(value):
        raise ValueError(value)
    return value


ObjectiveKind = Annotated[
    str, AfterValidator(_objective_kind), WithJsonSchema({"enum": [*OBJECTIVES, "module:function"]})
]


class ObjectiveSection(Section):
    """Unset options have the default of their `kind` (docs/formulas.md#objectives). `midflight
    train CONFIG --dry-run` prints the formula.
    """

    kind: ObjectiveKind = "decoupled_ppo"
    """The loss of a token (docs/formulas.md#objectives), or your own
    (docs/algorithms.md#a-loss-of-your-own).
    """
    clip_low: Fraction | None = None
    """Lower clip of the ratio, 1 - clip_low; larger allows larger steps down."""
    clip_high: NonNegative | None = None
    """Upper clip, 1 + clip_high; DAPO's clip-higher when above `clip_low`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """c: where A < 0 the loss is bounded by -c A (3.0 is usual)."""
    tau_positive: Above0 | None = None
    """sapo: temperature of the gate where A > 0; larger closes sooner."""
    tau_negative: Above0 | None = None
    """sapo: the same where A < 0."""
    tau: Above0 | None = None
    """mirror_descent: weight of the pull to the behaviour policy."""
    delta: Above0 | None = None
    """dppo_tv, ipo: how far a token's probability may have moved."""
    cap: Above0 | None = None
    """dppo_tv, ipo: bound of the ratio."""
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """clip_cov, kl_cov: share of tokens held back; larger keeps more entropy."""
    cov_low: float | None = None
    """clip_cov: holds back only tokens of covariance above this."""
    cov_high: float | None = None
    """clip_cov: and below this."""
    penalty: NonNegative | None = None
    """kl_cov: weight of the divergence on tokens held back."""
    advantage: Advantage = "grpo"
    """How rewards become advantages (docs/formulas.md#advantages); gae has a `[critic]`."""
    normalise: Literal["reward", "component"] = "reward"
    """Compare weighted sums of components, or each component by itself (GDPO), with `advantage =
    "grpo"`.
    """
    reduction: Reduction | None = None
    """How losses of tokens become one number (docs/formulas.md#reductions)."""
    proximal: Literal["start", "interpolated"] = "start"
    """With several updates: log-probabilities by a forward at the step's start, or interpolated
    (A-3PO).
    """
    kl: Divergence = "k3"
    """Estimator of the divergence from the reference (docs/formulas.md#divergences)."""
    kl_coefficient: NonNegative = 0.0
    """Weight of the divergence from the weights after the warm start; 0 keeps no reference."""
    behaviour_coefficient: NonNegative = 0.0
    """Weight of log²(π / µ), a pull to the behaviour policy (0.001 is usual)."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus; larger explores longer."""
    overlong_buffer: Count = 0
    """DAPO's over-long penalty starts so many tokens before the limit; 0 is none."""
    overlong_penalty: NonNegative = 1.0
    """Its size at the limit."""
    mask_truncated: bool = False
    """Keep rollouts that were cut short out of the loss (DAPO)."""


class CorrectionSection(Section):
    """Tokens of older policies are weighed by rho = proximal / behaviour. A mask is in force when
    its bound is set (docs/formulas.md#masks).
    """

    weight: WeightKind | None = None
    """How rho weighs a token (docs/formulas.md#weights). Unset: tis, if the objective takes a
    weight.
    """
    cap: Above0 | None = None
    """tis, tis_sequence: C; larger corrects more and varies more."""
    low: NonNegative | None = None
    """mis, mis_sequence, icepop: least ratio that is kept."""
    high: Above0 | None = None
    """mis, mis_sequence, icepop: largest ratio that is kept."""
    self_normalised: bool = False
    """Divide weights by their mean over the batch."""
    age_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor of a token's loss for each version of age; smaller trusts old tokens less."""
    geometric_low: Above0 | None = None
    """Masks rollouts of smaller geometric mean of rho."""
    geometric_high: Above0 | None = None
    """Masks rollouts of larger geometric mean of rho."""
    product_low: Above0 | None = None
    """Masks rollouts of smaller product of rho."""
    product_high: Above0 | None = None
    """Masks rollouts of larger product of rho."""
    k3_max: Above0 | None = None
    """Masks tokens of larger rho - 1 - log(rho)."""
    veto_low: Above0 | None = None
    """Masks rollouts with a token of smaller rho."""
    veto_high: Above0 | None = None
    """Masks rollouts with a token of larger rho."""
    m2po: Above0 | None = None
    """Masks tokens of largest log(rho)^2 until the others' mean is below this."""
    opsm: Above0 | None = None
    """Masks rollouts of negative advantage and larger mean log(behaviour / policy)."""
    routing_replay: bool = True
    """Train with the experts that engines recorded for each token."""

    sampling_masks: bool | None = None
    """Train turns of top-p, top-k or min-p over the recorded tokens; false masks them. Default:
    true, but for foreign trainers.
    """


class CriticSection(Section):
    """The critic of `objective.advantage = "gae"` has all other options of `[trainer]`."""

    learning_rate: Rate = 3e-4
    """Peak step size. Default with `model.path`: ten times the trainer's for whole weights, at most
    0.0003.
    """
    discount: Fraction = 1.0
    """Worth of a reward one token later; smaller looks less far ahead."""
    trace_decay: Fraction = 1.0
    """λ: 1 goes by the reward alone, smaller trusts the critic more."""
    clip: Above0 = 0.2
    """How far a step may move a value, in units of reward; acts with several updates."""


# --- The loss -------------------------------------------------------------------------------------


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
    reduction: Reduction

    @property
    def is_bypass(self) -> bool:
        return self.formula.form == "bypass"


def loss_of(objective: ObjectiveSection, correction: CorrectionSection) -> Loss:
    """The loss that the two sections ask for. They are free of
    `loss_checks.loss_contradictions`.
    """
    formula = formula_of(objective, correction)
    weight = weight_of(objective, correction)
    options = dict(formula.options)
    for name in formula.all_options:
        value = getattr(objective, name)
        if value is not None:
            options[name] = value
    return Loss(
        formula=formula,
        options=options,
        weight=weight,
        bounds=weight_bounds(weight, correction),
        masks=_masks(correction),
        reduction=objective.reduction or formula.reduction,
    )


def formula_of(objective: ObjectiveSection, correction: CorrectionSection) -> ObjectiveFormula:
    """The row of the objective. A loss of the user's own takes a weight if one is asked for, and
    any options.
    """
    if objective.kind in OBJECTIVES:
        return OBJECTIVES[objective.kind]
    is_bypass = correction.weight in (None, "off")
    return ObjectiveFormula(
        "bypass" if is_bypass else "decoupled",
        objective.kind,
        objective.kind,
        at_will={name: f", {name} = {{{name}:g}}" for name in OBJECTIVE_OPTIONS},
        is_zero_without_advantage=False,
    )


def weight_of(objective: ObjectiveSection, correction: CorrectionSection) -> str:
    """The weight that is in force, with its default."""
    if correction.weight is not None:
        return correction.weight
    return "off" if formula_of(objective, correction).form == "bypass" else "tis"


def weight_bounds(weight: str, correction: CorrectionSection) -> Mapping[str, float]:
    """The bounds of a weight, with their defaults."""
    bounds = dict(WEIGHTS[weight].options)
    for name in bounds:
        given = getattr(correction, name)
        if given is not None:
            bounds[name] = given
    return bounds


def _masks(correction: CorrectionSection) -> Mapping[str, Mapping[str, float]]:
    """The bounds of each mask of which at least one bound is set. An open end is 0 or infinity."""
    found: dict[str, Mapping[str, float]] = {}
    for mask, row in MASKS.items():
        given = {name: getattr(correction, option) for name, option in row.bounds.items()}
        if all(value is None for value in given.values()):
            continue
        bounds: dict[str, float] = {}
        for name, value in given.items():
            open_end = 0.0 if name == "low" else float("inf")
            bounds[name] = open_end if value is None else value
        found[mask] = bounds
    return found


class DistillationSection(Section):
    """The student samples, and a teacher says how likely each token is."""

    teacher: Path | None = None
    """A Hugging Face model folder or GGUF file with the student's tokenizer."""
    weight: NonNegative = 1.0
    """Weight of log teacher - log behaviour beside the advantage."""
    rewards: bool = True
    """Whether rewards count beside the teacher."""
