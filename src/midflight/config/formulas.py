"""Every formula of the loss as a row: the function that computes it, the text that prints it, and
the options it takes.

A new objective is one function in `trainer.formulas.losses` and one row in `OBJECTIVES`; an option
that no objective has yet is also a field of `ObjectiveSection` (`config.loss`). A function
is called by the names of its parameters (`trainer.objective`), so a row need not list its
arguments. Nothing here imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Reduction = Literal["token_mean", "sequence_mean", "constant"]
Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "maxrl", "gae"]
Divergence = Literal["k1", "abs_k1", "k2", "k3", "unbiased"]
WeightKind = Literal["tis", "tis_sequence", "mis", "mis_sequence", "icepop", "off"]


@dataclass(frozen=True, slots=True)
class Formula:
    """`text` has the numbers of the options in braces."""

    function: str
    text: str
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    """Options of the section that the function takes, with defaults."""


@dataclass(frozen=True, slots=True)
class Demand:
    """An option of `[objective]` that must have one value, and why. Where the option is unset, the
    row gives it this value.
    """

    option: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class ObjectiveFormula:
    """A token's loss. `function` is one of `trainer.formulas.losses`, or the user's own
    `module:function`.
    """

    form: Literal["bypass", "decoupled"]
    """bypass: it corrects for age by itself, by the ratio to the behaviour policy. decoupled: it
    takes a weight that does.
    """
    function: str
    text: str
    """The formula with options in braces; `low` and `high` are 1 - clip_low and 1 + clip_high."""
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    at_will: Mapping[str, str] = field(default_factory=dict[str, str])
    """Options that may be left out, each with its addition to the text."""
    reduction: Reduction = "token_mean"
    clip: str | None = None
    """The function that finds the tokens whose gradient a clip takes away."""
    is_zero_without_advantage: bool = True
    """The gradient of a token of advantage 0 is exactly 0."""
    is_per_rollout: bool = False
    """It takes one advantage for a whole rollout."""
    demand: Demand | None = None

    @property
    def all_options(self) -> frozenset[str]:
        return frozenset({*self.options, *self.at_will})


_CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
_BAND = {"cov_low": ", above {cov_low:g}", "cov_high": ", below {cov_high:g}"}
_DUAL = {"dual_clip": ", at most -{dual_clip:g} A where A < 0"}

OBJECTIVES: Mapping[str, ObjectiveFormula] = {
    "decoupled_ppo": ObjectiveFormula(
        "decoupled", "ppo", "-min(r A, clip(r, {low:g}, {high:g}) A)", _CLIPS, _DUAL, clip="clipped"
    ),
    "ppo": ObjectiveFormula(
        "bypass", "ppo", "-min(R A, clip(R, {low:g}, {high:g}) A)", _CLIPS, _DUAL, clip="clipped"
    ),
    "gspo": ObjectiveFormula(
        "decoupled",
        "gspo",
        "-min(s A, clip(s, {low:g}, {high:g}) A),  s = sg[exp(mean log r)] π / sg[π]",
        {"clip_low": 3e-4, "clip_high": 4e-4},
        reduction="sequence_mean",
        clip="gspo_clipped",
    ),
    "gmpo": ObjectiveFormula(
        "decoupled",
        "gmpo",
        "-(geometric mean of clip(r, e^-{clip_low:g}, e^{clip_high:g})) A",
        {"clip_low": 0.4, "clip_high": 0.4},
        reduction="sequence_mean",
        clip="gmpo_clipped",
        is_per_rollout=True,
        demand=Demand("reduction", "sequence_mean", "is a mean over each rollout"),
    ),
    "sapo": ObjectiveFormula(
        "decoupled",
        "sapo",
        "-(4/τ) sigmoid(τ (r - 1)) A,  τ = {tau_positive:g} for A > 0, else {tau_negative:g}",
        {"tau_positive": 1.0, "tau_negative": 1.05},
    ),
    "cispo": ObjectiveFormula(
        "bypass",
        "cispo",
        "-sg[clip(R, {low:g}, {high:g})] A log π",
        {"clip_low": 1.0, "clip_high": 4.0},
    ),
    "decoupled_cispo": ObjectiveFormula(
        "decoupled",
        "cispo",
        "-sg[clip(r, {low:g}, {high:g})] A log π",
        {"clip_low": 1.0, "clip_high": 4.0},
    ),
    "rollout_is": ObjectiveFormula(
        "bypass",
        "rollout_is",
        "-sg[R if {low:g} < R < {high:g} else 0] A log π",
        _CLIPS,
        clip="outside",
    ),
    "topr": ObjectiveFormula(
        "bypass", "topr", "-sg[1 if A > 0 else min(product of R, 1)] A log π", is_per_rollout=True
    ),
    "mirror_descent": ObjectiveFormula(
        "bypass",
        "mirror_descent",
        "-A log π + {tau:g}/2 log² R",
        {"tau": 0.1},
        is_zero_without_advantage=False,
        demand=Demand("advantage", "dr_grpo", "is derived for reward - mean"),
    ),
    "dppo_tv": ObjectiveFormula(
        "bypass",
        "dppo_tv",
        "-sg[min(R, {cap:g}) if π - µ is within {delta:g} towards A else 0] A log π",
        {"delta": 0.2, "cap": 20.0},
        clip="dppo_clipped",
    ),
    "ipo": ObjectiveFormula(
        "bypass",
        "ipo",
        "-sg[min(R, {cap:g}) if |π - µ| is within {delta:g} else 0] A log π",
        {"delta": 0.1, "cap": 20.0},
        clip="ipo_clipped",
    ),
    "clip_cov": ObjectiveFormula(
        "decoupled",
        "clip_cov",
        (
            "-min(r A, clip(r, {low:g}, {high:g}) A), without gradient on {share:g} of the "
            "tokens, of largest cov(log π, A)"
        ),
        {**_CLIPS, "share": 2e-4},
        _BAND,
        clip="clipped",
    ),
    "kl_cov": ObjectiveFormula(
        "decoupled",
        "kl_cov",
        "-r A + {penalty:g} |log r| on {share:g} of the tokens, of largest cov(log π, A)",
        {"share": 2e-4, "penalty": 1.0},
        is_zero_without_advantage=False,
    ),
}
"""The rows by `objective.kind`."""

OBJECTIVE_OPTIONS = sorted({name for row in OBJECTIVES.values() for name in row.all_options})


# Weights and masks are functions of `trainer.formulas.corrections`.

WEIGHTS: Mapping[str, Formula] = {
    "tis": Formula("truncated_weight", "min(ρ, {cap:g})", {"cap": 2.0}),
    "tis_sequence": Formula(
        "truncated_sequence_weight", "min(product of ρ over the rollout, {cap:g})", {"cap": 2.0}
    ),
    "mis": Formula(
        "masked_weight", "ρ if {low:g} <= ρ <= {high:g} else 0", {"low": 0.5, "high": 2.0}
    ),
    "mis_sequence": Formula(
        "masked_sequence_weight",
        "p if {low:g} <= p <= {high:g} else 0, p = product of ρ over the rollout",
        {"low": 0.5, "high": 2.0},
    ),
    "icepop": Formula(
        "icepop_weight", "ρ if {low:g} <= ρ <= {high:g} else 0", {"low": 0.5, "high": 5.0}
    ),
    "off": Formula("unweighted", "1"),
}
"""The rows by `correction.weight`."""

WEIGHT_OPTIONS = sorted({name for row in WEIGHTS.values() for name in row.options})


@dataclass(frozen=True, slots=True)
class MaskFormula:
    """A mask. Its text is the condition under which it keeps a token. It is in force when one of
    its bounds is set, and an end that is left open is 0 or infinity.
    """

    function: str
    text: str
    bounds: Mapping[str, str]
    """The function's parameters, each with its option of `[correction]`."""


MASKS: Mapping[str, MaskFormula] = {
    "geometric": MaskFormula(
        "geometric_mask",
        "geometric mean of ρ over the rollout within [{low:g}, {high:g}]",
        {"low": "geometric_low", "high": "geometric_high"},
    ),
    "product": MaskFormula(
        "product_mask",
        "product of ρ over the rollout within [{low:g}, {high:g}]",
        {"low": "product_low", "high": "product_high"},
    ),
    "veto": MaskFormula(
        "veto_mask",
        "every ρ of the rollout within [{low:g}, {high:g}]",
        {"low": "veto_low", "high": "veto_high"},
    ),
    "k3": MaskFormula("k3_mask", "ρ - 1 - log ρ <= {bound:g}", {"bound": "k3_max"}),
    "m2po": MaskFormula(
        "m2po_mask",
        "mean of log² ρ over the batch below {bound:g}, the largest go first",
        {"bound": "m2po"},
    ),
    "opsm": MaskFormula(
        "opsm_mask",
        "not (A < 0 and mean log(µ / π) over the rollout > {bound:g})",
        {"bound": "opsm"},
    ),
}


DIVERGENCES: Mapping[Divergence, Formula] = {
    "k1": Formula("k1_divergence", "log(π / π_ref)"),
    "abs_k1": Formula("abs_k1_divergence", "|log(π / π_ref)|"),
    "k2": Formula("k2_divergence", "log²(π / π_ref) / 2"),
    "k3": Formula("k3_divergence", "(x - 1 - log x),  x = π_ref / π"),
    "unbiased": Formula("unbiased_divergence", "R (x - 1 - log x),  x = π_ref / π"),
}
"""The rows by `objective.kl`; functions of `trainer.formulas.losses`."""

ADVANTAGES: Mapping[Advantage, Formula] = {
    "grpo": Formula("grpo_advantages", "A = (reward - mean of group) / (std of group + 1e-6)"),
    "dr_grpo": Formula("dr_grpo_advantages", "A = reward - mean of group"),
    "rloo": Formula("rloo_advantages", "A = reward - mean of the others of the group"),
    "reinforce_pp": Formula(
        "reinforce_pp_advantages", "A = (reward - mean of group) / std of the batch"
    ),
    "maxrl": Formula("maxrl_advantages", "A = (reward - mean of group) / mean of group"),
    "gae": Formula(
        "rewards_as_they_are",
        (
            "A_t = (Â_t - mean) / std over the batch's tokens,  Â_t = δ_t + {trace:g} Â_t+1,  δ_t "
            "= {discount:g} V_t+1 - V_t, at the end reward - V_t"
        ),
    ),
}
"""The rows by `objective.advantage`; functions of `trainer.formulas.advantages`."""

REDUCTIONS: Mapping[Reduction, Formula] = {
    "token_mean": Formula(
        "token_mean", "sum over the batch's tokens / number of the batch's tokens"
    ),
    "sequence_mean": Formula(
        "sequence_mean", "mean over the tokens of a rollout, then mean over rollouts"
    ),
    "constant": Formula("constant", "sum over the batch's tokens / (rollouts * {length})"),
}
"""The rows by `objective.reduction`; functions of `trainer.formulas.reductions`."""
