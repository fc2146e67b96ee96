"""The numbers of a journal under the names that dashboards group by: `train/`, `rollout/`, `tools/`
and `eval/`.

The comment `#:` before a name says what it means. A name of a field means what the field does.
docs/metrics.md is made of both.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from midflight.observe.lines import EvaluationLine, Line, StepLine

STEP = {
    "train/step_seconds": "step_seconds",
    "train/tokens": "tokens",
    "train/groups": "groups",
    "train/length_mean": "trained_length",
    "train/staleness_mean": "staleness_mean",
    "train/staleness_max": "staleness_max",
    "train/tokens_per_second": "training_rate",
    "train/stage_seconds": "stage_seconds",
    "train/pause_seconds": "pause_seconds",
    "rollout/reward_mean": "reward",
    "rollout/reward_spread": "reward_spread",
    "rollout/zero_spread_share": "zero_spread_share",
    "rollout/num_rollouts": "rollouts",
    "rollout/length_mean": "generated_length",
    "rollout/clipped_ratio": "truncated_share",
    "rollout/turns_mean": "turns_mean",
    "rollout/tokens_per_second": "generation_rate",
}
"""The names of fields of a step's line."""

FAMILIES = {
    "train/": "trainer",
    "rollout/length_": "lengths",
    "rollout/reward/": "components",
    "curriculum/": "curriculum",
}
"""The beginnings of the names of what fields hold by names of their own."""

SUMS = {
    #: Tries without a reward. Healthy: near 0.
    "rollout/num_failed": "failures",
    #: Groups dropped. Healthy: 0 without `rollout.drop_zero_spread`.
    "rollout/num_groups_dropped": "dropped",
}
"""The names of sums over fields that count by class or reason."""


def metrics_of(line: Line) -> dict[str, float]:
    """Returns the numbers of a step, or of one source in an evaluation. Other lines have none.
    Numbers that were not measured, or are not finite, are left out.
    """
    match line:
        case StepLine():
            found = chain(_step(line), _measured(line))
        case EvaluationLine():
            found = _evaluation(line)
        case _:
            return {}
    return {name: float(value) for name, value in found if value is not None}


def points_of(lines: Iterable[StepLine | EvaluationLine], name: str) -> list[tuple[float, float]]:
    """The step and the value of a name, for each line that has it."""
    points: list[tuple[float, float]] = []
    for line in lines:
        values = metrics_of(line)
        if name in values:
            points.append((line.step, values[name]))
    return points


Pairs = Iterator[tuple[str, float | None]]


def _step(line: StepLine) -> Pairs:
    for name, field in STEP.items():
        yield name, getattr(line, field)
    for name, field in SUMS.items():
        yield name, sum((getattr(line, field) or {}).values())
    for beginning, field in FAMILIES.items():
        for name, value in (getattr(line, field) or {}).items():
            yield f"{beginning}{name}", value


def _evaluation(line: EvaluationLine) -> Pairs:
    #: Mean reward of the held-out tasks that were scored. Healthy: rises.
    yield f"eval/{line.source}/reward", line.mean_reward
    #: Held-out tasks that were scored.
    yield f"eval/{line.source}/num_tasks", line.num_tasks
    #: Held-out tasks without a score. Healthy: at most 5 %.
    yield f"eval/{line.source}/num_failed", line.num_failed
    for name, value in (line.at or {}).items():
        #: Of a suite: `samples`, `temperature`, `pass@k` and `best@k`.
        yield f"eval/{line.source}/{name}", value


def _measured(line: StepLine) -> Pairs:
    """The numbers that environments measured. Of a tool, the frequency of calls is per rollout,
    that of failures per call; seconds are per call.
    """
    measured = line.metrics or {}
    for name, value in measured.items():
        if not name.startswith("tools/"):
            #: `rollout/<measured>`: Mean of what environments measured; numbers among fields are
            #: `fields/NAME`.
            yield f"rollout/{name}", value
        elif name in ("tools/unknown", "tools/exhausted"):
            #: `tools/unknown`: Mean calls of a rollout to unknown tools. Healthy: 0.
            #: `tools/exhausted`: Rollouts that `environment.max_turns` ended while tools were called
            #: (share). Healthy: below 0.1.
            yield name, value
        elif name.endswith("/calls"):
            tool = name.removesuffix("/calls")
            #: `tools/call_frequency`: Mean calls of a rollout.
            #: `tools/<name>/<reading>`: `call_frequency`, `failure_frequency` and `seconds` of one
            #: tool.
            yield f"{tool}/call_frequency", value
            if value:
                #: `tools/failure_frequency`: Failed calls over calls (share). Healthy: below 0.1.
                yield f"{tool}/failure_frequency", measured.get(f"{tool}/failures", 0.0) / value
                #: `tools/seconds`: Mean seconds of a call (s). Healthy: well below
                #: `environment.tool_seconds`.
                yield f"{tool}/seconds", measured.get(f"{tool}/seconds", 0.0) / value
