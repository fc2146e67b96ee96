"""Numbers of the journal under the names that dashboards group by."""

from __future__ import annotations

from midflight.observe.lines import AlarmLine, EvaluationLine, StepLine
from midflight.observe.metrics import metrics_of
from midflight.observe.status import Totals

STEP = {"step": 3, "version": 3, "seconds": 9.0, "step_seconds": 0.5, "tokens": 40, "generation_rate": 8.0, "training_rate": 6.0}


def test_lengths_clips_spreads_failures_and_tools_have_the_names_of_their_sides() -> None:
    metrics = {
        "tools/calls": 2.0,
        "tools/failures": 0.5,
        "tools/seconds": 1.0,
        "tools/add/calls": 2.0,
        "tools/add/failures": 0.5,
        "tools/mul/calls": 0.0,
        "tools/unknown": 0.25,
        "fields/tries": 3.0,
    }
    line = StepLine(
        **STEP,  # type: ignore[arg-type]
        rollouts=8,
        reward=0.5,
        zero_spread_share=0.25,
        generated_length=12.0,
        truncated_share=0.125,
        lengths={"min": 4.0, "max": 30.0},
        failures={"ToolError": 2},
        components={"correct": 0.5},
        metrics=metrics,
        trainer={"grad_norm": 0.7, "rho/k3": None},
        totals=Totals(),
    )
    found = metrics_of(line)
    assert {name: found[name] for name in ("train/grad_norm", "train/tokens", "rollout/length_mean", "rollout/clipped_ratio")} == {
        "train/grad_norm": 0.7,
        "train/tokens": 40,
        "rollout/length_mean": 12.0,
        "rollout/clipped_ratio": 0.125,
    }
    assert (found["rollout/length_max"], found["rollout/zero_spread_share"], found["rollout/num_failed"]) == (30.0, 0.25, 2)
    assert (found["rollout/reward/correct"], found["rollout/fields/tries"]) == (0.5, 3.0)
    assert (found["tools/call_frequency"], found["tools/failure_frequency"], found["tools/seconds"]) == (2.0, 0.25, 0.5)
    assert found["tools/add/failure_frequency"] == 0.25 and "tools/mul/failure_frequency" not in found and found["tools/unknown"] == 0.25
    assert "train/rho/k3" not in found and "rollout/turns_mean" not in found, "what is not known is no number"
    assert {name.partition("/")[0] for name in found} == {"train", "rollout", "tools"}


def test_an_evaluation_has_the_name_of_its_source_and_alarms_have_no_numbers() -> None:
    score = EvaluationLine(version=4, step=4, seconds=1.0, source="spell", num_tasks=7, mean_reward=0.5, num_failed=1)
    assert metrics_of(score) == {"eval/spell/reward": 0.5, "eval/spell/num_tasks": 7.0, "eval/spell/num_failed": 1.0}
    assert metrics_of(AlarmLine(version=1, step=1, seconds=1.0, name="failure", text="x")) == {}
