"""Checkpoints: folders that are whole or absent. Safetensors and JSON, hashed in a manifest of ours; nothing is unpickled.

root/version-00000012/model.safetensors       weights by checkpoint name
                      optimizer.safetensors   moments and step counts by parameter name
                      rng.safetensors         state of PyTorch's generators
                      state.json              version, steps, lineage, the store's cursor
                      manifest.json           hashes of the four
root/latest                                   name of the newest whole folder, written last
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from midflight.errors import CheckpointCorrupt, ConfigError
from midflight.models.names import named_tensors
from midflight.trainer.optimizer import named_parameters
from midflight.trainer.trainer import Fork, Trainer
from midflight.types import Version

Stored = TypeVar("Stored", bound=msgspec.Struct)
FILES = ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json")


class CheckpointState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `state.json` holds."""

    version: Version
    num_steps: int
    num_skipped: int
    lineage: tuple[Fork, ...]
    cursor: str
    """Opaque to the trainer: where the store was when these weights were final (DECISIONS 27)."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """SHA-256 of each file, in hexadecimal."""

    files: dict[str, str]


def save_checkpoint(root: Path, trainer: Trainer, *, cursor: str, keep: int) -> Path:
    """Writes the trainer's state and returns its folder; a crash at any instant leaves `latest` on a whole checkpoint (I8)."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".writing-*"):
        shutil.rmtree(leftover)
    final = _free_name(root, f"version-{trainer.version:08d}")
    draft = root / f".writing-{final.name}"
    draft.mkdir()
    _write_files(draft, trainer, cursor=cursor)
    _sync(draft)
    draft.rename(final)
    _sync(root)
    _write(root / ".latest", final.name.encode())
    (root / ".latest").replace(root / "latest")
    _sync(root)
    _remove_old(root, final, keep=keep)
    return final


def latest_checkpoint(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`, `None` if there is none yet."""
    try:
        return root / (root / "latest").read_text().strip()
    except FileNotFoundError:
        return None


def load_checkpoint(folder: Path, trainer: Trainer, *, as_version: Version | None = None) -> CheckpointState:
    """Brings a trainer to a checkpoint, bit for bit. Everything is verified before anything is changed.

    `as_version` names the weights anew where later numbers were handed out before the crash: numbers are never used twice
    (DECISIONS 1), and the lineage records the fork. The returned state is the checkpoint's own.
    """
    _verify(folder)
    state = _decode(folder / "state.json", CheckpointState)
    weights, moments = _load(folder, "model.safetensors"), _load(folder, "optimizer.safetensors")
    _check_same_model(folder, weights, named_tensors(trainer.model))
    if as_version is not None and as_version < state.version:
        raise ConfigError(
            f"checkpoint {folder.name} can't go on as version {as_version}: that number is used. Name one from {state.version} on."
        )
    with torch.no_grad():
        for name, tensor in named_tensors(trainer.model).items():
            tensor.copy_(weights[name])
    _restore_moments(trainer, moments)
    _restore_rng(_load(folder, "rng.safetensors"))
    trainer.version = state.version if as_version is None else as_version
    trainer.num_steps, trainer.num_skipped = state.num_steps, state.num_skipped
    trainer.lineage = state.lineage if trainer.version == state.version else (*state.lineage, Fork(state.version, trainer.version))
    return state


def _write_files(folder: Path, trainer: Trainer, *, cursor: str) -> None:
    state = CheckpointState(trainer.version, trainer.num_steps, trainer.num_skipped, trainer.lineage, cursor)
    save_file(_portable(named_tensors(trainer.model)), folder / "model.safetensors")
    save_file(_portable(_moments(trainer)), folder / "optimizer.safetensors")
    save_file(_rng(), folder / "rng.safetensors")
    _write(folder / "state.json", msgspec.json.encode(state))
    _write(folder / "manifest.json", msgspec.json.encode(Manifest({name: _hash(folder / name) for name in FILES})))
    for name in FILES:
        _sync(folder / name)


def _moments(trainer: Trainer) -> dict[str, Tensor]:
    state = trainer.optimizer.state
    return {f"{key}/{name}": value for name, p in named_parameters(trainer.model) if p in state for key, value in state[p].items()}


def _restore_moments(trainer: Trainer, moments: dict[str, Tensor]) -> None:
    trainer.optimizer.state.clear()
    parameters = dict(named_parameters(trainer.model))
    for path, value in moments.items():
        key, name = path.split("/", 1)
        trainer.optimizer.state[parameters[name]][key] = value.to(parameters[name].device)


def _rng() -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _restore_rng(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _verify(folder: Path) -> None:
    manifest = _decode(folder / "manifest.json", Manifest)
    for name in FILES:
        path = folder / name
        if not path.is_file():
            raise _corrupt(path, "is missing")
        if manifest.files.get(name) != _hash(path):
            raise _corrupt(path, "does not match the hash in manifest.json")


def _check_same_model(folder: Path, stored: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    for name in sorted(stored.keys() | ours.keys()):
        one, other = (f"{list(t[name].shape)} {t[name].dtype}" if name in t else "nothing" for t in (stored, ours))
        if one != other:
            raise ConfigError(
                f"checkpoint {folder} is of another model: it has {one} for {name!r}, this model has {other}. "
                "Give the sizes and dtype the checkpoint was made with, or start in another folder."
            )


def _load(folder: Path, name: str) -> dict[str, Tensor]:
    try:
        return load_file(folder / name)
    except Exception as error:
        raise _corrupt(folder / name, f"cannot be read ({error})") from error


def _decode(path: Path, kind: type[Stored]) -> Stored:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise _corrupt(path, f"cannot be read ({error})") from error


def _corrupt(path: Path, what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"checkpoint file {path} {what}. Remove {path.parent} and name an older checkpoint, or start anew.")


def _portable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _sync(path)


def _sync(path: Path) -> None:
    """Waits for the disk, so that a rename is never ahead of what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free_name(root: Path, name: str) -> Path:
    """A version saved a second time goes beside the first: `latest` may still point there, so that one must not vanish before it moves."""
    names = itertools.chain([name], (f"{name}-{again:03d}" for again in itertools.count(1)))
    return next(root / free for free in names if not (root / free).exists())


def _remove_old(root: Path, newest: Path, *, keep: int) -> None:
    """Keeps `newest` and the `keep - 1` of the highest versions beside it."""
    others = sorted((folder for folder in root.glob("version-*") if folder != newest), reverse=True)
    for old in others[max(0, keep - 1) :]:
        shutil.rmtree(old)
