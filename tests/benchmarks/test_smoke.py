"""Every benchmark runs: its smoke form, in processes of its own. What it measures so means nothing, and no test looks at it.

So does the one example that no other test runs as it is started by a reader.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.real.processes import children, gone

pytestmark = pytest.mark.timeout(300)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EXAMPLES = Path(__file__).parents[2] / "examples"
PARTS = {
    "delayed_environment",
    "gateway_sides",
    "gguf_float32",
    "handover_sides",
    "isolation_agents",
    "learning_report",
    "overlap_runs",
    "pretrained_model",
    "pretrained_report",
    "serving_generate",
    "smoke",
} | {f"training_{name}" for name in ("both", "ours", "reward", "trl")}
"""What other benchmarks run or import."""


def scripts() -> list[Path]:
    return [path for path in sorted(BENCHMARKS.glob("*.py")) if path.stem not in PARTS]


@pytest.mark.parametrize("script", scripts(), ids=lambda path: path.stem)
def test_a_benchmark_runs_in_its_smoke_form(script: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, script, "--smoke"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "it found nothing to say"


@pytest.mark.parametrize(
    "words", [("shards.py", "--seconds", "1"), ("handover.py", "--engines", "embedded", "--transports", "shared_memory")]
)
def test_a_benchmark_that_is_told_to_end_leaves_no_process(words: tuple[str, ...], tmp_path: Path) -> None:
    started = subprocess.Popen(
        [sys.executable, BENCHMARKS / words[0], *words[1:], "--rounds", "1000"], cwd=tmp_path, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while len(found := family(started.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1)
    found |= family(started.pid)
    started.terminate()
    assert started.wait(30) == 143 and len(found) >= 3
    assert gone(sorted(found), seconds=10)


def family(pid: int) -> set[int]:
    """It and all that it started."""
    return {pid}.union(*(family(child) for child in children(pid)))


def test_what_a_benchmark_consists_of_is_all_there() -> None:
    assert {path.stem for path in BENCHMARKS.glob("*.py")} >= PARTS


def test_the_example_in_one_file_learns(tmp_path: Path) -> None:
    """It says so itself: half a minute, from a few right answers to most."""
    done = subprocess.run([sys.executable, EXAMPLES / "one_file_grpo.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rewards = [float(reward) for reward in re.findall(r"mean reward (\S+)", done.stdout)]
    assert len(rewards) == 30 and sum(rewards[-5:]) > sum(rewards[:5])
