"""The loss that trl's options ask for, as options of `[objective]` and `[correction]`.

trl's ratio is to the policy that begins a generation batch, as that of our decoupled objectives is;
with vLLM it is multiplied by a weight of that policy to the one that sampled, as theirs is. What
each loss computes is compared with trl's own numbers in tests/trainer/test_oracles.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol


class LossArguments(Protocol):
    """The options of `GRPOConfig` that a loss is made of."""

    loss_type: str
    importance_sampling_level: str
    epsilon: float
    epsilon_high: float | None
    delta: float | None
    beta: float
    use_bias_correction_kl: bool
    entropy_coef: float
    mask_truncated_completions: bool
    scale_rewards: str
    multi_objective_aggregation: str
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    off_policy_mask_threshold: float | None
    use_vllm: bool
    max_staleness: int
    vllm_importance_sampling_correction: bool
    vllm_importance_sampling_mode: str
    vllm_importance_sampling_clip_min: float | None
    vllm_importance_sampling_clip_max: float | None
    vllm_importance_sampling_cap: float | None


class LossType(NamedTuple):
    """A `loss_type` of trl's, here."""

    kind: str
    """`objective.kind` at the level of tokens."""
    reduction: str
    oracle: str
    """The comparison with trl's own value and gradient, by its name in test_oracles.py."""


LOSS_TYPES: Mapping[str, LossType] = {
    "grpo": LossType("decoupled_ppo", "sequence_mean", "trl/loss_grpo"),
    "bnpo": LossType("decoupled_ppo", "token_mean", "trl/loss_bnpo"),
    "dr_grpo": LossType("decoupled_ppo", "constant", "trl/loss_dr_grpo"),
    "dapo": LossType("decoupled_ppo", "token_mean", "trl/loss_dapo"),
    "cispo": LossType("decoupled_cispo", "token_mean", "trl/loss_cispo"),
    "sapo": LossType("sapo", "sequence_mean", "trl/loss_sapo"),
}
NOT_HERE = {
    "luspo": (
        "it is dr_grpo with importance_sampling_level='sequence', but for a factor that AdamW does "
        "not notice; use that"
    ),
    "vespo": (
        "it is a loss of your own in three lines (docs/algorithms.md#a-loss-of-your-own), or "
        "loss_type='dapo' with importance_sampling_level='sequence'"
    ),
}
ADVANTAGES = {"group": "grpo", "none": "dr_grpo", "batch": "reinforce_pp"}
"""`objective.advantage` by `scale_rewards`."""
WEIGHTS = {
    "token_truncate": "tis",
    "token_mask": "mis",
    "sequence_truncate": "tis_sequence",
    "sequence_mask": "mis_sequence",
}
"""`correction.weight` by `vllm_importance_sampling_mode`."""
NO_BOUND = 1e9
"""The upper bound of a weight that is bounded from below alone."""


def scaling(args: LossArguments) -> str:
    """`scale_rewards`, which may be a truth value too."""
    return {"True": "group", "False": "none"}.get(str(args.scale_rewards), str(args.scale_rewards))


def clip_high(args: LossArguments) -> float:
    return args.epsilon if args.epsilon_high is None else args.epsilon_high


def weight_high(args: LossArguments) -> float | None:
    if args.vllm_importance_sampling_cap is not None:
        return args.vllm_importance_sampling_cap
    return args.vllm_importance_sampling_clip_max


def loss_problems(args: LossArguments) -> Iterator[str]:
    """One sentence for each option of the loss that cannot be had, with its remedy."""
    if args.loss_type in NOT_HERE:
        yield f"loss_type={args.loss_type!r}: {NOT_HERE[args.loss_type]}"
        return
    if args.loss_type not in LOSS_TYPES:
        yield f"loss_type={args.loss_type!r}: losses are {', '.join(LOSS_TYPES)}"
        return
    if args.importance_sampling_level not in ("token", "sequence"):
        yield (
            f"importance_sampling_level={args.importance_sampling_level!r}: it is token or sequence"
        )
    if scaling(args) not in ADVANTAGES:
        yield f"scale_rewards={args.scale_rewards!r}: it is one of {', '.join(ADVANTAGES)}"
    if args.multi_objective_aggregation not in ("sum_then_normalize", "normalize_then_sum"):
        yield (
            f"multi_objective_aggregation={args.multi_objective_aggregation!r}: it is "
            "sum_then_normalize or normalize_then_sum"
        )
    if args.beta < 0:
        yield f"beta={args.beta!r}: a divergence is not rewarded; set 0 or more"
    if args.loss_type == "cispo" and clip_high(args) < 1:
        yield (
            f"epsilon_high={clip_high(args)!r} with loss_type='cispo': there it is the bound of "
            "the ratio itself, and below 1 it only makes the loss smaller; set epsilon_high=5.0"
        )
    if args.delta is not None:
        yield from _delta_problems(args, args.delta)
    if args.importance_sampling_level == "sequence":
        yield from _sequence_problems(args)
    if args.entropy_coef and LOSS_TYPES[args.loss_type].reduction != "token_mean":
        yield (
            f"entropy_coef={args.entropy_coef!r} with loss_type={args.loss_type!r}: the bonus is "
            "reduced as the loss is, and only over tokens is that trl's mean; use "
            "loss_type='dapo', or leave it out"
        )
    if args.use_vllm and args.vllm_importance_sampling_correction:
        yield from _weight_problems(args)


def _delta_problems(args: LossArguments, delta: float) -> Iterator[str]:
    if args.loss_type in ("cispo", "sapo"):
        yield f"delta={delta!r} with loss_type={args.loss_type!r}: it has no such bound; remove it"
    elif delta <= 1 + clip_high(args):
        yield (
            f"delta={delta!r}: it bounds tokens of negative advantage, beyond the clip; set more "
            f"than 1 + epsilon_high ({1 + clip_high(args):g})"
        )


def _sequence_problems(args: LossArguments) -> Iterator[str]:
    if args.loss_type in ("cispo", "sapo"):
        yield (
            f"importance_sampling_level='sequence' with loss_type={args.loss_type!r}: its ratio is "
            "that of a token; use loss_type='grpo', 'dapo' or 'dr_grpo'"
        )
    if args.delta is not None:
        yield (
            f"delta={args.delta!r} with importance_sampling_level='sequence': the ratio of a "
            "sequence has no such bound; remove delta"
        )
    if args.beta and args.use_bias_correction_kl:
        yield (
            f"beta={args.beta!r} with importance_sampling_level='sequence': the divergence is "
            "weighed by the ratio of a token; set use_bias_correction_kl=False"
        )


def _weight_problems(args: LossArguments) -> Iterator[str]:
    mode = args.vllm_importance_sampling_mode
    low = args.vllm_importance_sampling_clip_min
    high = weight_high(args)
    if mode not in WEIGHTS:
        yield f"vllm_importance_sampling_mode={mode!r}: it is one of {', '.join(WEIGHTS)}"
    elif mode.endswith("truncate") and high is None:
        yield (
            f"vllm_importance_sampling_clip_max=None with {mode}: weights are cut from above; set "
            "it, or use a mask"
        )
    elif mode.endswith("truncate") and low is not None:
        yield (
            f"vllm_importance_sampling_clip_min={low!r} with {mode}: small weights are not lifted "
            "here; remove it, or use a mask"
        )
    elif low is not None and high is not None and low >= high:
        yield (
            f"vllm_importance_sampling_clip_min={low!r} must be less than "
            f"vllm_importance_sampling_clip_max={high!r}; lower it"
        )


def objective_options(args: LossArguments) -> dict[str, Any]:
    """Options of `[objective]`."""
    loss = LOSS_TYPES[args.loss_type]
    is_of_sequence = args.importance_sampling_level == "sequence"
    kind = "gspo" if is_of_sequence else loss.kind
    options: dict[str, Any] = {
        "kind": kind,
        "reduction": loss.reduction,
        "advantage": ADVANTAGES[scaling(args)],
        "kl": "unbiased" if args.use_bias_correction_kl else "k3",
        "kl_coefficient": float(args.beta),
        "entropy_coefficient": float(args.entropy_coef),
        "mask_truncated": bool(args.mask_truncated_completions),
    }
    match kind:
        case "sapo":
            options["tau_positive"] = float(args.sapo_temperature_pos)
            options["tau_negative"] = float(args.sapo_temperature_neg)
        case "decoupled_cispo":
            options["clip_low"] = 1.0
            options["clip_high"] = clip_high(args) - 1
        case _:
            options["clip_low"] = float(args.epsilon)
            options["clip_high"] = float(clip_high(args))
    if args.delta is not None:
        options["dual_clip"] = float(args.delta)
    if args.multi_objective_aggregation == "normalize_then_sum":
        options["normalise"] = "component"
        options["advantage"] = "grpo"
    return options


def correction_options(args: LossArguments) -> dict[str, Any]:
    """Options of `[correction]`. Where trl generates with the trainer's own model there is nothing
    to correct; with `max_staleness` there is, and our default weight does.
    """
    options: dict[str, Any] = {}
    if args.use_vllm and args.vllm_importance_sampling_correction:
        options = _weight(args)
    elif args.use_vllm or args.max_staleness == 0:
        options["weight"] = "off"
    if args.off_policy_mask_threshold is not None:
        options["opsm"] = float(args.off_policy_mask_threshold)
    return options


def _weight(args: LossArguments) -> dict[str, Any]:
    weight = WEIGHTS[args.vllm_importance_sampling_mode]
    high = weight_high(args)
    if weight in ("tis", "tis_sequence"):
        return {"weight": weight, "cap": high}
    low = args.vllm_importance_sampling_clip_min
    return {
        "weight": weight,
        "low": 0.0 if low is None else low,
        "high": NO_BOUND if high is None else high,
    }
