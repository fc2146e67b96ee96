"""A run's folder: what is kept in it, and who holds it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from midflight.config import Config, load_config
from midflight.errors import ConfigError
from midflight.run.launcher import folder_lock as holders
from midflight.run.launcher.checks.folder import check_run_folder
from midflight.run.launcher.folder import clear, kept, prepare
from midflight.run.launcher.folder_lock import hold_folder

HOLDING = """
import sys, time
from pathlib import Path
from midflight.run.launcher.folder_lock import hold_folder
with hold_folder(Path(sys.argv[1]), print) as lock:
    print("held", flush=True)
    if len(sys.argv) > 2:
        import subprocess
        print(subprocess.Popen(["sleep", "60"], pass_fds=[lock.fileno()], stdout=subprocess.DEVNULL).pid, flush=True)
    time.sleep(60)
"""


def config_of(folder: Path, *more: str) -> Config:
    return load_config(None, [f"run.folder={folder}", *more])


def holding(folder: Path, *more: str) -> subprocess.Popen[str]:
    started = subprocess.Popen([sys.executable, "-c", HOLDING, str(folder), *more], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None and started.stdout.readline() == "held\n"
    return started


def unheard(said: str) -> None:
    pytest.fail(said)


def finished(folder: Path) -> None:
    for name in ("checkpoints/version-00000003", "model", "start", "logs"):
        (folder / name).mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "store.sqlite").write_text("groups")
    (folder / "notes.txt").write_text("mine")


def test_a_run_that_has_finished_or_can_go_on_is_kept_unless_one_of_two_words_is_said(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    check_run_folder(config, resume=False, overwrite=False)
    finished(tmp_path)
    with pytest.raises(ConfigError, match=r"a finished run.*--resume.*--overwrite.*--folder"):
        check_run_folder(config, resume=False, overwrite=False)
    check_run_folder(config, resume=True, overwrite=False)
    with pytest.raises(ConfigError, match=r"it began with 1 gateways, and gateway\.shards is 2; set it to 1"):
        check_run_folder(config_of(tmp_path, "gateway.shards=2"), resume=True, overwrite=False)
    check_run_folder(config, resume=False, overwrite=True)
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "model").rmdir()
    assert kept(tmp_path) == "a run that can go on"
    with pytest.raises(ConfigError, match="give one of them"):
        check_run_folder(config, resume=True, overwrite=True)


def test_what_is_worth_nothing_is_not_kept_and_a_run_without_checkpoints_cannot_go_on(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "summary.json").write_text("{}")
    assert kept(tmp_path) is None
    with pytest.raises(ConfigError, match="no checkpoint in it"):
        check_run_folder(config_of(tmp_path), resume=True, overwrite=False)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError) as refused:
        check_run_folder(config_of(tmp_path), resume=False, overwrite=False, trains=False)
    assert "--overwrite" in str(refused.value) and "--resume" not in str(refused.value)


def test_a_model_in_the_folder_is_not_deleted_by_the_run_that_begins_with_it(tmp_path: Path) -> None:
    finished(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path.*would delete, with --overwrite or without"):
        check_run_folder(config_of(tmp_path, f"model.path={tmp_path / 'model'}"), resume=False, overwrite=True)


def test_a_new_run_removes_what_an_earlier_one_made_and_keeps_its_whole_configuration(tmp_path: Path) -> None:
    finished(tmp_path)
    config = config_of(tmp_path, "run.steps=7")
    prepare(tmp_path, config, resume=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "machine.json", "metrics.jsonl", "notes.txt"]
    assert load_config(tmp_path / "config.toml") == config


def test_after_a_crash_the_logs_and_the_configuration_stay(tmp_path: Path) -> None:
    prepare(tmp_path, config_of(tmp_path), resume=False)
    finished(tmp_path)
    clear(tmp_path)
    assert (tmp_path / "logs").exists() and (tmp_path / "config.toml").exists() and not (tmp_path / "checkpoints").exists()


def test_a_folder_is_held_by_one_process_which_is_named_with_its_start(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with holding(folder) as other:
        try:
            for look in (
                lambda: check_run_folder(config_of(folder), resume=False, overwrite=True),
                lambda: hold_folder(folder, unheard).__enter__(),
            ):
                with pytest.raises(ConfigError, match=rf"is in use by process {other.pid} \(midflight .*\), since \d{{4}}-"):
                    look()
        finally:
            other.kill()
    assert (folder / "lock").exists()


@pytest.mark.parametrize("waited_for", [True, False], ids=["waited for", "not yet waited for"])
def test_what_a_killed_process_held_is_taken_over_with_a_word(tmp_path: Path, waited_for: bool) -> None:
    said: list[str] = []
    with holding(tmp_path) as other:
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        if waited_for:
            other.wait()
        with hold_folder(tmp_path, said.append):
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert len(said) == 1 and f"taken over from process {other.pid}" in said[0]
    assert not (tmp_path / "lock").exists()
    with hold_folder(tmp_path, unheard):
        pass


def test_a_later_process_of_the_same_number_is_not_the_holder(tmp_path: Path) -> None:
    old = {"pid": os.getppid(), "started": "1", "since": "long ago", "command": "midflight train"}
    (tmp_path / "lock").write_text(json.dumps(old))
    said: list[str] = []
    with hold_folder(tmp_path, said.append):
        pass
    assert said


def test_a_part_that_outlives_its_launcher_still_holds_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "ENDING_SECONDS", 0.2)
    with holding(tmp_path, "with a part") as other:
        assert other.stdout is not None
        part = int(other.stdout.readline())
        other.kill()
    with (
        pytest.raises(ConfigError, match=rf"process {other.pid} .*left behind when it ended: process {part}"),
        hold_folder(tmp_path, unheard),
    ):
        pass
    monkeypatch.setattr(holders, "ENDING_SECONDS", 5.0)
    os.kill(part, signal.SIGKILL)
    with hold_folder(tmp_path, lambda _: None):
        pass


def test_a_folder_that_was_made_for_nothing_is_removed_again(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), hold_folder(tmp_path / "new", unheard):
        raise ZeroDivisionError
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with hold_folder(tmp_path / "old", unheard):
        pass
    assert (tmp_path / "old").exists()


@pytest.mark.parametrize("name", ["store.sqlite", "evaluations.sqlite"])
def test_a_database_goes_with_the_journal_of_a_killed_writer_which_another_database_would_take_for_its_own(
    tmp_path: Path, name: str
) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):
        (tmp_path / f"{name}{suffix}").write_text("of the old run")
    clear(tmp_path)
    assert list(tmp_path.iterdir()) == []
