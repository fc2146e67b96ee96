"""I8: the store off the run's disk, and its copies: a checkpoint and its copy are one pair, and whichever machine goes on loses no prompt."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from midflight.archive.store_reader import copy_in_words, reading
from midflight.errors import ConfigError, StoreFailed
from midflight.trainer.folders import CheckpointState, draft_of, finish, latest_checkpoint
from midflight.trainer.folders import begin as begin_checkpoint
from midflight.trajectories import increments, pairs
from midflight.trajectories.increments import INCREMENTS
from midflight.trajectories.pairs import (
    check_local,
    copied_at,
    copy_name,
    copy_store,
    drafted,
    file_system,
    go_on,
    newest_copy,
    readable,
    shelve,
    store_path,
)
from midflight.trajectories.segments import SEGMENTS
from midflight.trajectories.store import Store
from midflight.types import Batch, GroupKey
from midflight.types.facts import Admitted, Checkpointed, GroupFinished, Leased, Stepped, TrajectoryKept

from .making import group, key, task


class Run:
    """One machine's end of a run: its store on a disk of its own, and the folder that all machines share."""

    def __init__(self, shared: Path, disk: Path) -> None:
        self.folder, self.disk = shared, disk
        shared.mkdir(exist_ok=True)
        self.path = store_path(shared, disk)

    def open(self) -> Store:
        return Store(self.path, run="tests", segments=self.folder / SEGMENTS)

    def step(self, version: int) -> None:
        """A group is finished and trained by the step that makes `version`."""
        with closing(self.open()) as store:
            made, (_, index) = group(key(version)), store.next_position()
            assert index in (0, version), f"position {index} at version {version}"
            store.apply(Admitted(made.key, task(version)))
            for one in made.trajectories:
                store.apply(TrajectoryKept(one, {}, {}))
            store.apply(GroupFinished(made, version))
            store.apply(Leased(Batch(version, version - 1, (made,)), {}, {}, {}))
            store.apply(Stepped(version, version, started=0.0, ended=1.0, num_tokens=2, metrics={}))

    def save(self, version: int, *, keep: int = 2, beside: Callable[[Path], bool] | None = None) -> bool:
        """As trainer and rollout process do it."""
        root = self.folder / "checkpoints"

        def pair(draft: Path) -> bool:
            with closing(self.open()) as store:
                store.copied(version)
                store.has_increment(copy_store(store.path, drafted(self.folder, version)))
            drafted(self.folder, version).replace(draft / copy_name(version))
            return True

        begin_checkpoint(root, version)
        (draft_of(root, version) / "rank-00000.safetensors").write_bytes(b"weights %d" % version)
        made = finish(root, CheckpointState(version, version, 0, (), "", 1), keep=keep, beside=beside or pair)
        if made:
            with closing(self.open()) as store:
                store.apply(Checkpointed(version))
        return made

    def groups(self) -> list[int]:
        with closing(sqlite3.connect(self.path)) as found:
            return [index for (index,) in found.execute("SELECT position FROM groups ORDER BY position")]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made of a copy for a reader lies among temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "shared", tmp_path / "disk")


def test_a_copy_is_the_store_of_one_moment_and_writing_goes_on_while_it_is_made(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.step(1)
    writer = run.open()
    for number in range(100, 150):
        writer.apply(Admitted(GroupKey(0, number), task(number)))
    writer.copied(1)
    between: list[int] = []

    def write() -> None:
        number = 200 + len(between)
        between.append(number)
        done = threading.Thread(target=lambda: writer.apply(Admitted(GroupKey(0, number), task(1))))
        done.start()
        done.join(10)
        assert not done.is_alive(), "the writer does not wait for the copy"

    connect = sqlite3.connect

    def watched(path: object, **options: object) -> sqlite3.Connection:
        connection = connect(path, **options)  # type: ignore[call-overload]
        if str(path).endswith(".writing"):
            connection.set_progress_handler(write, 100)
        return connection

    copy = drafted(run.folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(increments.sqlite3, "connect", watched)
        made = copy_store(run.path, copy)
    writer.close()
    assert len(between) > 20 and len(run.groups()) == 51 + len(between)
    restored = tmp_path / "restored.sqlite"
    increments.restore(made.name, run.folder / INCREMENTS, restored)
    with closing(sqlite3.connect(restored)) as found:
        assert found.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        seen = [index for (index,) in found.execute("SELECT position FROM groups ORDER BY position")]
    before = [1, *range(100, 150)]
    assert seen[: len(before)] == before
    # the writer's first groups may come before the copy's first look
    later = seen[len(before) :]
    assert later == between[: len(later)] and len(later) < len(between) / 2
    assert [path.name for path in (run.folder / INCREMENTS).iterdir()] == [f"{made.name:016x}.sqlite"]


def test_i8_a_lost_machine_costs_what_a_lost_trainer_costs(run: Run, tmp_path: Path) -> None:
    for version in (1, 2):
        run.step(version)
    assert run.save(2)
    run.step(3)
    other = Run(run.folder, tmp_path / "other")
    assert go_on(run.folder, run.disk) is None and run.groups() == [1, 2, 3], "the same machine goes on from its store"
    said = go_on(other.folder, other.disk)
    assert said is not None and "a copy of version 2" in said and other.groups() == [1, 2]
    other.step(3)
    assert go_on(other.folder, other.disk) is None and other.groups() == [1, 2, 3], "once it is there, it is not copied again"
    assert other.save(3)
    said = go_on(run.folder, run.disk)
    assert said is not None and "older" in said and run.groups() == [1, 2, 3] and copied_at(run.path) == 3
    assert list(run.disk.glob("*.older.sqlite")), "what is replaced is kept"
    with closing(run.open()) as store:
        assert len(store.groups_after(2)) == 1 and store.groups_after(3) == ()


def test_a_whole_copy_of_an_older_midflight_is_read_and_the_run_goes_on_from_it(run: Run, tmp_path: Path) -> None:
    run.step(1)

    def whole(draft: Path) -> bool:
        with closing(sqlite3.connect(run.path)) as store, closing(sqlite3.connect(draft / "store-1.sqlite")) as copy:
            store.execute("INSERT INTO numbers VALUES ('copied', 1)")
            store.commit()
            store.backup(copy)
        return True

    assert run.save(1, beside=whole)
    other = Run(run.folder, tmp_path / "other")
    copy = newest_copy(run.folder)
    assert copy is not None and readable(run.folder, other.disk) == copy.path
    said = go_on(other.folder, other.disk)
    assert said is not None and "a copy of version 1" in said and other.groups() == [1]
    other.step(2)
    assert other.save(2)
    third = Run(run.folder, tmp_path / "third")
    go_on(third.folder, third.disk)
    assert third.groups() == [1, 2]


def test_a_reader_elsewhere_reads_of_each_copy_what_is_new(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = increments._add  # pyright: ignore[reportPrivateUsage]

    def watched(link: increments._Link, *others: Any) -> None:  # pyright: ignore[reportPrivateUsage]
        read.append(f"{link.name:016x}")
        real(link, *others)

    monkeypatch.setattr(increments, "_add", watched)
    names: list[str] = []
    for version in (1, 2, 3):
        run.step(version)
        run.save(version)
        copy = newest_copy(run.folder)
        assert copy is not None
        names.append(copy.path.read_text().strip())
        for _ in range(2):
            with closing(sqlite3.connect(readable(run.folder, tmp_path / "elsewhere"))) as file:
                assert file.execute("SELECT COUNT(*) FROM groups").fetchone() == (version,)
    assert read == names


def test_another_users_folder_among_temporary_files_is_not_written_to(run: Run, tmp_path: Path) -> None:
    run.step(1)
    run.save(1)
    (tmp_path / f"midflight-copies-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"midflight-copies-{os.getuid()}").chmod(0o777)
    with pytest.raises(StoreFailed, match="other users can write there"):
        readable(run.folder, tmp_path / "elsewhere")


def test_stores_of_runs_that_went_on_elsewhere_are_removed_from_the_disk_that_they_left(run: Run, tmp_path: Path) -> None:
    """Nobody goes back to them. Those of other runs stay, and so does what cannot be read."""
    other, still = Run(run.folder, tmp_path / "other"), Run(tmp_path / "still", run.disk)
    for one in (run, still):
        pairs.claim(one.path, one.folder)
        one.step(1)
        assert one.save(1)
    assert pairs.remove_left(run.disk, but=still.path) == [], "the run may come back to it"
    go_on(other.folder, other.disk)
    other.step(2)
    assert pairs.remove_left(run.disk, but=still.path) == [] and other.save(2)
    assert pairs.remove_left(run.disk, but=run.path) == [], "whoever asks looks at its own itself"
    run.disk.joinpath("midflight-0.sqlite").write_text("no store")
    run.disk.joinpath("midflight-0.run").write_text(str(run.folder))
    assert pairs.remove_left(run.disk, but=still.path) == [run.path]
    assert not list(run.disk.glob(f"{run.path.stem}*")) and still.path.with_suffix(".run").exists()
    assert pairs.remove_left(run.disk, but=still.path) == [] and still.groups() == [1]


def test_what_a_run_that_came_back_has_kept_of_its_own_store_is_removed_when_it_starts_there_again(run: Run, tmp_path: Path) -> None:
    run.step(1)
    assert run.save(1)
    other = Run(run.folder, tmp_path / "other")
    go_on(other.folder, other.disk)
    other.step(2)
    assert other.save(2)
    pairs.claim(run.path, run.folder)
    go_on(run.folder, run.disk)
    (kept,) = run.disk.glob("*.older.sqlite")
    assert pairs.remove_left(run.disk, but=run.path) == [kept] and run.groups() == [1, 2]


def test_a_store_of_an_earlier_run_in_the_same_folder_is_not_taken_for_this_ones(run: Run, tmp_path: Path) -> None:
    """It has more versions; but the folder was written anew on another machine."""
    for version in (1, 2, 3):
        run.step(version)
    assert run.save(3)
    shutil.rmtree(run.folder / "checkpoints")
    other = Run(run.folder, tmp_path / "other")
    other.step(1)
    assert other.save(1) and (copied_at(run.path), newest_copy(run.folder) is not None) == (3, True)
    said = go_on(run.folder, run.disk)
    assert said is not None and "an earlier run's" in said and run.groups() == [1]


def test_a_store_that_a_new_run_has_moved_away_comes_back_with_the_run_that_it_is_of(run: Run) -> None:
    for version in (1, 2):
        run.step(version)
    assert run.save(2)
    run.step(3)
    shelve(run.path)
    assert not run.path.exists()
    shelve(run.path)  # of nothing
    run.step(1)  # by a new run, which makes no checkpoint
    said = go_on(run.folder, run.disk)
    assert said is not None and "is its own again" in said
    assert run.groups() == [1, 2, 3], "with what came after the copy"
    assert go_on(run.folder, run.disk) is None


def test_the_store_moves_off_the_runs_folder_and_back(run: Run) -> None:
    Run(run.folder, run.folder).step(1)
    plain = store_path(run.folder, None)
    Run(run.folder, run.folder).path.replace(plain)
    assert go_on(run.folder, None) is None
    said = go_on(run.folder, run.disk)
    assert said is not None and run.groups() == [1]
    run.step(2)
    run.save(2)
    said = go_on(run.folder, None)
    assert said is not None and "older" in said and copied_at(plain) == 2


def test_without_store_and_copy_a_run_that_has_made_steps_is_refused(run: Run, tmp_path: Path) -> None:
    run.step(1)
    run.save(1, beside=lambda draft: True)
    with pytest.raises(ConfigError, match=r"its store is not at .*the checkpoint has no copy of it"):
        go_on(run.folder, tmp_path / "other")


def test_i8_at_every_instant_of_a_checkpoint_latest_names_a_whole_pair(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Death(BaseException):
        pass

    run.step(1)
    run.save(1)
    run.step(2)
    instants = 0
    while True:
        left = [instants]

        def dying(real: Callable[..., object], left: list[int] = left) -> Callable[..., object]:
            def call(*arguments: object, **named: object) -> object:
                left[0] -= 1
                if left[0] < 0:
                    raise Death
                return real(*arguments, **named)

            return call

        with monkeypatch.context() as patch:
            for owner, name in ((Path, "rename"), (Path, "replace"), (Path, "write_bytes"), (os, "fsync"), (shutil, "rmtree")):
                patch.setattr(owner, name, dying(getattr(owner, name)))
            try:
                run.save(2, keep=1)
                break
            except Death:
                instants += 1
        folder, copy = latest_checkpoint(run.folder / "checkpoints"), newest_copy(run.folder)
        assert folder is not None and copy is not None and copy.path.parent == folder, "they move together"
        assert (folder / "rank-00000.safetensors").read_bytes() == b"weights %d" % copy.version
        restored = tmp_path / f"restored-{instants}.sqlite"
        copy.restore(restored)
        with closing(Store(restored, run=None)) as store:
            assert copied_at(restored) == copy.version and store.next_position() == (0, copy.version + 1)
        assert go_on(run.folder, run.disk) is None, "the store is never older than a copy of it"
    assert instants >= 10 and newest_copy(run.folder) is not None
    assert not list(run.folder.glob(".store-*")) and len(list((run.folder / "checkpoints").glob("version-*"))) == 1


def test_a_full_disk_costs_the_copy_and_the_pair_before_stays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.step(1)
    run.save(1)
    for version in range(2, 12):
        run.step(version)
    connect = sqlite3.connect
    copy = drafted(run.folder, 11)
    with closing(run.open()) as store:
        store.copied(11)

    def small(path: object, **options: object) -> sqlite3.Connection:
        connection = connect(path, **options)  # type: ignore[call-overload]
        if str(path).endswith(".writing"):
            connection.execute("PRAGMA max_page_count = 3")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(increments.sqlite3, "connect", small)
        with pytest.raises(StoreFailed, match="free some space"):
            copy_store(run.path, copy)
    assert not list(run.folder.glob(".store-*")) and len(list((run.folder / INCREMENTS).iterdir())) == 1
    assert run.save(11, beside=lambda draft: False) is False
    found = newest_copy(run.folder)
    assert found is not None and found.version == 1 and not list((run.folder / "checkpoints").glob(".writing-*"))


def test_another_machine_sees_the_copy_and_its_age(run: Run, tmp_path: Path) -> None:
    run.step(1)
    run.save(1)
    (run.folder / "config.toml").write_text(f'[run]\nstore_folder = "{tmp_path / "elsewhere"}"\n')
    copy = newest_copy(run.folder)
    assert copy is not None
    before = copy.path.stat().st_mtime - 180
    os.utime(copy.path, (before, before))
    with reading(run.folder) as store:
        assert store.ask("SELECT COUNT(*) FROM groups") == [(1,)]
    said = copy_in_words(run.folder)
    assert said is not None and "version 1" in said and "3 min" in said
    (run.folder / "config.toml").write_text(f'[run]\nstore_folder = "{run.disk}"\n')
    assert copy_in_words(run.folder) is None


MOUNTS = """\
22 1 0:21 / / rw - ext4 /dev/vda rw
30 22 0:30 / /home rw,relatime shared:1 - nfs4 server:/home rw
31 30 0:31 / /home/disk rw - xfs /dev/vdb rw
32 22 0:32 / /with\\040space rw - fuse.sshfs host:/ rw
33 22 0:33 / /layers rw - fuse.fuse-overlayfs overlay rw
34 22 0:34 / /over rw - ext4 /dev/vdc rw
35 34 0:35 / /over rw - lustre mgs:/scratch rw
"""


def test_a_store_on_a_file_system_of_a_network_is_refused_by_the_options_name(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    kinds = {
        "/tmp": "ext4",
        "/home/me/runs": "nfs4",
        "/home/disk/x": "xfs",
        "/with space": "fuse.sshfs",
        "/over/x": "lustre",
        "/homes": "ext4",
    }
    assert {folder: file_system(Path(folder), mounts=mounts) for folder in kinds} == kinds
    for kind, refused in (("nfs4", True), ("cifs", True), ("fuse.sshfs", True), ("fuse.fuse-overlayfs", False), ("ext4", False)):
        mounts.write_text(f"22 1 0:21 / / rw - {kind} what rw\n")
        if refused:
            with pytest.raises(ConfigError, match=rf"file system of a network \({kind}\).*set run.store_folder"):
                check_local(tmp_path / "not" / "there" / "store.sqlite", mounts=mounts)
        else:
            check_local(tmp_path / "store.sqlite", mounts=mounts)
    check_local(tmp_path / "store.sqlite", mounts=tmp_path / "none")
    with pytest.raises(ConfigError, match="give an absolute path"):
        store_path(tmp_path, Path("here"))
