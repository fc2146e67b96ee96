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
    #: `rollout/num_failed`, `rollout/num_groups_dropped`: Tries without a reward (`failures`: by class
    #: of error), and groups dropped (`dropped`: by reason). Healthy: near 0; 0 without
    #: `rollout.drop_zero_spread`.
    "rollout/num_failed": "failures",
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
    #: `eval/<source>/reward`, `eval/<source>/num_tasks`, `eval/<source>/num_failed`,
    #: `eval/<source>/<name>`: What `mean_reward`, `num_tasks`, `num_failed` and `at` of an
    #: evaluation's line say. Healthy: rises; at most 5 % failed.
    yield f"eval/{line.source}/reward", line.mean_reward
    yield f"eval/{line.source}/num_tasks", line.num_tasks
    yield f"eval/{line.source}/num_failed", line.num_failed
    for name, value in (line.at or {}).items():
        yield f"eval/{line.source}/{name}", value


def _measured(line: StepLine) -> Pairs:
    """The numbers that environments measured. Of a tool, the frequency of calls is per rollout,
    that of failures per call; seconds are per call.
    """
    measured = line.metrics or {}
    for name, value in measured.items():
        if not name.startswith("tools/"):
            #: `rollout/<measured>`: Mean of each number that environments measured, over the rollouts
            #: that have it (in `metrics`, with those of tools). Numbers among fields are `fields/NAME`.
            yield f"rollout/{name}", value
        elif name in ("tools/unknown", "tools/exhausted"):
            #: `tools/call_frequency`, `tools/unknown`: Mean calls of a rollout to all tools, and to
            #: unknown ones. Healthy: 0 unknown.
            #: `tools/exhausted`: Rollouts that `environment.max_turns` ended while tools were called
            #: (share). Healthy: below 0.1.
            yield name, value
        elif name.endswith("/calls"):
            tool = name.removesuffix("/calls")
            #: `tools/failure_frequency`, `tools/seconds`: Failed calls over calls (share), and mean
            #: seconds of a call. Healthy: below 0.1; well below `environment.tool_seconds`.
            #: `tools/<name>/<reading>`: `call_frequency`, `failure_frequency` and `seconds` of one
            #: tool.
            yield f"{tool}/call_frequency", value
            if value:
                yield f"{tool}/failure_frequency", measured.get(f"{tool}/failures", 0.0) / value
                yield f"{tool}/seconds", measured.get(f"{tool}/seconds", 0.0) / value
