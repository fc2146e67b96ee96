"""A process for each part: its lines, its end, what it leaves, and what runs beside it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from midflight.cli import main
from midflight.run.device_check import check, child, lanes, part_process
from midflight.run.device_check.bench import REAL
from midflight.run.device_check.lanes import Lanes, PartStart, in_order
from midflight.run.device_check.report import CheckedDevice, DeviceReport, DeviceTrial, TrialOutcome
from midflight.run.device_check.table import FIRST, GIB, PARTS, SERVER_SECONDS, PartPlan
from midflight.weights.transports.memory_files import shared_places

ABOUT = CheckedDevice("a device", {"torch": "1"})
WORKS = DeviceTrial("a deed", TrialOutcome.WORKS, "done")
SHORT = PartPlan(seconds=5.0)
ALONE = PartPlan(seconds=5.0, is_alone=True)
Script = Callable[..., None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Gives the processes of parts a program of Python, in the place of ours, and a plan. The program has the part's name and its room
    as words.
    """

    def given(program: str, **plans: PartPlan) -> None:
        async def start(process: Any, errors: IO[bytes]) -> Any:
            words = [sys.executable, "-c", program, process.start.part, str(process.start.room), str(process.scratch)]
            return await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE, stderr=errors)

        monkeypatch.setattr(part_process.PartProcess, "_start", start)
        whole = {name.replace("_", " "): plan for name, plan in plans.items()}
        monkeypatch.setattr(check, "PARTS", whole)
        monkeypatch.setattr(check, "FIRST", next(iter(whole)))
        monkeypatch.setattr(part_process, "segment_prefix", lambda scratch, part: f"{scratch.name}-{part}-")

    yield given


def lines(*messages: CheckedDevice | DeviceTrial) -> str:
    said = b"\n".join(msgspec.json.encode(message) for message in messages).decode()
    return f"print({said!r}, flush=True)\n"


def test_every_part_has_its_trials_and_trials_in_real_size_their_memory() -> None:
    assert set(PARTS) == set(child.TRIALS)
    assert next(iter(PARTS)) == FIRST and PARTS[FIRST].is_alone
    for name in ("kernels of the trainer", "kernels of the embedded engine", "versions in mid-answer"):
        assert PARTS[name].gigabytes * GIB >= REAL.needs
    for name in PARTS:
        assert PARTS[name].is_alone or "real size" not in name


SLOWEST_START = 118
"""Seconds until vLLM answered on an H200, beside other work."""
MOST_STARTS = 2
"""A server starts so often in one part: on two GPUs."""


def test_a_servers_part_has_time_for_its_starts() -> None:
    servers = [plan for plan in PARTS.values() if plan.server]
    assert len(servers) == 12 and {plan.seconds for plan in servers} == {SERVER_SECONDS}
    assert SERVER_SECONDS > MOST_STARTS * SLOWEST_START + 60


# --- What begins when -----------------------------------------------------------------------------


def begun(state: Lanes) -> Sequence[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    while (start := state.next()) is not None:
        found.append((start.part, start.lane))
    return found


def test_a_part_begins_when_a_lane_and_its_memory_are_free_and_a_smaller_one_passes_one_that_waits() -> None:
    plans = {
        "server": PartPlan(gigabytes=10),
        "large": PartPlan(gigabytes=20),
        "small": PartPlan(gigabytes=4),
        "other": PartPlan(gigabytes=4),
    }
    state = Lanes([*plans], plans, number=3, memory=24 * GIB)
    assert begun(state) == [("server", 1), ("small", 2), ("other", 3)]
    state.end(PartStart("small", 2, 4 * GIB))
    assert begun(state) == []
    state.end(PartStart("server", 1, 10 * GIB))
    assert begun(state) == [("large", 1)]


def test_a_part_that_is_larger_than_the_device_has_all_of_it_and_where_nobody_counts_memory_every_part_fits() -> None:
    plans = {"large": PartPlan(gigabytes=20), "small": PartPlan(gigabytes=4), "alone": ALONE}
    state = Lanes(["large", "small"], plans, number=4, memory=8 * GIB)
    assert state.next() == PartStart("large", 1, 8 * GIB) and state.next() is None
    assert Lanes(["alone"], plans, number=1, memory=8 * GIB).next() == PartStart("alone", 1, 8 * GIB)
    assert begun(Lanes(["large", "small"], plans, number=4, memory=0)) == [("large", 1), ("small", 2)]


def test_servers_of_one_kind_run_side_by_side_on_a_gpu_of_eighty_gigabytes_and_ours_beside_them() -> None:
    here = {name: plan for name, plan in PARTS.items() if plan.server != "sglang" and "two GPUs" not in name}
    state = Lanes(in_order(here), PARTS, number=8, memory=78 * GIB)
    together = [part for part, _ in begun(state)]
    assert together[:5] == ["vLLM", "vLLM asleep", "vLLM in a run", "vLLM in a deterministic run", "kernels of the trainer"]
    assert len(together) == 8


def test_two_parts_run_side_by_side_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, number in ((1, 2), (2, 2), (16, 8)):
        monkeypatch.setattr(lanes.os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert lanes.num_lanes() == number


# --- Parts as processes ---------------------------------------------------------------------------


def test_each_part_is_a_process_whose_trials_are_told_as_they_come(script: Script) -> None:
    script(lines(ABOUT, WORKS), one=ALONE, two=SHORT)
    said: list[str] = []
    report = check.check_device("cpu", say=said.append)
    assert (report.device, report.title, report.versions) == ("cpu", "a device", {"torch": "1"})
    assert [(part.name, part.trials) for part in report.parts] == [("one", (WORKS,)), ("two", (WORKS,))]
    of_one = ["alone: one: begins", "alone: one: works: a deed: done", "alone: one: ended after 0 s"]
    of_two = ["lane 1: two: begins", "lane 1: two: works: a deed: done", "lane 1: two: ended after 0 s"]
    assert said == of_one + of_two


MEETS = """
import sys, time
from pathlib import Path
part, room, scratch = sys.argv[1:]
here = Path(scratch)
def wait_for(name):
    until = time.monotonic() + 20
    while not (here / name).exists():
        assert time.monotonic() < until, f"{part} waited for {name} in vain"
        time.sleep(0.01)
(here / part).touch()
if part == "a":
    wait_for("b")
if part == "b":
    wait_for("a")
if part == "dead":
    sys.exit(3)
if part in ("fast", "slow"):
    assert (here / "a").exists() and (here / "b").exists()
"""


def test_parts_meet_side_by_side_and_those_that_measure_come_after_them_in_a_report_of_one_order(script: Script) -> None:
    script(lines(ABOUT, WORKS) + MEETS, first=ALONE, fast=ALONE, dead=SHORT, a=PartPlan(), b=PartPlan(), slow=ALONE)
    said: list[str] = []
    report = check.check_device("cpu", say=said.append)
    assert [part.name for part in report.parts] == ["first", "fast", "dead", "a", "b", "slow"]
    failed = [part.name for part in report.parts for trial in part.trials if trial.outcome is TrialOutcome.FAILED]
    assert failed == ["dead"], report
    begins = [line for line in said if line.endswith("begins")]
    assert begins[0] == "alone: first: begins" and begins[-2:] == ["alone: fast: begins", "alone: slow: begins"]
    assert said.index("alone: fast: ended after 0 s") < said.index("alone: slow: begins")


def test_a_part_has_the_memory_that_the_first_one_found_free(script: Script) -> None:
    about = msgspec.structs.replace(ABOUT, memory=30 * GIB)
    tells = "import sys\nif sys.argv[2] != '0':\n    sys.stderr.write(sys.argv[2])\n    sys.exit(1)"
    script(lines(about) + tells, first=ALONE, large=PartPlan(gigabytes=20), larger=PartPlan(gigabytes=40), last=ALONE)
    rooms = {part.name: part.trials[0].found.rpartition(" ")[2].strip() for part in check.check_device("cuda").parts if part.trials}
    assert rooms == {"large": str(20 * GIB), "larger": str(30 * GIB), "last": str(30 * GIB)}


def test_a_server_that_is_not_here_takes_no_process(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "why_absent", lambda kind: f"{kind} is not here" if kind == "sglang" else "")
    script(lines(ABOUT, WORKS), first=ALONE, ours=PartPlan(server="vllm"), theirs=PartPlan(server="sglang"))
    first, ours, theirs = check.check_device("cpu").parts
    assert first.trials == ours.trials == (WORKS,)
    assert theirs.trials == (DeviceTrial("theirs", TrialOutcome.NOT_TRIED, "sglang is not here"),)


# --- Ends -----------------------------------------------------------------------------------------


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
def test_a_part_that_crashes_or_hangs_is_one_failure_beside_what_it_has_said(program: str, found: str, script: Script) -> None:
    script(lines(ABOUT, WORKS) + program, one=ALONE)
    (part,) = check.check_device("cpu").parts
    assert part.trials[0] == WORKS and part.trials[1].outcome is TrialOutcome.FAILED and found in part.trials[1].found


LEAVES = """
import pathlib, sys, time
prefix = pathlib.Path(sys.argv[3]).name + "-" + sys.argv[1] + "-"
for place in PLACES:
    (pathlib.Path(place) / f"run-{prefix}1.weights").touch()
    (pathlib.Path(place) / f"{prefix}2").mkdir()
    (pathlib.Path(place) / f"{prefix}2" / "model.safetensors").touch()
if sys.argv[1] == "late":
    time.sleep(60)
"""


def test_a_process_that_does_not_even_end_itself_is_killed_and_its_shared_memory_is_removed(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    monkeypatch.setattr(part_process, "shared_places", lambda: [tmp_path / "files"])
    monkeypatch.setattr(part_process, "GRACE_SECONDS", 0.9)
    kept = tmp_path / "files" / "another-run-1.weights"
    kept.touch()
    places = f"PLACES = {[str(tmp_path / 'files')]!r}\n"
    script(lines(ABOUT, WORKS) + places + LEAVES, first=ALONE, late=PartPlan(seconds=0.1))
    said: list[str] = []
    left: list[Sequence[Path]] = []

    def say(line: str) -> None:
        said.append(line)
        if line.endswith("s") and "ended after" in line:
            left.append([*(tmp_path / "files").iterdir()])

    began = time.monotonic()
    _, part = check.check_device("cpu", say=say).parts
    assert [trial.outcome for trial in part.trials] == [TrialOutcome.WORKS, TrialOutcome.FAILED] and time.monotonic() - began < 30
    assert "and was killed" in part.trials[1].found
    assert left == [[kept], [kept]]


def test_shared_memory_of_the_check_lies_where_it_is_looked_for(tmp_path: Path) -> None:
    assert part_process.shared_places is shared_places
    name = child.segment_prefix(tmp_path, "speeds")
    assert name.startswith(tmp_path.name) and name.endswith("-")
    assert len({child.segment_prefix(tmp_path, part) for part in PARTS}) == len(PARTS)


def test_a_device_that_is_not_here_is_refused_by_name_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (
        ("cuda:63", "--device cuda:63 is not here: torch "),
        ("gpu", "--device gpu is no device; give cuda, cuda:1 or cpu."),
    ):
        assert main(["doctor", "--device", name]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_a_device_that_goes_away_later_fails_the_parts_after_it(script: Script) -> None:
    gone = "import sys\nif sys.argv[1] != 'first':\n    sys.stderr.write('--device cuda is not here')\n    sys.exit(2)"
    script(lines(ABOUT, WORKS) + gone, first=ALONE, second=SHORT, last=ALONE)
    report: DeviceReport = check.check_device("cuda")
    found: Mapping[str, str] = {part.name: part.trials[-1].found for part in report.parts}
    assert found["second"] == found["last"] == "the device is gone: --device cuda is not here"
