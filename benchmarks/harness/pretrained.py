"""The model that people know, the configurations that train it, and what makes their runs small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.processes import ROOT, end, environment
from harness.runs import sets

MODEL = ROOT / "models" / "smollm2-135m"
SUMS = ROOT / "configs" / "pretrained-sums.toml"
CALCULATOR = ROOT / "configs" / "pretrained-calculator.toml"
OWN = ROOT / "configs" / "pretrained-own.toml"
SMALL = (
    "run.steps=2",
    "model.max_context=512",
    "environment.max_tokens=8",
    "environment.sources.0.size=40",
    "environment.sources.0.heldout=4",
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
    "warm_start.max_steps=1",
)
"""The settings with which each run takes seconds, with a made model."""
TINY = (
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_layers=1",
    "model.max_context=512",
)


def midflight(*words: str, keeps: bool = False) -> str:
    """Runs a command from the folder of the checkout, where configurations find their files and
    tools. Waits for it; if the wait ends before, the command ends too, in order. With `keeps` it
    returns what the command printed, else the terminal shows that.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "midflight", *words],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE if keeps else None,
        text=True,
    )
    try:
        said, _ = process.communicate()
    finally:
        end(process)
    if process.returncode:
        raise SystemExit(
            f"midflight {words[0]} ended with {process.returncode}; the same command goes on from "
            "there."
        )
    return said or ""


def require_model(folder: Path, *, makes_tiny: bool) -> None:
    """`SystemExit` where there is no model. With `makes_tiny` one that knows nothing is made, to
    see whether everything runs.
    """
    if makes_tiny and not folder.exists():
        midflight("new-model", str(folder), *sets(TINY))
    if not folder.exists():
        raise SystemExit(
            f"there is no model in {folder}: midflight fetch-model smollm2-135m {folder}"
        )
