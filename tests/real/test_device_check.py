"""`midflight doctor --device`, whole: on the CPU, and on a second device that torch finds as it finds those of others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from midflight.run.device_check.report import DeviceReport, TrialOutcome
from midflight.run.device_check.table import PARTS

ROOT = Path(__file__).parents[2]
WITHOUT_SERVERS = {"MIDFLIGHT_VLLM_PYTHON": "", "MIDFLIGHT_SGLANG_PYTHON": ""}


def checked(device: str, folder: Path, **environ: str) -> DeviceReport:
    """The report of a check in which nothing failed. It runs in an empty folder, where no servers are found."""
    folder.mkdir()
    command = [sys.executable, "-m", "midflight", "doctor", "--device", device, "--report", "report"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [environ.pop("PYTHONPATH", "")])])
    whole = {**os.environ, **WITHOUT_SERVERS, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(command, cwd=folder, env=whole, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    (as_json,) = (folder / "report").glob("*.json")
    report = msgspec.json.decode(as_json.read_bytes(), type=DeviceReport)
    assert [part.name for part in report.parts] == [*PARTS] and all(part.trials for part in report.parts)
    assert (folder / "report" / f"{as_json.stem}.md").read_text().startswith(f"# What works on {device}")
    return report


def works(report: DeviceReport, name: str) -> int:
    (part,) = (part for part in report.parts if part.name == name)
    return sum(trial.outcome is TrialOutcome.WORKS for trial in part.trials)


@pytest.mark.timeout(900)
def test_every_path_that_a_cpu_has_works_and_the_others_say_why_not(tmp_path: Path) -> None:
    report = checked("cpu", tmp_path / "here")
    nothing = ("a version in two processes", "a whole run in real size")
    assert all(works(report, name) for name, plan in PARTS.items() if name not in nothing and not plan.server)
    left = {trial.what: trial.found for trial in report.trials(TrialOutcome.NOT_TRIED)}
    assert left["a step with compiled layers"] == "compiling for cpu takes minutes"
    assert left["vLLM asleep"].startswith("vLLM is not here: make engines")
    assert left["SGLang on two GPUs"].startswith("SGLang is not here: make engines")


@pytest.mark.timeout(900)
def test_the_same_command_works_on_another_device(tmp_path: Path) -> None:
    """Processes find it by torch's own entry point for devices of others."""
    package = tmp_path / "found" / "second_device-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: second-device\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nsecond = tests.second_device:here\n")
    report = checked("second:0", tmp_path / "there", PYTHONPATH=str(package.parent))
    nothing = ("two ranks", "a version in two processes", "a whole run", "a whole run in real size")
    assert all(works(report, name) for name, plan in PARTS.items() if name not in nothing and not plan.server)
    left = {trial.what: trial.found for trial in report.trials(TrialOutcome.NOT_TRIED)}
    assert left["midflight train"] == "a run computes on cpu or cuda, not second"
