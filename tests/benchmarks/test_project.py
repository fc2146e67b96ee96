"""What `midflight init` writes trains as it is, and its own test passes. Every night, because it takes a whole run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from midflight.cli.project import write_project

pytestmark = pytest.mark.timeout(300)
SMALL = ("run.steps=3", "warm_start.target_accuracy=none", "model.hidden_size=32", "model.num_layers=1", "rollout.groups_per_step=2")


def test_a_project_trains_and_its_own_test_passes(tmp_path: Path) -> None:
    write_project(tmp_path)
    sets = [word for override in SMALL for word in ("--set", override)]
    command = [sys.executable, "-m", "midflight", "train", "run.toml", *sets]
    trained = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())["steps"] == 3
    tested = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, capture_output=True, text=True)
    assert tested.returncode == 0 and "3 passed" in tested.stdout, tested.stdout + tested.stderr
