"""The report on a device: as JSON, as a page, and what a command prints."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from midflight.cli import main
from midflight.run.device_check import check
from midflight.run.device_check.report import DeviceReport, DeviceTrial, Part, TrialOutcome, page, write_report

WORKS = DeviceTrial("a copy", TrialOutcome.WORKS, "2 GB/s", "3 GB/s that memory allows")
FAILED = DeviceTrial("a swap", TrialOutcome.FAILED, "all tokens are of one version", remedy='set rollout.pause_mode = "recompute"')
LEFT = DeviceTrial("NCCL", TrialOutcome.NOT_TRIED, "one GPU is here")
REPORT = DeviceReport(
    "cuda:1",
    "A | GPU",
    "2026-11-26T12:00+00:00",
    {"torch": "2.13.0"},
    61.0,
    (Part("speeds", (WORKS, LEFT), 3.0), Part("versions", (FAILED,), 4.0)),
)


def test_a_report_is_a_json_file_that_reads_back_and_a_page_that_leads_with_what_failed(tmp_path: Path) -> None:
    as_json, as_page = write_report(REPORT, tmp_path / "there")
    assert (as_json.name, as_page.name) == ("doctor-cuda-1.json", "doctor-cuda-1.md")
    assert msgspec.json.decode(as_json.read_bytes(), type=DeviceReport) == REPORT
    text = as_page.read_text()
    assert text == page(REPORT)
    assert "1 of 2 things that were tried on cuda:1 work, 1 failed, 1 could not be tried on this machine." in text
    failures = text.index("## What failed, and what avoids it")
    row = '| a swap | all tokens are of one version | set rollout.pause_mode = "recompute" |'
    assert failures < text.index(row) < text.index("## speeds")
    assert "| NCCL | not tried | one GPU is here |  |" in text and "A \\| GPU" in text and "| took | 1 min 01 s |" in text


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        (WORKS, "2 GB/s, of 3 GB/s that memory allows"),
        (FAILED, 'all tokens are of one version; set rollout.pause_mode = "recompute"'),
        (LEFT, "one GPU is here"),
        (DeviceTrial("a", TrialOutcome.FAILED, "one\ntwo", remedy="b"), "one; b"),
    ],
)
def test_a_trial_is_one_sentence(trial: DeviceTrial, said: str) -> None:
    assert trial.line == said


@pytest.mark.parametrize(("parts", "status"), [(REPORT.parts, 1), (REPORT.parts[:1], 0)])
def test_the_command_is_status_1_where_anything_failed(
    parts: tuple[Part, ...], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "check_device", lambda device, say: msgspec.structs.replace(REPORT, device=device, parts=parts))
    assert main(["doctor", "--device", "cuda:1", "--report", str(tmp_path)]) == status
    printed = capsys.readouterr().out
    assert str(tmp_path / "doctor-cuda-1.md") in printed and ("failed: a swap: all tokens" in printed) == bool(status)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.toml"], "run.toml is of a run, and --device looks at a device"),
        (["--set", "engine.count=2"], "--set is of a run, and --device looks at a device"),
    ],
)
def test_a_device_is_looked_at_without_a_run(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", *words]) == 2
    assert said in capsys.readouterr().err
