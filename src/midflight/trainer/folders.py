"""Checkpoints: folders that are whole or absent. They hold safetensors and JSON, hashed in a
manifest of ours; nothing is unpickled.

root/
  version-00000012/
    store-12.increment       names the copy of the store's index, if it lies elsewhere
                             (`trajectories.pairs`)
    rank-00000.safetensors   rank 0's part of weights and optimiser, and its generators
    rank-00001.safetensors   and rank 1's, ...; any number of ranks can read them
    state.json               version, steps, lineage, the store's cursor, format, number of ranks
    manifest.json            hashes of all these
  latest                     the name of the newest whole folder, written last

Tensors lie in the safetensors layout of torch.distributed.checkpoint (DCP): one file for each rank,
read by any number of ranks. DCP's planners know which part of a tensor is here and which parts of
which files make up another layout. Its collectives are not used: they pickle on sockets, and each
rank knows its own parts without asking. Its writer is not used either: it copies everything twice,
and holds the interpreter's lock for seconds per GB, so that a write in the background would stop
the training.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from midflight.errors import CheckpointCorrupt, ConfigError, naming_file
from midflight.models.permissions import open_to_others
from midflight.trainer.trainer import Fork
from midflight.types import Version

Stored = TypeVar("Stored", bound=msgspec.Struct)


FORMAT = 2
"""Format 1 had one file each for weights, optimiser and generators, whole on one rank."""


class CheckpointState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `state.json`."""

    version: Version
    num_steps: int
    num_skipped: int
    lineage: tuple[Fork, ...]
    cursor: str
    """The store's position when these weights were final. It is opaque to the trainer."""
    num_ranks: int
    """The number of ranks that wrote it. Any number may read it."""
    format: int = FORMAT
    chain: str = ""
    """The digest of the steps up to these weights (`types.digests`)."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """SHA-256 of each file, in hexadecimal."""

    files: dict[str, str]


class _Format(msgspec.Struct, frozen=True):
    format: int = 1


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def latest_checkpoint(root: Path) -> Path | None:
    """The checkpoint that `latest` names; `None` if it names none that is there."""
    try:
        name = (root / "latest").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return next((folder for folder in checkpoints(root) if folder.name == name), None)


def checkpoints(root: Path) -> list[Path]:
    """The checkpoints of the run as it is, newest first."""
    return sorted(root.glob("version-*"), reverse=True)


def newest_whole(root: Path, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from, verified: the one that `latest` names, else the newest that is
    whole, and then `say` gets a sentence. `None` before the first. Raises `CheckpointCorrupt` if
    none is whole.

    It is the newest afterwards: see `set_newest`.
    """
    found = checkpoints(root)
    named = latest_checkpoint(root)
    wrong: list[str] = []
    if found and named is None:
        wrong.append(f"{root / 'latest'} names no checkpoint.")
    for folder in found:
        if named is not None and folder > named:
            continue
        try:
            verified(folder)
        except CheckpointCorrupt as error:
            wrong.append(str(error))
            continue
        if wrong:
            say(
                f"{' '.join(wrong)} The run goes on from {folder.name}: what was trained since "
                "then waits to be trained again."
            )
        set_newest(root, folder)
        return folder
    if found:
        raise CheckpointCorrupt(
            f"{' '.join(wrong)} No checkpoint in {root} is whole: put back a copy of one, or start "
            "anew with --overwrite."
        )
    return None


def set_newest(root: Path, folder: Path) -> None:
    """Goes back to a checkpoint. Newer ones get other names: later steps are not based on them."""
    if latest_checkpoint(root) != folder:
        _name_latest(root, folder)
    for one in checkpoints(root):
        if one > folder:
            one.rename(_free_name(root, f"abandoned-{one.name}"))
    sync(root)


def _name_latest(root: Path, folder: Path) -> None:
    _write(root / ".latest", folder.name.encode())
    (root / ".latest").replace(root / "latest")


def version_of(folder: Path) -> int:
    """The version in the folder's name, which may end in the number of a repetition
    (`_free_name`).
    """
    number, _, _ = folder.name.split("version-")[1].partition("-")
    return int(number)


def begin(root: Path, version: int) -> None:
    """Makes an empty draft for `version`. Drafts that other processes left half written are
    removed: one process at a time writes here.
    """
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".writing-*"):
        shutil.rmtree(leftover)
    draft_of(root, version).mkdir()


def draft_of(root: Path, version: int) -> Path:
    """The draft of a version, which every rank knows without being told."""
    return root / f".writing-version-{version:08d}"


def finish(
    root: Path, state: CheckpointState, *, keep: int, beside: Callable[[Path], bool] | None = None
) -> bool:
    """Makes the draft, whose shards are all on disk, the newest checkpoint; a crash at any instant
    leaves `latest` on a whole one (I8).

    `beside` puts files that belong to the checkpoint into the draft. If it returns false, there is
    no checkpoint, and the earlier ones stay.
    """
    draft = draft_of(root, state.version)
    if beside is not None and not beside(draft):
        shutil.rmtree(draft)
        return False
    _write(draft / "state.json", msgspec.json.encode(state))
    manifest = Manifest({name: _hash(draft / name) for name in _files(state)})
    _write(draft / "manifest.json", msgspec.json.encode(manifest))
    sync(draft)
    final = _free_name(root, f"version-{state.version:08d}")
    draft.rename(final)
    sync(root)
    _name_latest(root, final)
    sync(root)
    _remove_old(root, final, keep=keep)
    return True


def verified(folder: Path) -> CheckpointState:
    """Raises `CheckpointCorrupt` unless every file is there, as it was written, and no other;
    raises `ConfigError` if it is of another format.
    """
    manifest = _decode(folder / "manifest.json", Manifest)
    for name, written in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise corrupt(path, "is missing")
        if written != _hash(path):
            raise corrupt(path, "does not match the hash in manifest.json")
    state = state_of(folder)
    there = {"state.json", *manifest.files}
    there.update(path.name for path in folder.glob("*.safetensors"))
    for name in sorted(there ^ _files(state)):
        what = "is not of this checkpoint" if name in there else "is not in manifest.json"
        raise corrupt(folder / name, what)
    return state


def state_of(folder: Path) -> CheckpointState:
    """Reads `state.json` of a checkpoint. Raises `CheckpointCorrupt` if that cannot be read, and
    `ConfigError` if it is of another format.
    """
    found = _decode(folder / "state.json", _Format).format
    if found != FORMAT:
        raise ConfigError(
            f"checkpoint {folder} has format {found}, this version of midflight reads {FORMAT}. "
            "Go on with the version that wrote it, or start anew with --overwrite."
        )
    return _decode(folder / "state.json", CheckpointState)


def corrupt(path: Path, what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"Checkpoint file {path} {what}.")


def sync(path: Path) -> None:
    """Waits for the disk, so that a rename is never ahead of the files that it names."""
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
    with naming_file(path):
        path.write_bytes(content)
    sync(path)


def _free_name(root: Path, name: str) -> Path:
    """A version saved a second time goes beside the first: `latest` may still point there, so that
    one must not vanish before it moves.
    """
    free = root / name
    for again in itertools.count(1):
        if not free.exists():
            break
        free = root / f"{name}-{again:03d}"
    return free


def _remove_old(root: Path, newest: Path, *, keep: int) -> None:
    """Keeps `newest`, and of the others the `keep - 1` of the highest versions. A folder loses its
    name before it is removed: none is ever half a checkpoint.
    """
    others = [folder for folder in checkpoints(root) if folder != newest]
    for old in others[max(0, keep - 1) :]:
        shutil.rmtree(old.rename(root / f".writing-{old.name}"))


Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor by name."""


def write_shards(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes this rank's part of each tensor (its shard of a DTensor), with its place in the
    whole.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors))
    parts: dict[str, Tensor] = {}
    places: dict[str, dict[str, list[int]]] = {}
    for item in planner.create_local_plan().items:
        part: Any = planner.resolve_data(item)
        parts[item.index.fqn] = part.contiguous()
        if item.tensor_data:
            places[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
    save_file(parts, path, metadata={"DCP_SHARDING_INFO": json.dumps(places)})
    open_to_others(path)


class Shards:
    """The tensors in the files of a folder. Opening it reads headers only."""

    def __init__(self, folder: Path) -> None:
        """Raises `ValueError` if parts of a tensor are missing. If a file is none of safetensors,
        its own error is raised.
        """
        self._reader = HuggingFaceStorageReader(str(folder))
        self._metadata = self._reader.read_metadata()
        self.tensors = {
            name: found
            for name, found in self._metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        """Whole shapes and dtypes by name."""
        for name, found in self.tensors.items():
            if sum(prod(chunk.sizes) for chunk in found.chunks) < prod(found.size):
                raise ValueError(f"parts of tensor {name!r} are missing")

    def named(self, prefix: str) -> Shapes:
        """Returns shapes and dtypes by the part of the name after `prefix`."""
        return {
            name[len(prefix) :]: (tuple(found.size), found.properties.dtype)
            for name, found in self.tensors.items()
            if name.startswith(prefix)
        }

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Overwrites each tensor (this rank's shard of a DTensor) with the one of its name. It
        reads no more than that takes.
        """
        planner = DefaultLoadPlanner()
        planner.set_up_planner(dict(into), self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
