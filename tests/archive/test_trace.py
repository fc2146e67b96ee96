"""A run as a trace: slices where things happened, nested as Perfetto wants them.

The trace processor of the `perfetto` package is a program that it downloads when it is first used. Where `PERFETTO_BINARY_PATH` names one,
it reads the trace here; `well_formed` holds what its documentation asks of the JSON format in any case.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midflight.archive.trace import ENGINES, EVALUATIONS, ROLLOUTS, TITLES, TRAINER, trace_of, write_trace
from midflight.cli import main
from midflight.errors import ConfigError, NoRun
from midflight.observe.lines import AlarmLine, Line, StepLine
from midflight.observe.status import Totals
from midflight.observe.timeline import (
    BatchTimed,
    CommitTimed,
    DropTimed,
    EngineTimed,
    RolloutTimed,
    RunStarted,
    ScoreTimed,
    StepTimed,
    Timed,
    WaitTimed,
)
from midflight.types import Kind, TurnTimes

TURN = TurnTimes(1.0, 3.0, (("engine0", 1.25),), ((3, 1.5), (4, 2.25)), 40)
"""Asked at 1.0, given to the engine at 1.25, tokens of version 3 from 1.5 on and of version 4 from 2.25 on."""
AFTER_A_TOOL = TurnTimes(4.0, 4.5, (("engine0", 4.0),), ((4, 4.25),), 8)
LINES: list[Timed] = [
    RunStarted(0.0, 1.7e9),
    RolloutTimed((0, 9, 0, 0), "sums", 0.25, 0.75, 1.0, 4, (TurnTimes(0.25, 0.75, (("engine0", 0.25),), ((3, 0.5),), 4),), Kind.EVALUATION),
    ScoreTimed(3, "sums", 0.8, 1.0),
    RolloutTimed((0, 1, 0, 0), "sums", 1.0, 5.0, 1.0, 48, (TURN, AFTER_A_TOOL)),
    RolloutTimed((0, 1, 0, 1), "sums", 1.0, 2.0, None, 0, failure="KeyError"),
    RolloutTimed((0, 2, 0, 0), "sums", 2.0, 2.5, 0.0, 5),
    DropTimed((0, 2, 0), "stale", 3.5),
    CommitTimed("engine0", 4, 2.2, 0.5, 0.1),
    BatchTimed(1, 4, 5.5, ((0, 1, 0),)),
    WaitTimed("trainer", "generation", 3.0, 5.5),
    StepTimed(1, 5, 5.75, 6.5, 48),
    EngineTimed("engine0", 6.0, "it does not answer"),
]


def written(folder: Path, lines: list[Timed], journal: list[Line] = []) -> Path:  # noqa: B006
    folder.mkdir(exist_ok=True)
    for name, of in (("timeline.jsonl", lines), ("metrics.jsonl", journal)):
        (folder / name).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in of))
    return folder


def a_step(number: int, seconds: float) -> StepLine:
    rates = {"generation_rate": 100.0, "training_rate": 50.0, "reward": 0.5, "staleness_mean": 1.0}
    return StepLine(step=number, version=number, seconds=seconds, step_seconds=0.75, tokens=48, rollouts=2, totals=Totals(), **rates)


def well_formed(said: Any) -> dict[tuple[int, int], list[tuple[str, float, float]]]:
    """Asserts that every event is one that the format knows; returns the slices by track, in seconds."""
    assert set(said) <= {"traceEvents", "displayTimeUnit", "otherData"} and said["displayTimeUnit"] in ("ms", "ns")
    tracks: dict[tuple[int, int], list[tuple[str, float, float]]] = defaultdict(list)
    processes, threads = set[int](), set[tuple[int, int]]()
    for event in said["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and event["ph"] in "XCiM"
        track = event["pid"], event.get("tid", 0)
        if event["ph"] == "M":
            kind, value = event["name"], event["args"]
            assert kind.startswith(("process_", "thread_")) and len(value) == 1
            assert isinstance(value.get("name", ""), str) and isinstance(value.get("sort_index", 0), int)
            (processes if kind == "process_name" else set()).add(event["pid"])
            (threads if kind == "thread_name" else set()).add(track)
            continue
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
            tracks[track].append((event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        else:
            assert event["s"] in ("g", "p", "t")
    assert {event["pid"] for event in said["traceEvents"]} == processes and set(tracks) <= threads
    for slices in tracks.values():  # beside or inside each other, never across
        open_: list[float] = []
        for _, began, ended in sorted(slices, key=lambda s: (s[1], -s[2])):
            while open_ and open_[-1] <= began:
                open_.pop()
            assert not open_ or ended <= open_[-1]
            open_.append(ended)
    return tracks


def drawn(folder: Path) -> Any:
    return json.loads(msgspec.json.encode(trace_of(folder)))


def test_a_rollout_is_drawn_from_its_first_request_to_the_step_that_trained_it(tmp_path: Path) -> None:
    tracks = well_formed(drawn(written(tmp_path, LINES)))
    slices = next(slices for slices in tracks.values() if any(name == "rollout 0-1-0-0" for name, _, _ in slices))
    assert slices == [
        ("rollout 0-1-0-0", 1.0, 5.0),
        ("queued", 1.0, 1.25),
        ("prefill", 1.25, 1.5),
        ("segment v3", 1.5, 2.25),
        ("paused", 2.1, 2.2),
        ("segment v4", 2.25, 3.0),
        ("tool", 3.0, 4.0),
        ("prefill", 4.0, 4.25),
        ("segment v4", 4.25, 4.5),
        ("reward", 4.5, 5.0),
        ("waiting", 5.0, 5.75),
        ("trained v5", 5.75, 6.5),
    ]


def test_rollouts_at_one_time_have_lanes_of_their_own_and_a_failed_one_is_not_trained(tmp_path: Path) -> None:
    said = drawn(written(tmp_path, LINES))
    tracks = well_formed(said)
    lanes = {track: [name for name, _, _ in slices] for track, slices in tracks.items() if track[0] == ROLLOUTS}
    assert len(lanes) == 2  # the failed one and the dropped one, one after another, beside the trained one
    assert ["rollout 0-1-0-1", "environment", "rollout 0-2-0-0", "environment", "waiting"] in lanes.values()
    failed = next(event for event in said["traceEvents"] if event["name"] == "rollout 0-1-0-1")
    assert failed["args"]["failed by"] == "KeyError" and failed["args"]["reward"] is None
    assert any(event["name"] == "dropped: stale" and event["ts"] == 3_500_000 for event in said["traceEvents"])


def test_engines_trainer_handovers_and_evaluations_are_tracks(tmp_path: Path) -> None:
    tracks = well_formed(drawn(written(tmp_path, LINES, [a_step(5, 6.5)])))
    assert tracks[TRAINER, 1] == [("step 5", 5.75, 6.5)]
    assert tracks[ENGINES, 1] == [("generating", 0.25, 0.75), ("generating", 1.25, 3.0), ("generating", 4.0, 4.5)]
    assert tracks[ENGINES, 2] == [("stage v4", 1.6, 2.1), ("paused for v4", 2.1, 2.2)]
    assert tracks[EVALUATIONS, 1] == [("evaluation of v3", 0.25, 0.8)]


def test_a_run_of_an_older_version_has_its_steps_and_says_what_is_missing(tmp_path: Path) -> None:
    alarm = AlarmLine(version=1, step=1, seconds=2.0, name="failures", text="all of them")
    folder = written(tmp_path, [], [a_step(1, 2.0), alarm])
    (folder / "timeline.jsonl").unlink()
    said = drawn(folder)
    assert well_formed(said)[TRAINER, 1] == [("step 1", 1.25, 2.0)]
    assert "timeline.jsonl is not there" in said["otherData"]["missing"]
    assert {event["name"] for event in said["traceEvents"]} >= {"alarm: failures", "reward", "tokens generated per second"}


def test_the_command_writes_the_file_and_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = written(tmp_path / "run", LINES), tmp_path / "trace.json"
    assert main(["trace", str(folder), "--out", str(out)]) == 0
    assert "perfetto" in capsys.readouterr().out and well_formed(json.loads(out.read_bytes()))
    with pytest.raises(NoRun, match="is no run"):
        write_trace(tmp_path, out)
    with pytest.raises(ConfigError, match=r"its folder is not there; give --out"):
        write_trace(folder, tmp_path / "missing" / "trace.json")
    assert main(["trace", str(folder), "--out", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err


@pytest.mark.skipif("PERFETTO_BINARY_PATH" not in os.environ, reason="the trace processor is a program that would have to be downloaded")
def test_perfetto_reads_it(tmp_path: Path) -> None:
    perfetto = pytest.importorskip("perfetto.trace_processor")
    out = tmp_path / "trace.json"
    write_trace(written(tmp_path / "run", LINES), out)
    config = perfetto.TraceProcessorConfig(bin_path=os.environ["PERFETTO_BINARY_PATH"])
    with perfetto.TraceProcessor(trace=str(out), config=config) as processor:
        names = {row.name for row in processor.query("select name from slice")}
        assert {"queued", "prefill", "segment v3", "paused", "tool", "reward", "trained v5", "step 5"} <= names
        assert {row.name for row in processor.query("select name from process")} <= set(TITLES.values())
