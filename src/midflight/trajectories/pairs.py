"""Pairs of a checkpoint and a copy of the index of the run's store, and the place of the index
itself, which is called the store here: tokens lie in `segments`, which nobody copies.

The store lies on a disk of the machine that the gateway runs on. Its log of writes (WAL) needs
memory that all processes that open it share. On a network file system it would be lost without a
warning. Each checkpoint gets a copy, made while the store is written to: the name of an increment,
which follows those of the checkpoints before (`increments`). The two are whole or absent, kept and
removed together. So another machine goes on from a pair as this one does from the store.

A checkpoint of an older Midflight has the whole index as one SQLite file. It is read too.
"""

import fcntl
import hashlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from midflight.errors import ConfigError, MidflightError, StoreFailed
from midflight.trajectories.database import BEGUN, COPIED, decoded, look
from midflight.trajectories.increments import (
    INCREMENTS,
    Increment,
    numbers_of,
    restore,
    write_increment,
)
from midflight.trajectories.store_errors import naming, sync
from midflight.types import Version

STORE = "store.sqlite"
BESIDE = ("", "-wal", "-shm", "-journal")
"""Suffixes of the files that belong to a store. A store without its journal, or with another one's,
has other contents than were written.
"""
OWNER = ".run"
"""Suffix of the file beside a store that names its run's folder."""
NAMED = ".increment"
"""Suffix of a copy: the file has the name of an increment."""
WHOLE = ".sqlite"
"""Suffix of the copy of an older Midflight: the file is the whole index."""
NETWORKED = frozenset(
    (
        "nfs",
        "nfs3",
        "nfs4",
        "cifs",
        "smb2",
        "smb3",
        "smbfs",
        "lustre",
        "ceph",
        "glusterfs",
        "beegfs",
        "gpfs",
        "pvfs2",
        "orangefs",
        "afs",
    )
)
"""Types of file system that lie on other machines, as the system names them. All types of `fuse`
count too, except for `LAYERED`.
"""
LAYERED = frozenset(("fuse.fuse-overlayfs", "fuseblk", "fuse.mergerfs"))
"""Types of `fuse` that layer local folders."""


SHARDS = "shards"
"""The folder of a run in which gateways other than the first have their folders, by number."""


def shard_folders(folder: Path) -> list[Path]:
    """The folders of a run's gateways other than the first, in the order of their numbers."""
    found = [path for path in (folder / SHARDS).glob("*") if path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name))


def _run_of(folder: Path) -> Path:
    """The run that a gateway's folder belongs to: itself for the first gateway."""
    is_shard = folder.parent.name == SHARDS and folder.name.isdecimal()
    if is_shard and (folder.parent.parent / "checkpoints").is_dir():
        return folder.parent.parent
    return folder


def pair_folder(folder: Path, checkpoint: Path) -> Path:
    """The folder in a checkpoint that has the copy of the store of the gateway in `folder`."""
    return checkpoint / folder.relative_to(_run_of(folder))


def store_path(folder: Path, store_folder: Path | None) -> Path:
    """The store of the run in `folder`: it lies there, or in `store_folder` under a name that no
    other run has. Raises `ConfigError` if the path would differ from process to process.
    """
    if store_folder is None:
        return folder / STORE
    if not store_folder.is_absolute():
        raise ConfigError(
            f"run.store_folder is {str(store_folder)!r}: give an absolute path, for other programs "
            "look for the store there too."
        )
    return store_folder / f"midflight-{_digest(folder)}.sqlite"


def _digest(folder: Path) -> str:
    return hashlib.blake2b(str(folder.resolve()).encode(), digest_size=6).hexdigest()


def drafted(folder: Path, version: Version) -> Path:
    """A copy that waits for its checkpoint, on the checkpoint's file system."""
    return folder / f".{copy_name(version)}"


def copy_name(version: Version) -> str:
    return f"store-{version}{NAMED}"


def remove(store: Path) -> None:
    """Removes a store, with the files that SQLite keeps beside it."""
    for beside in BESIDE:
        store.with_name(store.name + beside).unlink(missing_ok=True)


def older(store: Path) -> Path:
    """The place of a store after another one has taken its own."""
    return store.with_name(f"{store.stem}.older.sqlite")


def shelve(store: Path) -> None:
    """Puts a store aside, if there is one, to make room for another. Nothing of it is lost."""
    if not store.is_file():
        return
    remove(older(store))
    _move(store, older(store))


def _move(store: Path, to: Path) -> None:
    for beside in BESIDE:
        with suppress(FileNotFoundError):
            store.with_name(store.name + beside).replace(to.with_name(to.name + beside))


# --- Copying --------------------------------------------------------------------------------------


def copy_store(store: Path, copy: Path) -> Increment:
    """Makes a copy of the store, as it is at the beginning. Copy and increment are whole and on the
    disk when this returns; if it raises, there is no copy.

    It blocks, and another process may write to the store meanwhile. Raises `StoreFailed` with the
    remedy.
    """
    for left in copy.parent.glob(".store-*"):
        left.unlink(missing_ok=True)
    made = write_increment(store, copy.parent / INCREMENTS)
    draft = copy.with_name(f"{copy.name}.writing")
    try:
        with naming(draft):
            draft.write_text(f"{made.name:016x}\n")
        sync(draft)
        draft.replace(copy)
        sync(copy.parent)
    finally:
        draft.unlink(missing_ok=True)
    return made


@contextmanager
def _drafted(store: Path) -> Generator[Path]:
    """Yields the place of a draft, which becomes the store if the block is left without an error."""
    draft = store.with_name(f"{store.name}.writing")
    remove(draft)
    try:
        yield draft
        sync(draft)
        draft.replace(store)
        sync(store.parent)
    finally:
        remove(draft)


def _copy_whole(source: Path, store: Path) -> None:
    """Copies a whole store into a file of its own. It blocks."""
    with (
        naming(store),
        closing(look(source)) as there,
        closing(sqlite3.connect(store, isolation_level=None)) as target,
    ):
        target.execute("PRAGMA synchronous = OFF")
        there.backup(target)


def _private_folder() -> Path:
    """A folder among temporary files that no other user can write to. Raises `StoreFailed` if
    another user has it.
    """
    place = Path(tempfile.gettempdir()) / f"midflight-copies-{os.getuid()}"
    with naming(place):
        place.mkdir(mode=0o700, exist_ok=True)
        state = place.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise StoreFailed(
            f"Writing {place}: other users can write there; remove it, or set TMPDIR to a folder "
            "of your own."
        )
    return place


# --- Going on, and looking ------------------------------------------------------------------------


class Copy(msgspec.Struct, frozen=True):
    """A copy of a store that belongs to a checkpoint. `folder` is that of the gateway."""

    path: Path
    version: Version
    folder: Path

    @property
    def age(self) -> float:
        """Seconds since it was made."""
        return max(0.0, time.time() - self.path.stat().st_mtime)

    @property
    def is_whole(self) -> bool:
        return self.path.suffix == WHOLE

    @property
    def increment(self) -> int:
        """The name of the newest increment. Raises `StoreCorrupt` if the file has none."""
        with naming(self.path):
            return decoded(self.path, lambda text: int(text, 16), self.path.read_text())

    @property
    def increments(self) -> Path:
        return self.folder / INCREMENTS

    def numbers(self) -> Mapping[str, int]:
        if self.is_whole:
            return _numbers(self.path) or {}
        return numbers_of(self.increment, self.increments)

    def restore(self, store: Path) -> None:
        """Makes a new store of it."""
        if self.is_whole:
            _copy_whole(self.path, store)
        else:
            restore(self.increment, self.increments, store)

    def to_read(self) -> Path:
        """A file on this machine with the contents of the copy. One that an earlier call has made
        is brought up to date by what came since.
        """
        if self.is_whole:
            return self.path
        name = f"{_digest(self.folder)}.sqlite"
        place = _private_folder()
        here = place / name
        with (place / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            restore(self.increment, self.increments, here)
        return here


def newest_copy(folder: Path) -> Copy | None:
    """The copy of the checkpoint that `latest` names."""
    root = _run_of(folder) / "checkpoints"
    with suppress(OSError, ValueError):
        checkpoint = root / (root / "latest").read_text().strip()
        for path in pair_folder(folder, checkpoint).glob("store-*"):
            if path.suffix in (NAMED, WHOLE):
                return Copy(path, int(path.stem.removeprefix("store-")), folder)
    return None


def oldest_checkpoint(folder: Path, newest: Version) -> Version:
    """The oldest version that a trainer can go back to. `folder` is that of the run, or of one of
    its gateways.
    """
    run = folder.parent.parent if folder.parent.name == "shards" else folder
    there = (run / "checkpoints").glob("version-*")
    return min([newest, *(int(one.name.removeprefix("version-")) for one in there)])


def copied_at(store: Path) -> Version | None:
    """The newest version whose checkpoint has a copy of this store. It is None if there is no
    store, and -1 if it has no copy.
    """
    found = _numbers(store)
    return None if found is None else found.get(COPIED, -1)


def _numbers(store: Path) -> Mapping[str, int] | None:
    if not store.is_file() or not store.stat().st_size:
        return None
    with closing(look(store)) as found, naming(store):
        return dict(found.execute("SELECT name, value FROM numbers").fetchall())


def is_behind(store: Path, copy: Copy) -> bool:
    """True if the run has gone on from a newer copy than this store has, or if the store is of an
    earlier run in the same folder.
    """
    here = _numbers(store)
    if here is None or here.get(COPIED, -1) < copy.version:
        return True
    return here.get(BEGUN) != copy.numbers().get(BEGUN)


def readable(folder: Path, store_folder: Path | None) -> Path:
    """The file to read a run from: its store, or what is made of the copy if that is newer or
    alone.
    """
    copy = copy_instead(folder, store_folder)
    return store_path(folder, store_folder) if copy is None else copy.to_read()


def copy_instead(folder: Path, store_folder: Path | None) -> Copy | None:
    """The newest copy if it is newer than the store, or if the store is not here."""
    copy = newest_copy(folder)
    if copy is not None:
        with suppress(MidflightError):
            return copy if is_behind(store_path(folder, store_folder), copy) else None
    return None


def go_on(folder: Path, store_folder: Path | None) -> str | None:
    """Makes the store ready for a run that goes on from `latest`: its own store if that is there
    and not behind the pair, else the pair's copy.

    Returns a sentence for people if it did something unusual. Raises `ConfigError` if neither is
    there, though steps were made.
    """
    store = store_path(folder, store_folder)
    copy = newest_copy(folder)
    here = copied_at(store)
    if here is not None and (copy is None or not is_behind(store, copy)):
        return None
    if copy is not None and older(store).is_file() and not is_behind(older(store), copy):
        remove(store)
        _move(older(store), store)
        return (
            f"The store at {store} is its own again: a new run that ended early had taken its "
            "place."
        )
    before = folder / STORE
    if copy is None and (store == before or not before.is_file()):
        if store_folder is not None and _num_steps(folder):
            raise ConfigError(
                f"resuming {folder}: its store is not at {store}, and the checkpoint has no copy "
                "of it. Resume on the machine that it ran on, go back to a checkpoint with a copy "
                "by `midflight rollback`, or start anew with --overwrite."
            )
        return None
    said = f"The store at {store} goes on from {before if copy is None else copy.path}"
    if here is not None:
        shelve(store)
        said += (
            f", for it was older than that, or an earlier run's; it is kept as {older(store).name}"
        )
    store.parent.mkdir(parents=True, exist_ok=True)
    remove(store)
    with _drafted(store) as draft:
        if copy is None:
            _copy_whole(before, draft)  # the run had its store in its own folder
        else:
            copy.restore(draft)
    if copy is None:
        return f"{said}."
    return f"{said}, a copy of version {copy.version}: rollouts since then are generated again."


def claim(store: Path, folder: Path) -> None:
    """Writes a note beside a store that names its run, for `remove_left`."""
    store.parent.mkdir(parents=True, exist_ok=True)
    store.with_suffix(OWNER).write_text(str(folder.resolve()))


def remove_left(disk: Path, *, but: Path) -> Sequence[Path]:
    """Removes stores from a disk whose runs have gone on elsewhere from newer copies, and stores
    that a run put aside when it came back. Returns the removed stores.

    `but` is the store of the run that asks. A store that cannot be read, or whose run has no copy
    that can be seen, stays.
    """
    gone: list[Path] = []
    for note in disk.glob(f"*{OWNER}"):
        with suppress(MidflightError, OSError, UnicodeDecodeError):
            store = note.with_suffix(".sqlite")
            copy = newest_copy(Path(note.read_text()))
            if copy is None:
                continue
            for one in (store, older(store)):
                if one != but and one.is_file() and is_behind(one, copy):
                    remove(one)
                    gone.append(one)
            if store in gone:
                note.unlink()
    return gone


class _StepCount(msgspec.Struct, frozen=True):
    num_steps: int = 0


def _num_steps(folder: Path) -> int:
    root = _run_of(folder) / "checkpoints"
    with suppress(OSError, UnicodeDecodeError, msgspec.DecodeError):
        checkpoint = root / (root / "latest").read_text().strip()
        state = (checkpoint / "state.json").read_bytes()
        return msgspec.json.decode(state, type=_StepCount).num_steps
    return 0


# --- Where it may lie -----------------------------------------------------------------------------


def check_local(store: Path, *, mounts: Path = Path("/proc/self/mountinfo")) -> None:
    """Raises `ConfigError` if the store would lie on a network file system."""
    place = store.absolute().parent
    there = next(one for one in (place, *place.parents) if one.is_dir()).resolve()
    kind = file_system(there, mounts=mounts)
    is_foreign_fuse = kind.startswith("fuse") and kind not in LAYERED
    if kind in NETWORKED or is_foreign_fuse:
        raise ConfigError(
            f"the store would lie in {place}, on a file system of a network ({kind}), where its "
            "log of writes is not safe: set run.store_folder to a folder on a disk of this "
            "machine; each checkpoint gets a copy."
        )


def file_system(folder: Path, *, mounts: Path) -> str:
    """The type of the file system that a folder lies on. Empty if the system does not say. If
    mounts lie over each other, the last one counts.
    """
    found = -1
    kind = ""
    with suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            fields = before.split()
            if len(fields) < 5 or not after:
                continue
            point = Path(fields[4].encode().decode("unicode_escape"))  # a blank is written in octal
            if folder.is_relative_to(point) and len(point.parts) >= found:
                found = len(point.parts)
                kind = after.split()[0]
    return kind
