"""What killed runs leave in memory and temporary folders: the next run of anyone removes it, and nothing that is in use."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from midflight.run import scratch
from midflight.run.scratch import remove_left, scratch_folder, segment_name
from midflight.weights.transports import memory_files
from midflight.weights.transports.memory_files import SHARED

HOLDER = """
import sys, time
from midflight.run.scratch import scratch_folder
with scratch_folder(sys.argv[1]) as folder:
    (folder / "engine0" / "0").mkdir(parents=True)
    print(folder, flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(name: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process of its own with a scratch folder, killed at the end."""
    child = subprocess.Popen([sys.executable, "-c", HOLDER, name], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child, child.stdout:
        yield child, Path(child.stdout.readline().strip())
        child.kill()


def test_runs_in_different_folders_share_no_name_and_one_keeps_its_own(tmp_path: Path) -> None:
    assert segment_name(tmp_path / "a") != segment_name(tmp_path / "b")
    assert segment_name(tmp_path / "a") == segment_name(tmp_path / "x" / ".." / "a")
    assert segment_name(tmp_path).startswith("midflight-")


def test_a_run_removes_what_killed_runs_of_other_folders_left_and_nothing_that_a_living_one_holds(tmp_path: Path) -> None:
    with holder(segment_name(tmp_path / "killed")) as (child, left), holder(segment_name(tmp_path / "living")) as (_, held):
        assert left.parent == held.parent == SHARED
        remove_left()
        assert left.is_dir() and held.is_dir()
        child.kill()
        child.wait()
        assert left.is_dir()
        remove_left()
        assert not left.exists() and (held / "engine0" / "0").is_dir()


def test_a_scratch_folder_is_the_processs_own_until_it_is_left() -> None:
    with scratch_folder() as one, scratch_folder() as other:
        remove_left()
        assert one != other and one.is_dir() and other.is_dir() and not list(one.iterdir())
        (one / "ranks").write_text("where ranks meet")
    assert not one.exists() and not other.exists()


def test_a_folder_that_was_taken_before_it_was_locked_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def taken_once(*, prefix: str, suffix: str, dir: Path) -> str:
        made.append(Path(mkdtemp(prefix=prefix, suffix=suffix, dir=dir)))
        if len(made) == 1:
            remove_left()
        return str(made[-1])

    mkdtemp = tempfile.mkdtemp
    monkeypatch.setattr(scratch.tempfile, "mkdtemp", taken_once)
    with scratch_folder() as folder:
        assert folder == made[1] and folder.is_dir() and not made[0].exists()


def test_without_room_in_memory_it_lies_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_files, "SHARED", tmp_path / "missing")
    with scratch_folder() as folder:
        assert folder.parent == Path(tempfile.gettempdir())


def test_what_only_looks_like_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_files, "SHARED", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "shm" / "midflight-a.scratch").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "shm" / "midflight-b.scratch").write_text("a file")
    (tmp_path / "shm" / "another.scratch").mkdir()
    remove_left()
    assert (tmp_path / "elsewhere").is_dir() and len(list((tmp_path / "shm").iterdir())) == 3
