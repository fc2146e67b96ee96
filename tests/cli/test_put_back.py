"""Commands that look at a run which a killed `--overwrite` left aside: it is back first, with a word."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from midflight.cli import main
from midflight.cli.configurations import checked, config_of_folder
from midflight.cli.put_back import put_back_at
from midflight.config import load_config
from midflight.run.launcher.checks import table
from midflight.run.launcher.checks.check import Plan
from midflight.run.launcher.folder import set_aside
from midflight.run.launcher.folder_lock import hold_folder

DEMO = str(Path(__file__).parents[2] / "configs" / "demo.toml")
ENDS = ("--set", "gateway.shards=2")
"""A run that is resumed began with one gateway, so that nothing is started."""


def left_aside(folder: Path) -> None:
    """A run that had finished, and a new one that was killed in its place."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("old")
    (folder / "checkpoints" / "version-00000009").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("")
    (folder / "config.toml").write_text('[run]\nname = "old"\nsteps = 9\n[cluster]\nkind = "local"\n')
    set_aside(folder, load_config(None, [f"run.folder={folder}"]))
    (folder / "metrics.jsonl").write_text("")
    (folder / "config.toml").write_text('[run]\nname = "new"\n[cluster]\nkind = "local"\n')
    (folder / "lock").write_text('{"pid": 4194304, "started": "1", "since": "long ago", "command": "midflight train"}')


@pytest.mark.parametrize(
    "command",
    [
        ("runs", "all"),
        ("samples", "all/run"),
        ("ledger", "all/run"),
        ("export", "all/run"),
        ("trace", "all/run"),
        ("report", "all/run"),
        ("compare", "all/run", "all/run"),
        ("evaluate", "all/run/model", "--config", DEMO),
        ("serve", "--model", "all/run/model"),
        ("train", "all/run/config.toml", "--resume", *ENDS),
        ("train", DEMO, "--folder", "all/run", "--resume", *ENDS),
        ("train", DEMO, "--folder", "all/run"),
        ("rollouts", DEMO, "--folder", "all/run"),
    ],
    ids=" ".join,
)
def test_every_command_puts_it_back_with_a_word(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    left_aside(Path("all/run"))
    main(list(command))  # what it says of such a run is told elsewhere
    printed = capsys.readouterr()
    assert "all/run: the run that --overwrite had set aside is back" in printed.err
    assert Path("all/run/model/config.json").read_text() == "old" and 'name = "old"' in Path("all/run/config.toml").read_text()
    assert not list(Path("all/run").glob(".overwritten*"))


def test_a_run_that_is_gone_back_to_is_back_before_its_configuration_is_read(tmp_path: Path) -> None:
    left_aside(tmp_path / "run")
    assert config_of_folder(tmp_path / "run").run.name == "old"


def test_the_list_of_runs_names_it_once_and_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    left_aside(Path("all/run"))
    assert main(["runs", "all"]) == 0
    out = capsys.readouterr().out
    assert out.count("all/run") == 1 and "finished" in out and "overwritten" not in out


def test_a_run_that_is_resumed_is_back_with_a_word_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    left_aside(Path("run"))
    monkeypatch.setattr(table, "trial", lambda plan, **_: list[object]())
    checked(Plan(load_config(None, ["run.folder=run"]), resume=True))
    said = capsys.readouterr().err
    assert "is back" in said and "--resume goes on with it" in said
    assert 'name = "old"' in Path("run/config.toml").read_text()


def test_while_the_new_run_goes_on_nobody_touches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    reading, writing = os.pipe()
    if (other := os.fork()) == 0:
        Path("all/run").mkdir(parents=True)
        with hold_folder(Path("all/run"), lambda _: None):
            (Path("all/run") / "metrics.jsonl").touch()
            set_aside(Path("all/run"), load_config(None, ["run.folder=all/run"]))
            (Path("all/run") / "metrics.jsonl").touch()
            os.write(writing, b"begun")
            signal.pause()
        os._exit(0)
    try:
        assert os.read(reading, 5) == b"begun"
        put_back_at(Path("all/run"))
        assert main(["runs", "all"]) == 0
        printed = capsys.readouterr()
        assert printed.err == "" and printed.out.count("all/run") == 1 and "running" in printed.out
        assert Path("all/run/.overwritten").is_dir()
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
