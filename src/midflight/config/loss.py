"""The loss as configured: which objective, which correction, and what each of them takes. Nothing here imports torch.

Options of `[objective]` and `[correction]` that are unset have the default of their kind, from the tables at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from midflight.config.section import Above0, Count, Fraction, NonNegative, Section

ObjectiveKind = Literal[
    "decoupled_ppo",
    "ppo",
    "gspo",
    "gmpo",
    "sapo",
    "cispo",
    "rollout_is",
    "topr",
    "mirror_descent",
    "dppo_tv",
    "clip_cov",
    "kl_cov",
]
WeightKind = Literal["tis", "tis_sequence", "mis", "mis_sequence", "icepop", "off"]
Reduction = Literal["token_mean", "sequence_mean", "constant"]
Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "gae"]


class ObjectiveSection(Section):
    """What a token's loss is, and how rewards become advantages. `midflight train CONFIG --dry-run` prints the formula."""

    kind: ObjectiveKind = "decoupled_ppo"
    """decoupled_ppo: clip on r, weighted by `correction.weight`. ppo: clip on the ratio to the behaviour policy, no further weight. The others: docs/algorithms.md."""
    clip_low: Fraction | None = None
    """Lower clip of the ratio, 1 - clip_low; larger allows larger steps down."""
    clip_high: NonNegative | None = None
    """Upper clip, 1 + clip_high; DAPO's clip-higher when above `clip_low`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """c bounds the loss of tokens of negative advantage by -c A (3.0 is usual); larger bounds later."""
    tau_positive: Above0 | None = None
    """sapo: temperature of the gate where the advantage is positive; larger closes sooner."""
    tau_negative: Above0 | None = None
    """sapo: the same where it is negative."""
    tau: Above0 | None = None
    """mirror_descent: weight of the squared log-ratio; larger keeps the policy nearer to the behaviour policy."""
    delta: Above0 | None = None
    """dppo_tv: how far a token's probability may have moved; larger masks fewer tokens."""
    cap: Above0 | None = None
    """dppo_tv: bound of the ratio; larger varies more."""
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """clip_cov, kl_cov: share of the batch's tokens that are held back; larger keeps more entropy."""
    penalty: NonNegative | None = None
    """kl_cov: weight of the divergence on the tokens that are held back."""
    advantage: Advantage = "grpo"
    """grpo: (reward - mean) / std of the group. dr_grpo: reward - mean. rloo: reward - mean of the others. reinforce_pp: reward - mean of the group, in deviations of the batch. gae: reward to come - what a critic expected, per token, in deviations of the batch; see `[critic]`."""
    reduction: Reduction | None = None
    """token_mean (DAPO): over all tokens of the batch. sequence_mean (GRPO): per rollout, then over rollouts. constant (Dr.GRPO): sum over `max_tokens` of the environment. Unset: the kind's own."""
    proximal: Literal["start", "interpolated"] = "start"
    """start: log-probabilities under the weights that begin the step, by a forward when a step has several updates. interpolated (A-3PO): between behaviour and policy by their versions, without a forward."""
    kl: Literal["k2", "k3", "unbiased"] = "k3"
    """Estimator of the divergence from the reference, the weights that the run began with; `unbiased` weighs k3 by the ratio to the behaviour policy."""
    kl_coefficient: NonNegative = 0.0
    """Weight of that divergence; larger keeps the policy nearer to the reference. 0 keeps no reference in memory."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus; larger explores longer."""
    overlong_buffer: Count = 0
    """DAPO's soft over-long penalty starts this many tokens before `max_tokens`; 0 is none."""
    overlong_penalty: NonNegative = 1.0
    """Its size at `max_tokens`."""


class CorrectionSection(Section):
    """How tokens of older policies are weighed, by rho = proximal / behaviour. A mask is in force when its bound is set."""

    weight: WeightKind | None = None
    """tis: min(rho, cap). tis_sequence: of the product over the rollout. mis: rho inside [low, high], else 0; mis_sequence: of the product. icepop: as mis, with wider bounds. Unset: tis where the objective takes a weight. off trains stale tokens as if they were fresh."""
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
    k2_max: Above0 | None = None
    """Masks tokens whose log(rho)^2 / 2 is more."""
    k3_max: Above0 | None = None
    """Masks tokens whose rho - 1 - log(rho) is more (0.001 to 0.01 are usual)."""
    veto_low: Above0 | None = None
    """Masks rollouts that have a token of smaller rho (1e-4 is usual)."""
    veto_high: Above0 | None = None
    """Masks rollouts that have a token of larger rho (100 is usual)."""
    m2po: Above0 | None = None
    """Masks the tokens of largest log(rho)^2 until the mean of the rest is below this (0.04 is usual)."""
    opsm: Above0 | None = None
    """Masks rollouts of negative advantage whose mean log(behaviour / policy) is more."""


class CriticSection(Section):
    """The critic of `objective.advantage = "gae"`: a model of the policy's size that learns beside it. What is not said here is as in `[trainer]`."""

    learning_rate: Above0 = 3e-4
    """Peak step size of its AdamW; larger follows the policy sooner."""
    discount: Fraction = 1.0
    """What a reward one token later is worth; smaller looks less far ahead."""
    trace_decay: Fraction = 1.0
    """λ of the advantages: 1 goes by the reward alone, smaller trusts the critic more and varies less."""
    clip: Above0 = 0.2
    """How far one step may move a value before its loss stops counting that as better, in units of the reward; acts when a step has several updates."""


@dataclass(frozen=True, slots=True)
class Kind:
    """An objective: whether it corrects for age by itself (bypass) or takes a weight (decoupled), and the knobs it has."""

    form: Literal["bypass", "decoupled"]
    formula: str
    """Of a token, with the knobs in braces; `low` and `high` are 1 - clip_low and 1 + clip_high."""
    knobs: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    reduction: Reduction = "token_mean"


_PPO: Mapping[str, float | None] = MappingProxyType({"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None})

KINDS: Mapping[str, Kind] = {
    "decoupled_ppo": Kind("decoupled", "-min(r A, clip(r, {low:g}, {high:g}) A)", _PPO),
    "ppo": Kind("bypass", "-min(R A, clip(R, {low:g}, {high:g}) A)", _PPO),
    "gspo": Kind(
        "decoupled",
        "-min(s A, clip(s, {low:g}, {high:g}) A),  s = sg[exp(mean log r)] π / sg[π]",
        {"clip_low": 3e-4, "clip_high": 4e-4},
        "sequence_mean",
    ),
    "gmpo": Kind(
        "decoupled",
        "-(geometric mean of clip(r, e^-{clip_low:g}, e^{clip_high:g})) A",
        {"clip_low": 0.4, "clip_high": 0.4},
        "sequence_mean",
    ),
    "sapo": Kind(
        "decoupled",
        "-(4/τ) sigmoid(τ (r - 1)) A,  τ = {tau_positive:g} for A > 0, else {tau_negative:g}",
        {"tau_positive": 1.0, "tau_negative": 1.05},
    ),
    "cispo": Kind("bypass", "-sg[clip(R, {low:g}, {high:g})] A log π", {"clip_low": 1.0, "clip_high": 4.0}),
    "rollout_is": Kind("bypass", "-sg[R if {low:g} < R < {high:g} else 0] A log π", {"clip_low": 0.2, "clip_high": 0.28}),
    "topr": Kind("bypass", "-sg[1 if A > 0 else min(product of R, 1)] A log π"),
    "mirror_descent": Kind("bypass", "-A log π + {tau:g}/2 log² R", {"tau": 0.1}),
    "dppo_tv": Kind("bypass", "-sg[min(R, {cap:g}) if π - µ is within {delta:g} towards A else 0] A log π", {"delta": 0.2, "cap": 20.0}),
    "clip_cov": Kind(
        "decoupled",
        "-min(r A, clip(r, {low:g}, {high:g}) A), without gradient on {share:g} of the tokens, of largest cov(log π, A)",
        {"clip_low": 0.2, "clip_high": 0.28, "share": 2e-4},
    ),
    "kl_cov": Kind(
        "decoupled", "-r A + {penalty:g} |log r| on {share:g} of the tokens, of largest cov(log π, A)", {"share": 2e-4, "penalty": 1.0}
    ),
}

WEIGHTS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "tis": ("min(ρ, {cap:g})", {"cap": 2.0}),
    "tis_sequence": ("min(product of ρ over the rollout, {cap:g})", {"cap": 2.0}),
    "mis": ("ρ if {low:g} <= ρ <= {high:g} else 0", {"low": 0.5, "high": 2.0}),
    "mis_sequence": ("p if {low:g} <= p <= {high:g} else 0, p = product of ρ over the rollout", {"low": 0.5, "high": 2.0}),
    "icepop": ("ρ if {low:g} <= ρ <= {high:g} else 0", {"low": 0.5, "high": 5.0}),
    "off": ("1", {}),
}

MASKS: Mapping[str, str] = {
    "geometric": "geometric mean of ρ over the rollout within [{geometric_low:g}, {geometric_high:g}]",
    "k2": "log² ρ / 2 <= {k2_max:g}",
    "k3": "ρ - 1 - log ρ <= {k3_max:g}",
    "veto": "every ρ of the rollout within [{veto_low:g}, {veto_high:g}]",
    "m2po": "mean of log² ρ over the batch below {m2po:g}, the largest go first",
    "opsm": "not (A < 0 and mean log(µ / π) over the rollout > {opsm:g})",
}
"""What is kept."""

PER_ROLLOUT = frozenset({"gmpo", "topr"})
"""They take one advantage for a whole rollout."""
_BEYOND = frozenset({"gspo", "gmpo", "topr", "clip_cov", "kl_cov"})
_WEIGHTS_BEYOND = frozenset({"tis_sequence", "mis_sequence"})
_MASKS_BEYOND = frozenset({"geometric", "veto", "m2po", "opsm"})


@dataclass(frozen=True, slots=True)
class Loss:
    """Both sections with every default filled in."""

    kind: str
    knobs: Mapping[str, float | None]
    weight: str
    bounds: Mapping[str, float]
    """Of the weight."""
    masks: Mapping[str, Mapping[str, float]]
    """Bounds of each mask in force; an open end is 0 or infinity."""
    reduction: Reduction
    looks_beyond: bool
    """Some part needs the log-probabilities of a whole rollout, or of the batch, before any token's loss is known."""

    @property
    def is_bypass(self) -> bool:
        return KINDS[self.kind].form == "bypass"


def loss_of(objective: ObjectiveSection, correction: CorrectionSection) -> Loss:
    """What the two sections ask for. They are free of `loss_contradictions`."""
    kind = KINDS[objective.kind]
    weight = _weight(objective, correction)
    masks = _masks(correction)
    return Loss(
        kind=objective.kind,
        knobs={name: default if (given := getattr(objective, name)) is None else given for name, default in kind.knobs.items()},
        weight=weight,
        bounds=_bounds(weight, correction),
        masks=masks,
        reduction=objective.reduction or kind.reduction,
        looks_beyond=objective.kind in _BEYOND
        or weight in _WEIGHTS_BEYOND
        or correction.self_normalised
        or not _MASKS_BEYOND.isdisjoint(masks),
    )


def _weight(objective: ObjectiveSection, correction: CorrectionSection) -> str:
    return correction.weight or ("off" if KINDS[objective.kind].form == "bypass" else "tis")


def _bounds(weight: str, correction: CorrectionSection) -> Mapping[str, float]:
    return {name: default if (given := getattr(correction, name)) is None else given for name, default in WEIGHTS[weight][1].items()}


def _masks(c: CorrectionSection) -> Mapping[str, Mapping[str, float]]:
    found: dict[str, Mapping[str, float]] = {}
    for name in ("geometric", "veto"):
        low, high = getattr(c, f"{name}_low"), getattr(c, f"{name}_high")
        if low is not None or high is not None:
            found[name] = {"low": low or 0.0, "high": float("inf") if high is None else high}
    if c.k2_max is not None:
        found["k2"] = {"bound": c.k2_max}
    if c.k3_max is not None:
        found["k3"] = {"bound": c.k3_max}
    if c.m2po is not None:
        found["m2po"] = {"bound": c.m2po}
    if c.opsm is not None:
        found["opsm"] = {"bound": c.opsm}
    return found


_ALL_KNOBS = sorted({name for kind in KINDS.values() for name in kind.knobs})
_ALL_BOUNDS = sorted({name for _, bounds in WEIGHTS.values() for name in bounds})


def loss_contradictions(objective: ObjectiveSection, correction: CorrectionSection) -> Iterator[str]:
    """One sentence for each pair of options that cannot both hold: above all what would weigh by one ratio twice (rule 0)."""
    kind, weight = KINDS[objective.kind], correction.weight
    if kind.form == "bypass" and weight not in (None, "off"):
        yield (
            f'objective.kind = "{objective.kind}" with correction.weight = "{weight}" would count the ratio to the behaviour policy twice; '
            f"remove correction.weight, or choose an objective that takes a weight, such as decoupled_ppo"
        )
    for name in _ALL_KNOBS:
        if getattr(objective, name) is not None and name not in kind.knobs:
            takers = ", ".join(k for k, other in KINDS.items() if name in other.knobs)
            yield f'objective.{name} ({getattr(objective, name):g}) does nothing with objective.kind = "{objective.kind}"; remove it, or choose one of {takers}'
    yield from _weight_contradictions(objective, correction)
    if objective.kind == "gmpo" and objective.reduction not in (None, "sequence_mean"):
        yield f'objective.kind = "gmpo" is a mean over each rollout, so objective.reduction = "{objective.reduction}" cannot be; remove it'
    if objective.kind == "mirror_descent" and objective.advantage != "dr_grpo":
        yield f'objective.kind = "mirror_descent" is derived for reward - mean; set objective.advantage = "dr_grpo", got "{objective.advantage}"'
    yield from _token_contradictions(objective, correction)
    if objective.proximal == "interpolated" and kind.form == "bypass":
        yield f'objective.proximal = "interpolated" does nothing with objective.kind = "{objective.kind}", which has no proximal policy; remove it'


def _token_contradictions(objective: ObjectiveSection, correction: CorrectionSection) -> Iterator[str]:
    if objective.advantage != "gae":
        return
    if objective.kind in PER_ROLLOUT:
        yield f'objective.kind = "{objective.kind}" takes one advantage for a whole rollout, and objective.advantage = "gae" gives one to each token; change one'
    if correction.opsm is not None:
        yield f'correction.opsm ({correction.opsm:g}) goes by the sign of a whole rollout\'s advantage, and objective.advantage = "gae" gives one to each token; remove it'


def _weight_contradictions(objective: ObjectiveSection, correction: CorrectionSection) -> Iterator[str]:
    weight = _weight(objective, correction)
    for name in _ALL_BOUNDS:
        if getattr(correction, name) is not None and name not in WEIGHTS[weight][1]:
            yield f'correction.{name} ({getattr(correction, name):g}) does nothing with the weight "{weight}"; remove it, or set correction.weight'
    if correction.self_normalised and weight == "off":
        yield "correction.self_normalised does nothing without a weight; remove it, or set correction.weight"
    bounds = _bounds(weight, correction)
    for name, (below, above) in {
        "low": (bounds.get("low"), bounds.get("high")),
        "geometric_low": (correction.geometric_low, correction.geometric_high),
        "veto_low": (correction.veto_low, correction.veto_high),
    }.items():
        if below is not None and above is not None and below >= above:
            yield f"correction.{name} ({below:g}) must be less than its upper bound ({above:g})"
