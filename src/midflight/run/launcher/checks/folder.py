"""Checks that a run may begin or go on in its folder, and that there is room. Everything here reads
only.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from midflight.config import derived
from midflight.config.disk import disk_bytes, first_disk_bytes, spilled_bytes
from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.observe.readable import size
from midflight.run.launcher import replaced_files
from midflight.run.launcher.checks.check import Caller, Finding, Plan, ok, warning
from midflight.run.launcher.checks.model import check_same_model
from midflight.run.launcher.folder import GIVEN_ROWS, can_go_on, kept, num_bytes_of_run, places_of
from midflight.run.launcher.folder_lock import check_free
from midflight.trajectories.pairs import check_local, shard_stores, store_path
from midflight.weights.transports.memory_files import SHARED, shared_free


def run_folder(plan: Plan) -> Iterator[Finding]:
    """Checks that the run may begin or go on in its folder. A run that is kept there is only a
    warning where nothing is started and neither `--resume` nor `--overwrite` is given.
    """
    if plan.caller is Caller.START or plan.resume or plan.overwrite:
        check_run_folder(
            plan.config,
            resume=plan.resume,
            overwrite=plan.overwrite,
            trains=plan.trains,
        )
        if plan.resume:
            check_same_model(plan.config)
        return
    try:
        check_free(plan.folder)
        _check_nothing_kept(plan.folder, trains=plan.trains)
    except ConfigError as error:
        yield warning("run.folder", str(error))
    _check_apart(plan.config, plan.folder, gives_rows=False)


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
    began = 1 + len(shard_stores(folder))
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


def disk(plan: Plan) -> Iterator[Finding]:
    """Says what is free where the folder is, or will be. Raises `ConfigError` unless models and
    checkpoints have room there.
    """
    folder = plan.folder.absolute()
    there = next(place for place in (folder, *folder.parents) if place.is_dir())
    if not os.access(there, os.W_OK):
        raise ConfigError(
            f"run.folder is {folder}, and {there} cannot be written to; choose another "
            "run.folder, or make it writable."
        )
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
