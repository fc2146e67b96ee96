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
    """The loss of a token, and the way from rewards to advantages. `midflight train CONFIG
    --dry-run` prints the formula.
    """

    kind: ObjectiveKind = "decoupled_ppo"
    """decoupled_ppo: clip on r, weighted by `correction.weight`. ppo: clip on the ratio to the
    behaviour policy. `module:function`: a loss of your own. The others: docs/algorithms.md.
    """
    clip_low: Fraction | None = None
    """Lower clip of the ratio, 1 - clip_low; larger allows larger steps down."""
    clip_high: NonNegative | None = None
    """Upper clip, 1 + clip_high; DAPO's clip-higher when above `clip_low`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """c bounds the loss of tokens of negative advantage by -c A (3.0 is usual); larger bounds
    later.
    """
    tau_positive: Above0 | None = None
    """sapo: temperature of the gate where the advantage is positive; larger closes sooner."""
    tau_negative: Above0 | None = None
    """sapo: the same where it is negative."""
    tau: Above0 | None = None
    """mirror_descent: weight of the squared log-ratio; larger keeps nearer to the behaviour policy.
    """
    delta: Above0 | None = None
    """dppo_tv, ipo: how far a token's probability may have moved."""
    cap: Above0 | None = None
    """dppo_tv, ipo: bound of the ratio."""
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """clip_cov, kl_cov: share of the batch's tokens that are held back; larger keeps more entropy.
    """
    cov_low: float | None = None
    """clip_cov: only tokens whose covariance of log π and A is above this are held back (1.0 in the
    paper).
    """
    cov_high: float | None = None
    """clip_cov: only tokens whose covariance is below this (5.0 in the paper)."""
    penalty: NonNegative | None = None
    """kl_cov: weight of the divergence on the tokens that are held back."""
    advantage: Advantage = "grpo"
    """How rewards become advantages (docs/algorithms.md); gae has a critic (`[critic]`), maxrl
    wants rewards of at least 0.
    """
    normalise: Literal["reward", "component"] = "reward"
    """reward: compares weighted sums of components. component (GDPO): compares each component
    within its group before the sum; takes `advantage = "grpo"`.
    """
    reduction: Reduction | None = None
    """token_mean (DAPO): over all tokens of the batch. sequence_mean (GRPO): per rollout, then over
    rollouts. constant (Dr.GRPO): sum over `max_tokens`. Unset: the kind's own.
    """
    proximal: Literal["start", "interpolated"] = "start"
    """start: log-probabilities under the weights that begin the step, by a forward. interpolated
    (A-3PO): between behaviour and policy by their versions, without one. It matters with several
    updates.
    """
    kl: Divergence = "k3"
    """Estimator of the divergence from the reference, the weights that the run began with
    (docs/algorithms.md).
    """
    kl_coefficient: NonNegative = 0.0
    """Weight of that divergence. 0 keeps no reference in memory."""
    behaviour_coefficient: NonNegative = 0.0
    """Weight of log²(π / µ), which pulls each token back to the policy that sampled it (0.001 is
    usual).
    """
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus; larger explores longer."""
    overlong_buffer: Count = 0
    """DAPO's soft over-long penalty starts this many tokens before an answer's own limit; 0 is
    none.
    """
    overlong_penalty: NonNegative = 1.0
    """Its size at the limit."""
    mask_truncated: bool = False
    """Keep rollouts with an answer that was cut short out of the loss (DAPO); their rewards stay in
    the group.
    """


class CorrectionSection(Section):
    """How tokens of older policies are weighed, by rho = proximal / behaviour. A mask is in force
    when its bound is set.
    """

    weight: WeightKind | None = None
    """How rho weighs a token (docs/algorithms.md). Unset: tis where the objective takes a weight.
    off trains stale tokens as if they were fresh.
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
    """Each version of age multiplies a token's loss by this; smaller trusts older tokens less."""
    geometric_low: Above0 | None = None
    """Masks rollouts whose geometric mean of rho is less (0.99 to 0.999 are usual)."""
    geometric_high: Above0 | None = None
    """Masks rollouts whose geometric mean of rho is more."""
    product_low: Above0 | None = None
    """Masks rollouts whose product of rho is less; without a weight of its own."""
    product_high: Above0 | None = None
    """Masks rollouts whose product of rho is more."""
    k3_max: Above0 | None = None
    """Masks tokens whose rho - 1 - log(rho) is more (0.001 to 0.01 are usual)."""
    veto_low: Above0 | None = None
    """Masks rollouts that have a token of smaller rho (1e-4 is usual)."""
    veto_high: Above0 | None = None
    """Masks rollouts that have a token of larger rho (100 is usual)."""
    m2po: Above0 | None = None
    """Masks the tokens of largest log(rho)^2 until the mean of the rest is below this (0.04 is
    usual).
    """
    opsm: Above0 | None = None
    """Masks rollouts of negative advantage whose mean log(behaviour / policy) is more."""
    routing_replay: bool = True
    """With a mixture of experts the trainer uses the experts that engines recorded for each token.
    false lets each choose.
    """

    sampling_masks: bool | None = None
    """Train turns that were sampled with top-p, top-k or min-p over what these kept, where engines
    record it; false keeps such turns out of the loss. Default: true, but for a trainer that is not
    ours.
    """


class CriticSection(Section):
    """The critic of `objective.advantage = "gae"`: a model of the policy's size that learns beside
    it. All other options are those of `[trainer]`.
    """

    learning_rate: Rate = 3e-4
    """Peak step size of its AdamW. Default with `model.path`: ten times `trainer.learning_rate`'s
    for whole weights, at most 0.0003.
    """
    discount: Fraction = 1.0
    """The worth of a reward one token later; smaller looks less far ahead."""
    trace_decay: Fraction = 1.0
    """λ of the advantages: 1 goes by the reward alone, smaller trusts the critic more and varies
    less.
    """
    clip: Above0 = 0.2
    """How far one step may move a value before its loss stops counting that as better, in units of
    the reward; acts when a step has several updates.
    """


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
    """On-policy distillation: the student samples, and a teacher says how likely each of its tokens
    is.
    """

    teacher: Path | None = None
    """A Hugging Face model folder, or a GGUF file, with the student's tokenizer; none distils
    nothing.
    """
    weight: NonNegative = 1.0
    """Weight of a token's log teacher - log behaviour beside the advantage of its reward."""
    rewards: bool = True
    """Whether rewards count too; without them the teacher is all there is to learn from."""
