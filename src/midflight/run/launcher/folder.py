"""A run's folder: what lies in it that is worth keeping, which process holds it, and what a new run removes.

A run that could go on, or that has finished, is deleted only by `--overwrite`. One process holds the folder at a time: the lock is the
system's, on the file `lock`, which the parts that write into the folder inherit, so it ends with the last of them however they die. What
the file says is for people, and for whoever comes after a crash.
"""

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import msgspec

from midflight.archive.holder import LOCK, Holder, holder_of, start_of
from midflight.config.dump import as_toml
from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.observe.journal import write_whole
from midflight.observe.machine import MACHINE, machine
from midflight.trajectories.pairs import shard_stores

CONFIG = "config.toml"
ROWS = "data.jsonl"
"""What a Python program gave as data, an object a line."""
PRODUCTS = (
    "endpoint.json",
    "metrics.jsonl",
    "timeline.jsonl",
    MACHINE,
    "summary.json",
    "plot.png",
    "store.sqlite",
    "store.sqlite-wal",
    "store.sqlite-shm",
    "evaluations.sqlite",
    "evaluations.sqlite-wal",
    "evaluations.sqlite-shm",
    "published",
    "view.json",
    ROWS,
)
TRACKED = ("shards", "trackers", "tensorboard", "wandb", "mlruns", "trackio")
MODELS = ("checkpoints", "first", "start", "reference", "model", "adapter", "weights")
LOGS = "logs"
ENDING_SECONDS = 5.0
"""For the parts of a launcher that was killed to end: they are asked to at once, and end by themselves after half of it."""


def kept(folder: Path) -> str | None:
    """What a new run would delete there, in words; none where nothing is worth keeping."""
    if (folder / "model").exists() or (folder / "adapter").exists():
        return "a finished run"
    if can_go_on(folder):
        return "a run that can go on"
    journal = folder / "metrics.jsonl"
    return "the numbers of a run" if journal.is_file() and journal.stat().st_size else None


def can_go_on(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("version-*"))


def check_kept(config: Config, *, resume: bool, overwrite: bool, resumable: bool = True) -> None:
    """`ConfigError` unless a run may begin or go on in its folder. Reads only.

    `resumable`: whether the command has `--resume`.
    """
    folder = Path(config.run.folder)
    check_free(folder)
    if resume and overwrite:
        raise ConfigError("--resume goes on with the run in the folder, --overwrite deletes it: give one of them.")
    if resume:
        if not can_go_on(folder):
            raise ConfigError(f"resuming {folder}: there is no checkpoint in it; leave out --resume to start anew.")
        if (began := 1 + len(shard_stores(folder))) != config.gateway.shards:
            raise ConfigError(
                f"resuming {folder}: it began with {began} gateways, and gateway.shards is {config.gateway.shards}; set it to {began}."
            )
        return
    if (found := kept(folder)) is None:
        return
    if not overwrite:
        going_on = "--resume to go on with it, " if resumable else ""
        raise ConfigError(
            f"{folder} holds {found}, which is kept. Give {going_on}--overwrite to delete it and start anew, or --folder for another place."
        )
    for key, model in (("model.path", config.model.path), ("distillation.teacher", config.distillation.teacher)):
        if model is not None and any(model.resolve().is_relative_to((folder / name).resolve()) for name in MODELS):
            raise ConfigError(f"{key} is {model}, which --overwrite would delete; give --folder for another place.")


def prepare(folder: Path, config: Config, *, resume: bool) -> None:
    """A new run starts in a clean folder; only what an earlier run made is removed. Its whole configuration is kept there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            clear(folder)
            shutil.rmtree(folder / LOGS, ignore_errors=True)
        (folder / "metrics.jsonl").touch()
        write_whole(folder / CONFIG, as_toml(config).encode())
        write_whole(folder / MACHINE, msgspec.json.format(msgspec.json.encode(machine()), indent=2) + b"\n")
    except OSError as error:
        raise unwritable(folder, error) from error


def clear(folder: Path) -> None:
    """Removes what a run made, but for its logs: after a crash they say why."""
    for name in PRODUCTS:
        (folder / name).unlink(missing_ok=True)
    for name in (*MODELS, *TRACKED):
        shutil.rmtree(folder / name, ignore_errors=True)


def num_bytes_of_run(folder: Path) -> int:
    """Of what a run leaves there that is written anew: a new one deletes it, one that goes on replaces it."""
    return sum(path.stat().st_size for name in MODELS for path in (folder / name).rglob("*") if path.is_file())


def unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"writing to {folder}: {error.strerror} ({error.filename}); choose another run.folder, or make it writable.")


# --- Who holds it -----------------------------------------------------------------------------------------------------


def check_free(folder: Path) -> None:
    """`ConfigError` when another living process holds it."""
    if (holder := holder_of(folder)) is not None and holder.lives and holder.pid != os.getpid():
        raise _in_use(folder, str(holder))


@contextmanager
def held(folder: Path, say: Callable[[str], None]) -> Generator[FileIO]:
    """Holds the folder, which is made. Yields the lock, for the processes that write there too.

    `ConfigError` names who holds it already. What a killed process left is taken over, and `say` hears of it.
    """
    path, is_new = folder / LOCK, not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(path)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        check_free(folder)
        if (left := holder_of(folder)) is not None:
            say(f"{folder} is taken over from {left}, which ended without giving it back.")
        holder = Holder(os.getpid(), start_of(os.getpid()), time.strftime("%Y-%m-%d %H:%M:%S"), " ".join(["midflight", *sys.argv[1:3]]))
        lock.truncate(0)
        lock.write(msgspec.json.encode(holder))
        yield lock
    finally:
        if _is_file(path, lock) and (holder := holder_of(folder)) is not None and holder.pid == os.getpid():
            path.unlink(missing_ok=True)
        lock.close()
        if is_new:
            with suppress(OSError):
                folder.rmdir()  # where nothing was written


def _locked(path: Path) -> FileIO:
    """Waits for the last parts of a launcher that is gone, at most `ENDING_SECONDS`. A living holder is refused at once."""
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        lock = FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file(path, lock):
                return lock
            lock.close()  # the one before removed it in the meantime
        except BlockingIOError:
            lock.close()
            holder = holder_of(path.parent)
            if holder is not None and holder.lives:
                raise _in_use(path.parent, str(holder)) from None
            if time.monotonic() > deadline:
                raise _in_use(path.parent, f"what {holder or 'a process'} left behind when it ended: {_users(path)}") from None
            time.sleep(0.05)


def _in_use(folder: Path, whom: str) -> ConfigError:
    return ConfigError(f"{folder} is in use by {whom}; wait for its end, stop it, or give --folder (--set run.folder=) for another place.")


def _is_file(path: Path, file: FileIO) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _users(path: Path) -> str:
    """Numbers of the processes that have the file open."""
    found: set[str] = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if link.samefile(path):
                found.add(link.parts[2])
    return f"process {', '.join(sorted(found, key=int)) or 'unknown'}"
