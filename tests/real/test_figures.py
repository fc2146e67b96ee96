"""A figure of a run is one number wherever it is shown: on the terminal, in the summary, viewer and report, in lists of runs, and what a tracker was told."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from midflight.archive.runs import open_run
from midflight.observe.readable import duration, number

from .processes import CONFIG, ENVIRON, Command, journal, steps

OWN = Path(__file__).parents[1] / "trackers" / "own.py"
OPTIONS = (
    *("run.steps=8", "warm_start.target_accuracy=0.02", "warm_start.max_steps=60"),
    *("observe.trackers=['noted:Notes']", "environment.entry=graded:answer"),
)
AGENT = """
from midflight.environments.single_turn import answer as asked

calls = 0


async def answer(task, client):
    global calls
    calls += 1
    number = calls
    await asked(task, client)
    if number in (30, 40):  # after the evaluation before, and before the one after
        raise KeyError("the planted fault")
    return number % 4 / 4 + number / 1000
"""
"""Its rewards differ within a group, and between the two evaluations; some rollouts fail."""
VIEWER = [sys.executable, "-m", "midflight", "view"]


@dataclass
class Told:
    """What a finished run has told people, by who told it; texts by their labels."""

    folder: Path
    summary: dict[str, Any]
    lines: list[str]
    """The lines of its log."""
    table: dict[str, str]
    """The table at the end."""
    page: dict[str, str]
    """The run's page in the viewer."""
    waits: list[list[str]]
    """The table of waits on its page of time."""
    ledger: dict[str, str]
    report: dict[str, str]
    listed: str
    """The line of `midflight runs`."""
    tracked: list[list[Any]] = field(default_factory=list)


def boxed(said: str) -> dict[str, str]:
    """The rows of the table that `said` ends with, in a terminal that folds none."""
    rows: dict[str, str] = {}
    for line in said.splitlines():
        if line.startswith("│"):
            label, text = line.strip("│").split("│")
            rows[label.strip()] = text.strip()
    return rows


def tiles(page: str) -> dict[str, str]:
    return {unescape(name): unescape(text) for name, text in re.findall(r'<b data-test="([^"]*)">([^<]*)</b>', page)}


def cells(page: str, name: str) -> list[list[str]]:
    """The cells of a table of the viewer."""
    body = page.partition(f'data-test="{name}"')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    return [[unescape(re.sub("<[^>]*>", "", cell)) for cell in row.split("</td>")[:-1]] for row in body.split("</tr>")[:-1]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    pytest.importorskip("nicegui", reason="the viewer is an extra")
    place = tmp_path_factory.mktemp("figures")
    run = place / "run"
    (place / "small.toml").write_text(CONFIG)
    (place / "graded.py").write_text(AGENT)
    shutil.copy(OWN, place / "noted.py")
    options = [word for option in OPTIONS for word in ("--set", option)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(ENVIRON, "COLUMNS", "300")
        command = Command("train", place / "small.toml", "--folder", run, *options, folder=place)
        assert command.wait(120) == 0, command.said
        report = Command("report", run, "--out", place / "report.html", folder=place / "reporting")
        runs = Command("runs", place, folder=place / "listing")
    out = command.output.read_text()
    with subprocess.Popen([*VIEWER, str(run), "--port", "0"], stdout=subprocess.PIPE, text=True, env=ENVIRON) as viewer:
        try:
            assert viewer.stdout is not None
            address = viewer.stdout.readline().removeprefix("viewer: ").strip().rstrip("/")
            assert address, "the viewer is up"
            pages = {}
            for name in ("run", "time", "ledger"):
                with urlopen(f"{address}/run/run/{name}", timeout=60) as answer:
                    pages[name] = answer.read().decode()
        finally:
            viewer.terminate()
    assert report.wait() == 0 and runs.wait() == 0, report.said + runs.said
    written = (place / "report.html").read_text()
    numbers = re.findall(r"<div(?: class=\"long\")?><span>([^<]*)</span><b>([^<]*)</b></div>", written)
    yield Told(
        folder=run,
        summary=json.loads((run / "summary.json").read_text()),
        lines=out.splitlines(),
        table=boxed(out),
        page=tiles(pages["run"]),
        waits=cells(pages["time"], "waits"),
        ledger=tiles(pages["ledger"]),
        report={unescape(label): unescape(text) for label, text in numbers},
        listed=next(line for line in runs.output.read_text().splitlines() if "finished" in line),
        tracked=[json.loads(line) for line in (run / "notes.jsonl").read_text().splitlines()],
    )


def last_reward(run: Path) -> float:
    """That of the last step before which rollouts had ended: where a machine is busy, none may have between two steps."""
    return [line["reward"] for line in steps(run) if "reward" in line][-1]


def percent(share: float) -> str:
    return f"{share:.0%}"


def test_terminal_viewer_and_report_show_each_figure_of_the_summary(told: Told) -> None:
    summary = told.summary
    accounts = summary["accounts"]
    waits = [f"{who} {percent(min(1.0, seconds / summary['training_seconds']))}" for who, seconds in summary["waits"].items()]
    slots = f" ({percent(summary['slots_used'])} of their slots)"
    expected = {
        "time": duration(summary["seconds"]),
        "training phase": duration(summary["training_seconds"]),
        "held-out spell_backward": f"{number(summary['heldout_before'])} → {number(summary['heldout_after'])} (16 tasks)",
        "weights went live": f"{summary['weight_updates']} times",
        "rollouts spanning versions": f"{summary['rollouts_spanning_versions']} of {summary['rollouts']}",
        "failed requests, rollouts": f"{summary['failed_requests']}, {summary['failed_rollouts']}",
        "failed by": f"{summary['failures']['KeyError']} KeyError",
        "groups by fate": f"{accounts['trained']} trained, {accounts['running'] + accounts['waiting'] + accounts['leased']} not yet, "
        f"{sum(accounts['dropped'].values())} dropped",
        "tokens trained": f"{summary['trained_tokens']:,} of {summary['generated_tokens']:,} generated",
        "oldest trained token": f"{summary['max_token_staleness']} versions",
        "engine and trainer busy together": percent(summary["overlap_share"]),
        "who was busy": f"{summary['bound']}: engines busy {percent(summary['engine_busy'])}{slots}, "
        f"trainer busy {percent(summary['trainer_busy'])}",
        "advice": summary["advice"],
        "waiting": ", ".join(waits),
        "peak memory": f"{summary['peak_memory_mb']:,.0f} MB",
    }
    assert summary["training_seconds"] < summary["seconds"] and summary["waits"], "a run of several phases"
    assert 0 < summary["heldout_before"] != summary["heldout_after"] and summary["failed_rollouts"] > 0
    for name, shown in (("terminal", told.table), ("viewer", told.page), ("report", told.report)):
        assert {label: shown.get(label) for label in expected} == expected, name
    of_run = {"state": "finished", "steps": "8 of 8", "version": "8", "reward, last step": number(last_reward(told.folder))}
    for name, shown in (("viewer", told.page), ("report", told.report)):
        assert {label: shown.get(label) for label in of_run} == of_run, name
    assert any("  done  step 8/8" in line for line in told.lines)


def test_the_journal_tells_time_by_the_clock_of_the_command(told: Told) -> None:
    """An evaluation's line is written at its end, and the terminal's at its beginning: start and warm start were before both."""
    said = next(line for line in told.lines if "  evaluation  task 0/16" in line)
    found = re.match(r" *(\d+) s ", said)
    assert found is not None, said
    scored, *_, last = journal(told.folder)
    assert int(found[1]) - 0.5 <= scored["seconds"] < last["seconds"] <= told.summary["seconds"]


def test_the_list_of_runs_and_the_page_of_time_say_the_same(told: Told) -> None:
    summary = told.summary
    words = " ".join(told.listed.split())
    reward = number(last_reward(told.folder))
    assert f"run finished 8 of 8 {reward} {number(summary['heldout_after'])} {duration(summary['seconds'])}" in words
    assert [row[:4] for row in told.waits] == [
        [*who.split(" for "), duration(seconds), percent(min(1.0, seconds / summary["training_seconds"]))]
        for who, seconds in summary["waits"].items()
    ]


def test_the_ledger_of_the_store_has_the_accounts_of_the_summary(told: Told) -> None:
    accounts = told.summary["accounts"]
    assert accounts["trained_tokens"] == told.summary["trained_tokens"] > 0
    assert told.ledger["tokens received"] == f"{accounts['received_tokens']:,}"
    assert told.ledger["trained"].split()[0] == f"{accounts['trained_tokens']:,}"
    assert told.ledger["masked"] == str(sum(accounts["masked_tokens"].values()))
    assert told.ledger["dropped"] == f"{sum(accounts['dropped_tokens'].values()):,}"


def test_what_a_tracker_was_told_adds_up_to_the_summary(told: Told) -> None:
    summary = told.summary
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for call in told.tracked:
        if call[0] == "scalars":
            for name, value in call[2].items():
                by_name[name].append(value)
    scores = by_name["eval/spell_backward/reward"]
    assert (scores[0], scores[-1]) == (summary["heldout_before"], summary["heldout_after"])
    assert len(by_name["train/tokens"]) == summary["steps"] and sum(by_name["train/tokens"]) == summary["trained_tokens"]
    assert max(by_name["train/staleness_max"]) == summary["max_token_staleness"]
    assert summary["failed_rollouts"] == sum(summary["failures"].values())
    for name, key in (("rollout/num_failed", "failed_rollouts"), ("rollout/num_rollouts", "rollouts")):
        until_then = steps(told.folder)[-1]["totals"][key]
        assert 0 < sum(by_name[name]) == until_then <= summary[key], "others ended after the last step"
    last = steps(told.folder)[-1]
    assert (by_name["rollout/reward_mean"][-1], by_name["train/tokens_per_second"][-1]) == (last_reward(told.folder), last["training_rate"])
    (end,) = (call[1] for call in told.tracked if call[0] == "close")
    assert end == {name: value for name, value in summary.items() if isinstance(value, int | float | str)}


def test_a_run_whose_summary_is_lost_has_the_figures_of_its_last_step(told: Told, tmp_path: Path) -> None:
    """What no step changed after it is as in the summary; the shares are those of the phase up to that step."""
    shutil.copytree(told.folder, tmp_path / "run", ignore=shutil.ignore_patterns("summary.json", "model", "checkpoints"))
    found = open_run(tmp_path / "run").describe().summary
    summary, last = told.summary, steps(told.folder)[-1]
    for name in ("steps", "version", "trained_tokens", "max_token_staleness", "heldout_before", "heldout_after", "failed_requests"):
        assert getattr(found, name) == summary[name], name
    for name in ("engine_busy", "trainer_busy", "slots_used", "overlap_share", "bound", "advice"):
        assert getattr(found, name) == last[name], name
    assert found.training_seconds == pytest.approx(last["training_seconds"], abs=0.001) and found.peak_memory_mb is None
