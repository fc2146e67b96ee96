"""Every benchmark runs: its smoke form, in processes of its own. What it measures so means nothing, and no test looks at it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PARTS = {"delayed_environment", "gateway_sides", "handover_sides", "learning_report", "overlap_runs", "smoke"} | {
    f"training_{name}" for name in ("both", "ours", "reward", "trl")
}
"""What other benchmarks run or import."""


def scripts() -> list[Path]:
    return [path for path in sorted(BENCHMARKS.glob("*.py")) if path.stem not in PARTS]


@pytest.mark.parametrize("script", scripts(), ids=lambda path: path.stem)
def test_a_benchmark_runs_in_its_smoke_form(script: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, script, "--smoke"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "it found nothing to say"


def test_what_a_benchmark_consists_of_is_all_there() -> None:
    assert {path.stem for path in BENCHMARKS.glob("*.py")} >= PARTS
