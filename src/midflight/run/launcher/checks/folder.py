"""Checks that a run may begin or go on in its folder, and that there is room. Everything here reads
only.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from midflight.archive.ledger import ledger_of
from midflight.archive.store_reader import file_of
from midflight.config import derived
from midflight.config.disk import disk_bytes, first_disk_bytes, spilled_bytes
from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.observe.alarms import UNMASK
from midflight.observe.history import read_journal
from midflight.observe.readable import size
from midflight.observe.summary import summary_of
from midflight.run.launcher import replaced_files
from midflight.run.launcher.checks.check import Caller, Finding, Plan, ok, warning
from midflight.run.launcher.checks.model import check_same_model
from midflight.run.launcher.folder import (
    GIVEN_ROWS,
    JOURNAL,
    can_go_on,
    kept,
    num_bytes_of_run,
    places_of,
)
from midflight.run.launcher.folder_lock import check_free
from midflight.run.launcher.permissions import group_id
from midflight.trajectories.database import check_whole
from midflight.trajectories.pairs import check_local, shard_folders, store_path
from midflight.types import Kind, Reason
from midflight.weights.transports.memory_files import SHARED, shared_free


def run_folder(plan: Plan) -> Iterator[Finding]:
    """Checks that the run may begin or go on in its folder. A run that is kept there is only a
    warning where nothing is started and neither `--resume` nor `--overwrite` is given.
    """
    if plan.config.run.share_with_group:
        group_id(plan.config.run.share_with_group)
    if plan.caller is Caller.START or plan.resume or plan.overwrite:
        check_run_folder(
            plan.config,
            resume=plan.resume,
            overwrite=plan.overwrite,
            trains=plan.trains,
        )
        if plan.resume:
            check_same_model(plan.config)
            _check_stores(plan.config)
        return
    try:
        check_free(plan.folder)
        _check_nothing_kept(plan.folder, trains=plan.trains)
    except ConfigError as error:
        yield warning("run.folder", str(error))
    _check_apart(plan.config, plan.folder, gives_rows=False)


def _check_stores(config: Config) -> None:
    """Raises `StoreCorrupt` if a store here is damaged: a run that finds it later has changed its
    journal by then.
    """
    folder = Path(config.run.folder)
    for gateway in (folder, *shard_folders(folder)):
        store = store_path(gateway, config.run.store_folder)
        if store.is_file():
            check_whole(store)


def check_run_folder(
    config: Config, *, resume: bool, overwrite: bool, trains: bool = True, gives_rows: bool = False
) -> None:
    """Raises `ConfigError` unless a run may begin or go on in its folder.

    `trains` is true if the trainer is ours, so that there is a `--resume`. `gives_rows` is true if
    a program brings the rows that the folder gets.
    """
    folder = Path(config.run.folder)
    check_free(folder)
    if resume and overwrite:
        raise ConfigError(
            "--resume goes on with the run in the folder, --overwrite replaces it: give one of "
            "them."
        )
    if resume:
        _check_resumable(config, folder)
        return
    if not overwrite:
        _check_nothing_kept(folder, trains=trains)
    _check_apart(config, folder, gives_rows=gives_rows)
    found = kept(folder)
    if found is not None:
        replaced_files.check_movable(folder, places_of(folder, config))
        _check_room(config, folder, found, trains=trains)


def _check_nothing_kept(folder: Path, *, trains: bool) -> None:
    found = kept(folder)
    if found is not None:
        going_on = "--resume to go on with it, " if trains else ""
        raise ConfigError(
            f"{folder} holds {found}, which is kept. Give {going_on}--overwrite to replace it, or "
            "--folder for another place."
        )


def _check_resumable(config: Config, folder: Path) -> None:
    if not can_go_on(folder):
        raise ConfigError(
            f"resuming {folder}: there is no checkpoint in it; leave out --resume to start anew."
        )
    began = 1 + len(shard_folders(folder))
    if began != config.gateway.shards:
        raise ConfigError(
            f"resuming {folder}: it began with {began} gateways, and gateway.shards is "
            f"{config.gateway.shards}; set it to {began}."
        )


def _check_apart(config: Config, folder: Path, *, gives_rows: bool) -> None:
    """Raises `ConfigError` if a run reads something that it removes when it begins."""
    removed = [(folder / name).resolve() for name in places_of(folder, config)[0].names]
    for key, path in _paths(config.model_dump()):
        if gives_rows and path.parent == folder and path.name in GIVEN_ROWS:
            continue
        if any(path.resolve().is_relative_to(one) for one in removed):
            raise ConfigError(
                f"{key} is {path}, which a new run in {folder} would delete, with --overwrite or "
                "without; give --folder for another place, or move it out of there."
            )


def _paths(value: object, key: str = "") -> Iterator[tuple[str, Path]]:
    """Every file and folder that a dumped configuration names, with its option."""
    if isinstance(value, Path):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in cast("Mapping[str, object]", value).items():
            yield from _paths(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(cast("Sequence[object]", value)):
            yield from _paths(inner, f"{key}.{number}")


def _check_room(config: Config, folder: Path, found: str, *, trains: bool) -> None:
    """Raises `ConfigError` unless there is room for the old run beside the beginning of the new
    one. Both are there until the first step.
    """
    needed = first_disk_bytes(
        config, derived.model_sizes(config.model), trains=trains, shared_free=shared_free()
    )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"{folder} holds {found} of {size(num_bytes_of_run(folder))}, which --overwrite keeps "
            f"until the first step of the new one. By then that takes {size(needed)} more (models, "
            f"a checkpoint), and {size(free)} are free; free some space, give --folder for another "
            "place, or delete the old run yourself."
        )


UNTRAINED_SHARE = 0.05
"""The share of a run's tokens that may be sampled otherwise than the policy before that is marked.
A harness that samples as the run does has nearly none.
"""


def trained_share(plan: Plan) -> Iterator[Finding]:
    """Says which share of the tokens of the run in this folder is trained, and for which reasons
    the rest is not.
    """
    if not file_of(plan.folder, Kind.TRAINING).is_file():
        return
    accounts = ledger_of(plan.folder).accounts
    total = accounts.received_tokens
    if not total:
        return
    num_trained = accounts.trained_tokens + accounts.waiting_tokens
    parts = [f"{num_trained / total:.1%} of {total:,} are trained or will be"]
    masked = Counter(accounts.masked_tokens)
    parts += [f"{number / total:.1%} masked: {why}" for why, number in masked.most_common()]
    dropped = Counter(accounts.dropped_tokens)
    parts += [f"{number / total:.1%} dropped: {why}" for why, number in dropped.most_common()]
    found = "; ".join(parts)
    if masked[Reason.NOT_POLICY_SAMPLED] <= UNTRAINED_SHARE * total:
        yield ok("tokens", found)
        return
    fields = summary_of(plan.folder, read_journal(plan.folder / JOURNAL)).masked_by
    if fields:
        found = f"{found}; by {', '.join(fields)}"
    yield warning("tokens", found, UNMASK)


def _writable(folder: Path, option: str) -> Path:
    """The folder, or the nearest one above it that is there. Raises `ConfigError` unless the rest
    can be made in it.
    """
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(
            f"{option} is {folder}, and {there} is a file; choose another {option}, or move that "
            "file."
        )
    if not os.access(there, os.W_OK) or not shutil.disk_usage(there).free:
        raise ConfigError(
            f"{option} is {folder}, and {there} cannot be written to; choose another {option}, or "
            "make it writable."
        )
    return there


def disk(plan: Plan) -> Iterator[Finding]:
    """Says what is free where the folder is, or will be. Raises `ConfigError` unless models and
    checkpoints have room there.
    """
    folder = plan.folder.absolute()
    there = _writable(folder, "run.folder")
    store_folder = plan.config.run.store_folder
    if store_folder is not None and plan.config.cluster.kind == "local":
        _writable(store_folder, "run.store_folder")
    check_local(store_path(folder, plan.config.run.store_folder))
    sizes = derived.model_sizes(plan.config.model)
    versions = spilled_bytes(plan.config, sizes, shared_free=shared_free())
    needed = disk_bytes(plan.config, sizes) + versions
    free = shutil.disk_usage(there).free + num_bytes_of_run(folder)
    yield ok("disk", f"{size(free)} free in {there}")
    if free < needed:
        spilled = ""
        if versions:
            spilled = (
                f", {size(versions)} of it for versions on their way, for which {SHARED} has "
                "no room (in containers --shm-size)"
            )
        raise ConfigError(
            f"run.folder is {folder}, where {size(free)} are free, and checkpoints and models "
            f"take {size(needed)}{spilled}; free some space, choose another run.folder, or "
            "lower trainer.keep_checkpoints."
        )
