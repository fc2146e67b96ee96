"""Every benchmark runs: its smoke form, in processes of its own. What it measures so means nothing, and no test looks at it.

So does the one example that no other test runs as it is started by a reader.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.real.processes import children, gone

pytestmark = pytest.mark.timeout(300)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EXAMPLES = Path(__file__).parents[2] / "examples"
FIGURES = tomllib.loads((BENCHMARKS / "figures.toml").read_text())["commands"]
OTHERS = re.compile(r" / (vllm|midflight)$|trl's time")
"""Figures beside programs of other people, which the smoke form does not start."""


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_runs_in_its_smoke_form(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, script, "--smoke", "--json", tmp_path / "found.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) > 2, "it found nothing to say"
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["machine"] in done.stdout
    assert without_sizes(committed(script.name)) <= without_sizes(found["figures"])


def committed(script: str) -> list[str]:
    """The names of its figures that the smoke form measures too."""
    names: list[str] = []
    for entry in FIGURES:
        if entry["command"].startswith(script):
            names += [name for name in entry["figures"] if not OTHERS.search(name)]
    return names


def without_sizes(names: Iterable[str]) -> set[str]:
    """The smoke form has fewer requests, and shapes of its own."""
    return {re.sub(r"\d+|equal|smoke", "", name) for name in names}


@pytest.mark.parametrize(
    "words", [("gateway.py", "--parts", "shards", "--seconds", "1"), ("handover.py", "--engines", "embedded", "--transports", "pull")]
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


@pytest.mark.parametrize("transport", ["file", "collective"])
def test_a_transport_that_went_is_refused_by_name_with_those_that_are_there(transport: str, tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "handover.py", "--transports", transport]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and f"'{transport}'" in done.stderr
    assert all(name in done.stderr for name in ("shared_memory", "pull", "direct"))


def test_the_example_in_one_file_learns(tmp_path: Path) -> None:
    """It says so itself: half a minute, from a few right answers to most."""
    done = subprocess.run([sys.executable, EXAMPLES / "one_file_grpo.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rewards = [float(reward) for reward in re.findall(r"mean reward (\S+)", done.stdout)]
    assert len(rewards) == 30 and sum(rewards[-5:]) > sum(rewards[:5])
