"""The model that people know, where the benches of it look for it; the files of `configs/` that
train it; and what makes their runs small.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "smollm2-135m"
SUMS, CALCULATOR, OWN = (
    ROOT / "configs" / f"pretrained-{name}.toml" for name in ("sums", "calculator", "own")
)

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
"""What makes of each run one of seconds, with a made model."""
TINY = (
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_layers=1",
    "model.max_context=512",
)


def midflight(*words: str, keeps: bool = False) -> str:
    """Runs a command from the folder of the checkout, where configurations find their files and
    tools. Waits for it; what ends the wait ends the command too, in order. Returns what it printed
    with `keeps`, else the terminal shows that."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    output = subprocess.PIPE if keeps else None
    process = subprocess.Popen(
        [sys.executable, "-m", "midflight", *words], cwd=ROOT, env=environ, stdout=output, text=True
    )
    try:
        said, _ = process.communicate()
    finally:
        process.terminate()  # does nothing to one that has ended
        process.wait()
    if process.returncode:
        raise SystemExit(
            f"midflight {words[0]} ended with {process.returncode}; the same command goes on from "
            "there."
        )
    return said or ""


def make_tiny(folder: Path) -> None:
    """A model that knows nothing, for a look at whether all of it runs."""
    if not folder.exists():
        midflight(
            "new-model", str(folder), *(word for setting in TINY for word in ("--set", setting))
        )
