"""Who may read a run's folder."""

from __future__ import annotations

import grp
import os
import tempfile
from pathlib import Path

import pytest
from tests.folders import mode_of, umask

from midflight.errors import ConfigError
from midflight.models.permissions import open_to_others
from midflight.run.endpoint import NAME, Endpoint, write_endpoint
from midflight.run.launcher import permissions
from midflight.run.launcher.folder_lock import hold_folder
from midflight.trajectories import database

OTHER = 65534
OWN = grp.getgrgid(os.getegid()).gr_name


@pytest.fixture(autouse=True)
def _usual():
    with umask(0o022):
        yield


def unheard(said: str) -> None:
    pytest.fail(said)


def made_in(folder: Path) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "trainer.log").write_text("a conversation")
    write_endpoint(folder, Endpoint("http://127.0.0.1:1", "t" * 16, "run", "start"))
    (folder / "draft").mkdir(mode=0o700)
    (folder / "draft" / "model").write_text("")
    open_to_others(folder / "draft")


def modes(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): oct(path.stat().st_mode & 0o7777) for path in (folder, *folder.rglob("*"))}


def test_a_new_folder_and_what_is_made_in_it_are_this_users_alone(tmp_path: Path) -> None:
    with hold_folder(tmp_path / "runs" / "run", unheard):
        made_in(tmp_path / "runs" / "run")
        assert modes(tmp_path / "runs" / "run") == {
            ".": "0o700",
            "lock": "0o600",
            "logs": "0o700",
            "logs/trainer.log": "0o600",
            NAME: "0o600",
            "draft": "0o700",
            "draft/model": "0o600",
        }
    (tmp_path / "later").write_text("")
    assert mode_of(tmp_path / "runs") == 0o755 and mode_of(tmp_path / "later") == 0o644, "the user's own files are as before"


def test_a_group_reads_all_and_writes_nothing(tmp_path: Path) -> None:
    with hold_folder(tmp_path / "run", unheard, group=OWN):
        made_in(tmp_path / "run")
        assert modes(tmp_path / "run") == {
            ".": "0o2750",
            "lock": "0o640",
            "logs": "0o2750",
            "logs/trainer.log": "0o640",
            NAME: "0o640",
            "draft": "0o2750",
            "draft/model": "0o640",
        }


def test_the_folder_of_an_old_run_is_closed_and_it_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "store.sqlite").write_text("conversations")
    (folder / "program").write_text("")
    (folder / "program").chmod(0o755)
    (folder / "elsewhere").symlink_to(tmp_path / "other")
    (tmp_path / "other").write_text("")
    said: list[str] = []
    with hold_folder(folder, said.append):
        assert mode_of(folder) == mode_of(folder / "logs") == mode_of(folder / "program") == 0o700
        assert mode_of(folder / "store.sqlite") == 0o600
        assert mode_of(tmp_path / "other") == 0o644, "a link is not followed"
    assert said == [f"{folder} and what is in it could be read by every user of this machine; from now on by you alone."]
    with hold_folder(folder, unheard):
        pass
    with hold_folder(folder, unheard, group=OWN):
        assert mode_of(folder / "store.sqlite") == 0o640
    with hold_folder(folder, unheard):
        assert mode_of(folder / "store.sqlite") == 0o600, "it is shared no more"


def test_runs_of_one_process_end_in_any_order_and_leave_its_files_as_they_were(tmp_path: Path) -> None:
    first = permissions.files_for("")
    second = permissions.files_for(OWN)
    first.__enter__()
    second.__enter__()
    (tmp_path / "both").write_text("")
    first.__exit__(None, None, None)
    (tmp_path / "second").write_text("")
    second.__exit__(None, None, None)
    (tmp_path / "none").write_text("")
    assert [mode_of(tmp_path / name) for name in ("both", "second", "none")] == [0o600, 0o640, 0o644]


def test_a_folder_behind_a_link_and_a_store_elsewhere_are_closed_too(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with hold_folder(tmp_path / "link", unheard):
        assert mode_of(tmp_path / "there") == 0o700
    for name in ("run.sqlite", "run.sqlite-wal", "run.sqlite-shm", "other.sqlite"):
        (tmp_path / name).write_text("")
    permissions.close_store(tmp_path / "run.sqlite")
    assert [mode_of(path) for path in sorted(tmp_path.glob("*sqlite*"))] == [0o644, 0o600, 0o600, 0o600]


def test_a_disk_that_keeps_no_permissions_is_said_and_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chmod(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    (tmp_path / "run").mkdir()
    monkeypatch.setattr(Path, "chmod", chmod)
    said: list[str] = []
    with hold_folder(tmp_path / "run", said.append):
        pass
    (words,) = said
    assert words.startswith(f"note: who may read {tmp_path / 'run'} cannot be set (Operation not permitted: ")


def test_a_group_that_is_none_or_not_ones_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"share_with_group is 'nobodies', which is no group of this machine; name one of"):
        permissions.group_id("nobodies")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: [1000])
    with pytest.raises(ConfigError, match=r"share_with_group is 'root', and you are not a member of it; name one of"):
        permissions.group_id("root")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_of_the_group_reads_the_store_of_a_run_that_has_ended_or_goes_on() -> None:
    """SQLite would make files beside it, which this user may not."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        folder = Path(made) / "run"
        with hold_folder(folder, unheard, group=grp.getgrgid(OTHER).gr_name):
            store = database.connect(folder / "store.sqlite")
            store.execute("INSERT INTO runs VALUES ('one')")
            assert read_by_other(folder / "store.sqlite") == "one", "it goes on"
            store.close()
        assert not (folder / "store.sqlite-wal").exists()
        assert read_by_other(folder / "store.sqlite") == "one", "it has ended"
        assert "Permission denied" in read_by_other(folder / "store.sqlite", group=OTHER - 1)


def read_by_other(path: Path, *, group: int = OTHER) -> str:
    """What a process of another user finds in the table of runs, or its error."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(group)
        os.setuid(OTHER)
        try:
            ((name,),) = database.look(path).execute("SELECT name FROM runs")
        except BaseException as error:
            name = str(error)
        os.write(writer, name.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as answer:
        return answer.read()
