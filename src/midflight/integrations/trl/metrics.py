"""The numbers of a step under the names of trl 1.16's trainers. Numbers that we do not measure are
left out.
"""

from collections.abc import Mapping

from midflight.observe.lines import StepLine
from midflight.observe.metrics import metrics_of

SAME = {
    "train/rho/mean": "ratio",
    "train/rho/k3": "kl",
    "train/entropy/estimate": "entropy",
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/step/learning_rate": "learning_rate",
    "train/clip/low_share": "clip_ratio/low_mean",
    "train/clip/high_share": "clip_ratio/high_mean",
    "train/staleness_mean": "sample/staleness_mean",
    "train/staleness_max": "sample/staleness_max",
    "train/length_mean": "sample/trained_tokens_mean",
    "train/tokens": "batch/trained_tokens_per_step",
    "train/groups": "batch/groups_per_step",
    "train/step/micro_batches": "batch/microbatches_per_step",
    "train/step_seconds": "perf/step_s",
    "train/stage_seconds": "perf/weight_sync_transfer_s",
    "train/pause_seconds": "perf/weight_sync_pause_s",
    "train/tokens_per_second": "perf/trained_tok_s_wall_clock",
    "rollout/reward_mean": "reward",
    "rollout/reward_spread": "reward_std",
    "rollout/zero_spread_share": "frac_reward_zero_std",
    "rollout/length_mean": "completions/mean_length",
    "rollout/length_min": "completions/min_length",
    "rollout/length_max": "completions/max_length",
    "rollout/length_terminated_mean": "completions/mean_terminated_length",
    "rollout/length_terminated_min": "completions/min_terminated_length",
    "rollout/length_terminated_max": "completions/max_terminated_length",
    "rollout/clipped_ratio": "completions/clipped_ratio",
    "rollout/turns_mean": "rollout/turns_mean",
    "rollout/tokens_per_second": "rollout/generated_tok_s",
    "tools/call_frequency": "tools/call_frequency",
    "tools/failure_frequency": "tools/failure_frequency",
    "tools/seconds": "tools/latency_s",
    "tools/unknown": "tools/unknown_name_total",
    "tools/exhausted": "tools/loop_exhausted_frac",
}
"""Our names with trl's. The names of trl 1.18, which are GRPO's, are among them."""
ASYNCHRONOUS = ("sample/", "batch/", "perf/", "rollout/")
"""The beginnings of names that `GRPOTrainer` has not."""


def trl_metrics(line: StepLine, *, group_size: int) -> Mapping[str, float]:
    ours = metrics_of(line)
    found = {theirs: ours[mine] for mine, theirs in SAME.items() if mine in ours}
    for name, value in ours.items():
        if name.startswith("rollout/reward/"):
            found[f"rewards/{name.removeprefix('rollout/reward/')}"] = value
        elif name.startswith("tools/") and name.endswith("/seconds") and name != "tools/seconds":
            found[f"{name.removesuffix('/seconds')}/latency_s"] = value
    if line.groups is not None:
        found["batch/samples_per_step"] = float(line.groups * group_size)
    waits = line.waits or {}
    found["perf/rollout_wait_s"] = sum(
        seconds for who, seconds in waits.items() if who.startswith("trainer for ")
    )
    transfer = found.get("perf/weight_sync_transfer_s", 0.0)
    pause = found.get("perf/weight_sync_pause_s", 0.0)
    found["perf/weight_sync_s"] = transfer + pause
    found["sample/dropped_stale_total"] = float((line.dropped or {}).get("stale", 0))
    return found


def grpo_metrics(line: StepLine) -> Mapping[str, float]:
    """The names of `GRPOTrainer`. `kl` is left out: there it is the divergence from the reference,
    which is trained on and not measured. What reward functions measured has the names they gave.
    """
    ours = metrics_of(line)
    found: dict[str, float] = {}
    for mine, theirs in SAME.items():
        is_theirs = not theirs.startswith(ASYNCHRONOUS) and theirs not in ("kl", "ratio")
        if mine in ours and is_theirs:
            found[theirs] = ours[mine]
    for name, value in ours.items():
        if name.startswith("rollout/reward/"):
            found[f"rewards/{name.removeprefix('rollout/reward/')}/mean"] = value
    for name, value in (line.metrics or {}).items():
        if not name.startswith(("tools/", "rewards/")):
            found[name] = value
    low = found.get("clip_ratio/low_mean")
    high = found.get("clip_ratio/high_mean")
    if low is not None and high is not None:
        found["clip_ratio/region_mean"] = low + high
    found["step_time"] = line.step_seconds
    return found
