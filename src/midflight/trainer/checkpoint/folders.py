"""Folders that are whole or absent: a draft, hashes, a rename, then `latest`."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from pathlib import Path
from typing import TypeVar

import msgspec

from midflight.errors import CheckpointCorrupt, ConfigError
from midflight.trainer.checkpoint.state import FORMAT, CheckpointState, shard_name

Stored = TypeVar("Stored", bound=msgspec.Struct)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """SHA-256 of each file, in hexadecimal."""

    files: dict[str, str]


class _Format(msgspec.Struct, frozen=True):
    format: int = 1


def latest_checkpoint(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`, `None` if there is none yet."""
    try:
        return root / (root / "latest").read_text().strip()
    except FileNotFoundError:
        return None


def version_of(folder: Path) -> int:
    """By its name, which may end in the number of a repetition (`_free_name`)."""
    return int(folder.name.split("-")[1])


def begin(root: Path, version: int) -> None:
    """Makes an empty draft for `version`. What others left half written is removed: one process at a time writes here."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".writing-*"):
        shutil.rmtree(leftover)
    draft_of(root, version).mkdir()


def draft_of(root: Path, version: int) -> Path:
    """Known to every rank without a word."""
    return root / f".writing-version-{version:08d}"


def finish(root: Path, state: CheckpointState, *, keep: int) -> None:
    """Makes the draft, whose shards are all on disk, the newest checkpoint; a crash at any instant leaves `latest` on a whole one (I8)."""
    draft = draft_of(root, state.version)
    _write(draft / "state.json", msgspec.json.encode(state))
    _write(draft / "manifest.json", msgspec.json.encode(Manifest({name: _hash(draft / name) for name in _files(state)})))
    sync(draft)
    final = _free_name(root, f"version-{state.version:08d}")
    draft.rename(final)
    sync(root)
    _write(root / ".latest", final.name.encode())
    (root / ".latest").replace(root / "latest")
    sync(root)
    _remove_old(root, final, keep=keep)


def verified(folder: Path) -> CheckpointState:
    """`CheckpointCorrupt` unless every file is there, as it was written, and no other; `ConfigError` if it is of another format."""
    manifest = _decode(folder / "manifest.json", Manifest)
    for name, written in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise corrupt(path, "is missing")
        if written != _hash(path):
            raise corrupt(path, "does not match the hash in manifest.json")
    found = _decode(folder / "state.json", _Format).format
    if found != FORMAT:
        raise ConfigError(
            f"checkpoint {folder} has format {found}, this version of midflight reads {FORMAT}. "
            "Go on with the version that wrote it, or start anew without --resume."
        )
    state = _decode(folder / "state.json", CheckpointState)
    there = {"state.json", *manifest.files, *(path.name for path in folder.glob("*.safetensors"))}
    for name in sorted(there ^ _files(state)):
        raise corrupt(folder / name, "is not of this checkpoint" if name in there else "is not in manifest.json")
    return state


def corrupt(path: Path, what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"checkpoint file {path} {what}. Remove {path.parent} and name an older checkpoint, or start anew.")


def sync(path: Path) -> None:
    """Waits for the disk, so that a rename is never ahead of what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(state: CheckpointState) -> set[str]:
    return {"state.json", *(shard_name(rank) for rank in range(state.num_ranks))}


def _decode(path: Path, kind: type[Stored]) -> Stored:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise corrupt(path, f"cannot be read ({error})") from error


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)


def _free_name(root: Path, name: str) -> Path:
    """A version saved a second time goes beside the first: `latest` may still point there, so that one must not vanish before it moves."""
    names = itertools.chain([name], (f"{name}-{again:03d}" for again in itertools.count(1)))
    return next(root / free for free in names if not (root / free).exists())


def _remove_old(root: Path, newest: Path, *, keep: int) -> None:
    """Keeps `newest` and the `keep - 1` of the highest versions beside it. Others lose their name first: none is ever half a checkpoint."""
    others = sorted((folder for folder in root.glob("version-*") if folder != newest), reverse=True)
    for old in others[max(0, keep - 1) :]:
        shutil.rmtree(old.rename(root / f".writing-{old.name}"))
