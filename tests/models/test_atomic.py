"""A folder is there whole or not at all, whatever becomes of who makes it."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from midflight.errors import ConfigError
from midflight.models.atomic import atomic_folder, check_room


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "empty"])
def test_a_folder_appears_when_it_is_whole(tmp_path: Path, is_there: bool) -> None:
    dest = tmp_path / "in" / "model"
    if is_there:
        dest.mkdir(parents=True)
    with atomic_folder(dest) as (building, _):
        (building / "weights").write_text("all")
        assert not dest.exists() or names(dest) == []
    assert names(dest) == ["weights"] and names(dest.parent) == ["model"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), atomic_folder(tmp_path / "model") as (building, _):
        (building / "weights").write_text("half")
        raise KeyError
    assert names(tmp_path) == []


def test_everybody_may_read_what_new_files_may_be_read_by(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with atomic_folder(tmp_path / "model") as (building, _):
            (building / "inner").mkdir()
            (building / "inner" / "weights").touch(0o600)
    finally:
        os.umask(before)
    modes = [oct(path.stat().st_mode & 0o777) for path in (tmp_path / "model", *sorted((tmp_path / "model").rglob("*")))]
    assert modes == ["0o755", "0o755", "0o644"]


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from midflight.models.atomic import atomic_folder\n"
        "with atomic_folder(Path(sys.argv[1])) as (building, _):\n"
        "    (building / 'weights').write_text('half'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "model")], check=False).returncode == -9
    left = names(tmp_path)
    assert len(left) == 1 and left[0].startswith(".model.part-")
    with atomic_folder(tmp_path / "model") as (building, _):
        assert names(tmp_path) == [building.name] != left
    assert names(tmp_path) == ["model"]


def test_of_two_that_make_the_same_folder_the_first_to_end_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Directory not empty"), atomic_folder(tmp_path / "model") as (slow, _):
        (slow / "weights").write_text("slow")
        with atomic_folder(tmp_path / "model") as (quick, _):
            assert names(tmp_path) == sorted([slow.name, quick.name])
            (quick / "weights").write_text("quick")
    assert names(tmp_path) == ["model"] and (tmp_path / "model" / "weights").read_text() == "quick"


def test_a_full_disk_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"making '{tmp_path / 'model'}': No space left on device; free some space")):  # noqa: SIM117
        with atomic_folder(tmp_path / "model"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert names(tmp_path) == []


def test_a_place_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="see that it can be written to"), atomic_folder(tmp_path / "file" / "model"):
        pass


def test_room_is_asked_for_where_the_folder_will_be(tmp_path: Path) -> None:
    check_room(tmp_path / "not" / "there", 1)
    with pytest.raises(ConfigError, match=r"it takes 1,000,000,000,000 MB, and [\d,]+ MB are free there"):
        check_room(tmp_path / "not" / "there", 10**18)
