"""SmolLM2 is trained in each way that a model can be trained: a few steps of each, as `benchmarks/ways.py` measures them."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from ways import WAYS, Outcome, memory_table, run_way

STEPS = 3
BFLOAT16 = {"bfloat16", "served", "computed"}
GAPS = {"float32": 3e-5, "bfloat16": 0.1}
"""Nats, in the mean of a step: five times what was measured in float32, twice in bfloat16."""
LEAST_MOVED = {"bfloat16": 0.0, "lora": 0.7}
"""The share of the numbers of the exported model that steps change, where it is not nearly all. Steps are too small for most weights in bfloat16."""


@pytest.mark.parametrize("name", [way.name for way in WAYS])
def test_a_way_goes_through_and_moves_the_weights(name: str, fetched: tuple[Path, str], tmp_path: Path) -> None:
    (way,) = [each for each in WAYS if each.name == name]
    outcome = run_way(way, fetched[0], tmp_path / "run", steps=STEPS)
    print(f"\n{memory_table(outcome)}\n{outcome.cells}")
    check_steps(outcome)
    check_precision(outcome)
    assert outcome.moved > LEAST_MOVED.get(name, 0.95)
    for kind, estimate in outcome.estimated.items():
        assert 0.85 < estimate.share_of(outcome.measured[kind]) < 1.15, f"{kind}\n{memory_table(outcome)}"
    if name == "own":
        assert set(outcome.steps[-1]["components"]) == {"ends_right", "short"}
    if name == "lora":
        assert list((tmp_path / "run" / "adapter").glob("*.safetensors"))
    shutil.rmtree(tmp_path / "run")  # gigabytes, which pytest would keep


def check_steps(outcome: Outcome) -> None:
    """All were made, of answers to all requests, and some had something to learn from."""
    summary = outcome.summary
    assert (summary["steps"], summary["failed_requests"], summary["failed_rollouts"]) == (STEPS, 0, 0), outcome.said
    trained = [step["trainer"] for step in outcome.steps]
    assert len(trained) == STEPS
    assert all(math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in trained), trained
    assert any(step["grad_norm"] > 0 for step in trained), trained
    assert not any(step["step/updates_skipped"] for step in trained), trained


def check_precision(outcome: Outcome) -> None:
    """Engine and trainer computed alike, as far as they were told to."""
    bound = GAPS["bfloat16" if outcome.way.name in BFLOAT16 else "float32"]
    assert outcome.gap < bound, outcome.steps
    assert all(abs(step["trainer"]["rho/k1"]) < 0.1 for step in outcome.steps), outcome.steps
