"""The numbers of a journal under the names that dashboards group by: `train/`, `rollout/`, `tools/`
and `eval/`. docs/metrics.md has the list.
"""

from collections.abc import Iterator
from itertools import chain

from midflight.observe.lines import EvaluationLine, Line, StepLine


def named(line: Line) -> dict[str, float]:
    """Returns the numbers of a step, or of one source in an evaluation. Other lines have none.
    Numbers that were not measured, or are not finite, are left out.
    """
    match line:
        case StepLine():
            found = chain(_train(line), _rollout(line), _tools(line))
        case EvaluationLine():
            found = _evaluation(line)
        case _:
            return {}
    return {name: float(value) for name, value in found if value is not None}


Pairs = Iterator[tuple[str, float | None]]


def _train(line: StepLine) -> Pairs:
    yield "train/step_seconds", line.step_seconds
    yield "train/tokens", line.tokens
    yield "train/groups", line.groups
    yield "train/length_mean", line.trained_length
    yield "train/staleness_mean", line.staleness_mean
    yield "train/staleness_max", line.staleness_max
    yield "train/tokens_per_second", line.training_rate
    yield "train/stage_seconds", line.stage_seconds
    yield "train/pause_seconds", line.pause_seconds
    yield from ((f"train/{name}", value) for name, value in (line.trainer or {}).items())


def _rollout(line: StepLine) -> Pairs:
    yield "rollout/reward_mean", line.reward
    yield "rollout/reward_spread", line.reward_spread
    yield "rollout/zero_spread_share", line.zero_spread_share
    yield "rollout/num_rollouts", line.rollouts
    yield "rollout/num_failed", sum((line.failures or {}).values())
    yield "rollout/num_groups_dropped", sum((line.dropped or {}).values())
    yield "rollout/length_mean", line.generated_length
    yield from ((f"rollout/length_{name}", value) for name, value in (line.lengths or {}).items())
    yield "rollout/clipped_ratio", line.truncated_share
    yield "rollout/turns_mean", line.turns_mean
    yield "rollout/tokens_per_second", line.generation_rate
    yield from ((f"curriculum/{name}", value) for name, value in (line.curriculum or {}).items())
    yield from (
        (f"rollout/reward/{name}", value) for name, value in (line.components or {}).items()
    )
    yield from (
        (f"rollout/{name}", value)
        for name, value in (line.metrics or {}).items()
        if not name.startswith("tools/")
    )


def _evaluation(line: EvaluationLine) -> Pairs:
    yield f"eval/{line.source}/reward", line.mean_reward
    yield f"eval/{line.source}/num_tasks", line.num_tasks
    yield f"eval/{line.source}/num_failed", line.num_failed
    for name, value in (line.at or {}).items():
        yield f"eval/{line.source}/{name}", value


def _tools(line: StepLine) -> Pairs:
    """The frequency of calls is per rollout, that of failures per call; seconds are per call."""
    measured = line.metrics or {}
    for name, calls in measured.items():
        if name.startswith("tools/") and name.endswith("/calls"):
            tool = name.removesuffix("/calls")
            yield f"{tool}/call_frequency", calls
            if calls:
                yield f"{tool}/failure_frequency", measured.get(f"{tool}/failures", 0.0) / calls
                yield f"{tool}/seconds", measured.get(f"{tool}/seconds", 0.0) / calls
    yield from (
        (name, value)
        for name, value in measured.items()
        if name in ("tools/unknown", "tools/exhausted")
    )
