"""A process for each part: its lines, its end, and the time of all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from midflight.cli import main
from midflight.run.device_check import check, child
from midflight.run.device_check.report import CheckedDevice, DeviceTrial, TrialOutcome
from midflight.run.device_check.table import PARTS, SERVER_SECONDS, SERVERS

ABOUT = CheckedDevice("a device", {"torch": "1"})
WORKS = DeviceTrial("a deed", TrialOutcome.WORKS, "done")
ROOT = Path(__file__).parents[3]
Script = Callable[[str], None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Gives the processes of parts a program of Python, in the place of ours. It has the part's name and seconds as words."""

    def given(program: str) -> None:
        def start(process: Any, errors: IO[bytes]) -> subprocess.Popen[bytes]:
            words = [sys.executable, "-c", program, process.part, str(process.seconds)]
            return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors)

        monkeypatch.setattr(check._PartProcess, "_start", start)

    yield given


def lines(*messages: CheckedDevice | DeviceTrial) -> str:
    said = b"\n".join(msgspec.json.encode(message) for message in messages).decode()
    return f"print({said!r}, flush=True)\n"


def test_every_part_has_its_trials_and_its_seconds() -> None:
    assert set(PARTS) == set(child.TRIALS)


SLOWEST_START = 118
"""Seconds until vLLM answered on an H200, beside other work."""
STARTS = 5
"""A server starts on one GPU: in two sizes, to sleep, and for two runs."""


def test_a_server_has_time_for_all_its_starts_and_texts_say_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(PARTS[name] == SERVER_SECONDS for name in SERVERS) and SERVER_SECONDS > STARTS * SLOWEST_START + 60
    assert main(["doctor", "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    minutes = f"{SERVER_SECONDS / 60:.0f}"
    assert f"up to {minutes} for each server" in help_text
    assert f"up to {minutes} for each server" in (ROOT / "docs/gpu.md").read_text()


def test_each_part_is_a_process_whose_trials_are_told_as_they_come(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "PARTS", {"one": 5.0, "two": 5.0})
    script(lines(ABOUT, WORKS))
    said: list[str] = []
    report = check.check_device("cpu", say=said.append)
    assert (report.device, report.title, report.versions) == ("cpu", "a device", {"torch": "1"})
    assert [(part.name, part.trials) for part in report.parts] == [("one", (WORKS,)), ("two", (WORKS,))]
    assert said == ["one", "  works: a deed: done", "two", "  works: a deed: done"]


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import os\nos.write(2, b'CUDA error: an illegal memory access\\n')\nos._exit(134)", "ended with status 134: CUDA error"),
        (
            "import faulthandler, time\nfaulthandler.dump_traceback_later(0.3, exit=True)\ndef waits():\n    time.sleep(60)\nwaits()",
            "did not end within 5 s: Timeout (0:00:00.300000)!",
        ),
    ],
)
def test_a_part_that_crashes_or_hangs_is_one_failure_beside_what_it_has_said(
    program: str, found: str, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "PARTS", {"one": 5.0})
    script(lines(ABOUT, WORKS) + program)
    (part,) = check.check_device("cpu").parts
    assert part.trials[0] == WORKS and part.trials[1].outcome is TrialOutcome.FAILED and found in part.trials[1].found


def test_a_process_that_does_not_even_end_itself_is_killed(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "PARTS", {"one": 0.1})
    monkeypatch.setattr(check, "GRACE_SECONDS", 0.4)
    monkeypatch.setattr(check, "LEAST_SECONDS", 0.0)
    script(lines(ABOUT, WORKS) + "import time\ntime.sleep(60)")
    (part,) = check.check_device("cpu").parts
    assert [trial.outcome for trial in part.trials] == [TrialOutcome.WORKS, TrialOutcome.FAILED] and part.seconds < 30


def test_what_comes_after_the_ten_minutes_is_said_as_not_tried_and_servers_have_their_own(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "PARTS", {"one": 5.0, "two": 5.0, "vLLM": 5.0})
    monkeypatch.setattr(check, "BUDGET_SECONDS", 10.05)
    script(lines(ABOUT, WORKS) + "import time\ntime.sleep(0.2)")
    first, second, server = check.check_device("cpu").parts
    assert first.trials == (WORKS,)
    assert [trial.line for trial in second.trials] == ["the 0 minutes of a check were over"]
    assert server.trials == (WORKS,)


def test_a_device_that_is_not_here_is_refused_by_name_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (
        ("cuda:63", "--device cuda:63 is not here: torch "),
        ("gpu", "--device gpu is no device; give cuda, cuda:1 or cpu."),
    ):
        assert main(["doctor", "--device", name]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
