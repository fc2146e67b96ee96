"""The files of a run's folder, which of them are worth keeping, and which a new run removes.

A run that could go on, or that has finished, is replaced only by `--overwrite`, which sets it aside
until the new one has made its first step.
"""

import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec

from midflight.archive.store_reader import store_folder_of
from midflight.config.dump import as_toml
from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.observe.atomic_write import write_whole
from midflight.observe.lines import StepLine, decode_line
from midflight.observe.machine import MACHINE, machine
from midflight.run.device_lock import DEVICE_LOCK
from midflight.run.launcher import replaced_files
from midflight.run.launcher.replaced_files import ReplacedFiles
from midflight.trajectories.heldout import HELDOUT
from midflight.trajectories.increments import INCREMENTS
from midflight.trajectories.pairs import BESIDE, STORE, shard_folders, store_path
from midflight.trajectories.segments import SEGMENTS

CONFIG = "config.toml"
JOURNAL = "metrics.jsonl"
ROWS = "data.jsonl"
"""The rows that a Python program gave as data, one object a line."""
HELDOUT_ROWS = "data-heldout.jsonl"
"""The rows that it gave to be held out."""
GIVEN_ROWS = (ROWS, HELDOUT_ROWS)
POSTED = "posted.jsonl"
"""The tasks that clients posted. Only `--overwrite` removes this file."""
PRODUCTS = (
    "endpoint.json",
    JOURNAL,
    "timeline.jsonl",
    MACHINE,
    "summary.json",
    "plot.png",
    *(f"{STORE}{beside}" for beside in BESIDE),
    *(f"{HELDOUT}{beside}" for beside in BESIDE),
    "published",
    DEVICE_LOCK,
    "view.json",
)
DRAFTS = (
    *(f".{name}.new" for name in (CONFIG, MACHINE, JOURNAL, "summary.json", "view.json")),
    ".endpoint.json.writing",
)
"""The drafts of files that are written whole. A killed process leaves them behind."""
TRACKED = (SEGMENTS, INCREMENTS, "shards", "trackers", "tensorboard", "wandb", "mlruns", "trackio")
MODELS = ("checkpoints", "first", "start", "reference", "model", "adapter", "weights")
LOGS = "logs"
FAILED_LOGS = "failed-logs"
"""The logs of a run that ended before its first step, if the run before it came back."""


def kept(folder: Path) -> str | None:
    """Returns the valuable contents of the folder that a new run would delete, in words, or None if
    there are none.
    """
    if (folder / "model").exists() or (folder / "adapter").exists():
        return "a finished run"
    if can_go_on(folder):
        return "a run that can go on"
    journal = folder / JOURNAL
    if journal.is_file() and journal.stat().st_size:
        return "the numbers of a run"
    return None


def can_go_on(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("version-*"))


def is_stored(path: Path) -> bool:
    """True if the file is the configuration that a run has stored in its folder."""
    return path.name == CONFIG and (path.parent / JOURNAL).is_file()


def check_stored(path: Path) -> None:
    """Raises `ConfigError` if the stored configuration of a run was cut short: what is missing would
    be read as its default.
    """
    last = f"[{list(Config.model_fields)[-1]}]"
    if last not in path.read_text(errors="replace"):
        raise ConfigError(
            f"{path}: the section {last} is missing, which a run writes last, so that the file was "
            "cut short; restore it from a copy, or give the file that the run began with, and "
            "--folder."
        )


def prepare(folder: Path, config: Config, *, resume: bool) -> None:
    """Cleans the folder for a new run, and writes its whole configuration there. Only files that an
    earlier run made are removed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            clear(folder)
            for name in GIVEN_ROWS:
                (folder / name).unlink(missing_ok=True)
            for name in (LOGS, FAILED_LOGS):
                shutil.rmtree(folder / name, ignore_errors=True)
        (folder / JOURNAL).touch()
        write_whole(folder / CONFIG, as_toml(config).encode())
        described = msgspec.json.format(msgspec.json.encode(machine()), indent=2)
        write_whole(folder / MACHINE, described + b"\n")
    except OSError as error:
        raise unwritable(folder, error) from error


def clear(folder: Path) -> None:
    """Removes the files that a run made. Its logs stay, because they say why it crashed. The files
    that it was given stay too, because a new run begins from them.
    """
    for name in PRODUCTS:
        (folder / name).unlink(missing_ok=True)
    for name in (*MODELS, *TRACKED):
        shutil.rmtree(folder / name, ignore_errors=True)


def num_bytes_of_run(folder: Path) -> int:
    """Returns the size in bytes of the models that a run left there. A new run deletes them, and
    one that goes on replaces them.
    """
    num_bytes = 0
    for name in MODELS:
        for path in (folder / name).rglob("*"):
            if path.is_file():
                num_bytes += path.stat().st_size
    return num_bytes


def unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"writing to {folder}: {error.strerror} ({error.filename}); choose another run.folder, or "
        "make it writable."
    )


# --- A run that another replaces ------------------------------------------------------------------


def places_of(folder: Path, config: Config) -> list[ReplacedFiles]:
    """The places of the run that a run of this configuration would replace: the folder, and its
    store if that is elsewhere.
    """
    names = (*PRODUCTS, *GIVEN_ROWS, POSTED, CONFIG, *DRAFTS, LOGS, *TRACKED, *MODELS)
    own = ReplacedFiles(".", None, names)
    disks = {
        disk
        for disk in (store_folder_of(folder), config.run.store_folder)
        if disk is not None and disk.is_dir()
    }
    places = [own]
    for disk in sorted(disks):
        for gateway in (folder, *shard_folders(folder)):
            places.append(_place_of_store(store_path(gateway, disk)))
    return places


def _place_of_store(store: Path) -> ReplacedFiles:
    names = (f"{store.stem}.overwritten{number or ''}" for number in count())
    free = next(name for name in names if not (store.parent / name).exists())
    return ReplacedFiles(
        str(store.parent), str(store.parent / free), tuple(store.name + beside for beside in BESIDE)
    )


def set_aside(folder: Path, config: Config) -> None:
    """Sets aside the run that the folder holds. Raises `ConfigError` if that is not possible: then
    nothing has changed.
    """
    places = places_of(folder, config)
    replaced_files.check_movable(folder, places)
    try:
        replaced_files.set_aside(folder, places)
    except OSError as error:
        raise ConfigError(
            f"setting aside the run in {folder}: {error.strerror} ({error.filename}); everything "
            "is as it was. Give --folder for another place, or make it movable."
        ) from error


def replaces(folder: Path) -> bool:
    """True if the run in the folder has made its first step. From then on the run before it is no
    longer needed.
    """
    if (folder / "model").exists() or (folder / "adapter").exists():
        return True
    with suppress(FileNotFoundError):
        return any(_is_step(line) for line in (folder / JOURNAL).read_bytes().split(b"\n"))
    return False


def _is_step(line: bytes) -> bool:
    """True if the line reports a step. A line that a crash cut short does not."""
    with suppress(msgspec.DecodeError):
        return isinstance(decode_line(line), StepLine)
    return False


def put_back(folder: Path) -> None:
    """Puts back the run that is aside. Logs of a new one that had begun in its place stay, under
    another name.
    """
    logs = folder / LOGS
    failed = folder / FAILED_LOGS
    if replaced_files.is_aside(folder) and logs.is_dir():
        shutil.rmtree(failed, ignore_errors=True)
        logs.rename(failed)
    replaced_files.put_back(folder)
