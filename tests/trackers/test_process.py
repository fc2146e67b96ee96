"""The process beside a run: it follows the journal, fails alone, and says so once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.trackers.journals import append, configure, resumed, step, write

from midflight.config.load import load_config
from midflight.errors import ConfigError
from midflight.run.launcher.tracker_process import TrackerProcess
from midflight.trackers.tracker import make_tracker

OWN = "tests.trackers.own"


def tracking(folder: Path, said: list[str]) -> TrackerProcess:
    return TrackerProcess(load_config(folder / "config.toml", [f"run.folder={folder}"]), said.append)


def notes(folder: Path) -> list[list[Any]]:
    path = folder / "notes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_a_run_is_followed_and_neither_a_failing_nor_a_hanging_tracker_hurts_another(tmp_path: Path) -> None:
    configure(tmp_path, f"{OWN}:Notes", f"{OWN}:Fails", f"{OWN}:Leaves", f"{OWN}:Hangs")
    write(tmp_path, step(1))
    said: list[str] = []
    run = tracking(tmp_path, said)
    run.start()
    run.start()  # whoever hears of the run starts them: once
    until(lambda: [call[1] for call in notes(tmp_path) if call[0] == "scalars"] == [1])
    append(tmp_path, step(2), step(3))
    until(lambda: [call[1] for call in notes(tmp_path) if call[0] == "scalars"] == [1, 2, 3])
    (tmp_path / "plot.png").write_bytes(b"drawn")
    (tmp_path / "summary.json").write_text('{"steps": 3, "name": "tried", "loss": ["a"], "overlap_share": null}')
    append(tmp_path, step(4))
    run.end(seconds=4.0)
    assert [call[0] for call in notes(tmp_path)][-2:] == ["picture", "close"] and notes(tmp_path)[-1] == [
        "close",
        {"steps": 3, "name": "tried"},
    ]
    assert [call[1] for call in notes(tmp_path) if call[0] == "scalars"] == [1, 2, 3, 4], "what came last was told before the end"
    assert len([words for words in said if "Fails failed: ConnectionError: no route to the service at step 1" in words]) == 1
    assert len([words for words in said if "Leaves" in words]) == 1 and "Hangs" in said[-1] and "were ended" in said[-1] and len(said) == 3
    assert (tmp_path / "logs" / "trackers.log").read_text().count("ConnectionError: no route") == 4, "all of them are in the log"


def test_i9_trackers_that_are_stopped_hold_nobody_up_and_are_named_at_the_end(tmp_path: Path) -> None:
    configure(tmp_path, f"{OWN}:Notes")
    write(tmp_path, step(1))
    run = tracking(tmp_path, said := [])
    run.start()
    until(lambda: [call[1] for call in notes(tmp_path) if call[0] == "scalars"] == [1])
    assert run._process is not None
    run._process.send_signal(signal.SIGSTOP)
    append(tmp_path, step(2))
    run.hear()
    assert not said
    run.end(seconds=0.5)
    assert said == [f"trackers that were not done within 0.5 s were ended: {OWN}:Notes; metrics.jsonl has every number."]


def test_the_death_of_the_trackers_is_said_once_and_of_a_run_without_any_nothing(tmp_path: Path) -> None:
    configure(tmp_path, f"{OWN}:Notes")
    run = tracking(tmp_path, said := [])
    (tmp_path / "config.toml").write_text("no configuration")
    run.start()
    until(lambda: (run.hear(), bool(said))[1])
    run.hear()
    run.end(seconds=1.0)
    assert len(said) == 1 and f"ended with status 1: {OWN}:Notes will lack what follows" in said[0]
    configure(tmp_path)
    idle = tracking(tmp_path, said)
    idle.start()
    idle.hear()
    idle.end(seconds=1.0)
    assert len(said) == 1 and not (tmp_path / "logs" / "none").exists()


def test_a_run_that_goes_on_is_found_again_and_a_dead_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    configure(tmp_path, f"{OWN}:Notes")
    write(tmp_path, step(1), step(2), step(3))
    command = [sys.executable, "-m", "midflight.trackers.process", str(tmp_path)]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True).stdout.count(b"\n") == 1
    write(tmp_path, step(1), step(2), resumed(2, 9.0), step(3), step(4))
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True)
    told = notes(tmp_path)
    assert [call[1:] for call in told if call[0] == "open"] == [["tried", None, 4], ["tried", "known again", 4]]
    assert [call[1] for call in told if call[0] == "scalars"] == [1, 2, 3, 4]


def test_nobody_who_listens_costs_no_tracker_anything(tmp_path: Path) -> None:
    """A launcher that was killed: both ends of its pipes are closed."""
    configure(tmp_path, f"{OWN}:Fails", f"{OWN}:Notes")
    write(tmp_path, step(1), step(2))
    process = subprocess.Popen(
        [sys.executable, "-m", "midflight.trackers.process", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stdin.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 0 and "BrokenPipe" not in said and said.count("ConnectionError: no route") == 2
    assert [call[0] for call in notes(tmp_path)][-1] == "close"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{OWN}:NotOne", "no class derived from midflight.trackers.Tracker"),
        (f"{OWN}:NeedsMore", "cannot be made: TypeError"),
        (f"{OWN}:Note", "Did you mean 'Notes'"),
        ("no_such_module:Tracker", "no module 'no_such_module'"),
    ],
)
def test_a_class_that_cannot_be_made_is_refused_in_one_sentence(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_tracker(name)
    assert "observe.trackers" in str(error.value) and said in str(error.value) and "\n" not in str(error.value)


def test_unknown_names_and_missing_packages_are_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names 'tensorbord', which is no tracker.*Did you mean 'tensorboard'"):
        load_config(None, ['observe.trackers=["tensorbord"]'])
    with pytest.raises(ConfigError, match="names one twice"):
        load_config(None, [f'observe.trackers=["{OWN}:Notes", "{OWN}:Notes"]'])
    (tmp_path / "wandb").mkdir()  # what the tracker wrote here is no package
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(Path(__file__).parents[2] / "src")])
    for name in ("tensorboard", "wandb", "mlflow", "trackio"):
        with pytest.raises(ConfigError, match=rf"is not installed; pip install 'midflight\[{name}\]'"):
            load_config(None, [f'observe.trackers=["{name}"]'])
