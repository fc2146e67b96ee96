"""Engine, trainer and weights on a device that is not the CPU and refuses to be mixed with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = "tests/real/on_second_device.py"


@pytest.mark.timeout(900)
def test_all_that_computes_does_so_on_the_device_that_it_is_given(tmp_path: Path) -> None:
    """In a process of its own, because a process counts its devices when it computes its first gradient."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "--basetemp",
        str(tmp_path / "cases"),
        CASES,
    ]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
