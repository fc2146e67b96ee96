"""Exporting a model with its tokenizer as a folder that `transformers` and inference servers load."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from transformers import PreTrainedModel

from midflight.errors import ConfigError, ModelNotFound
from midflight.models.load import save_model

_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
_WEIGHT_NAMES = ("config.json", "generation_config.json")


def export_model(model: PreTrainedModel, tokenizer_folder: Path, dest: Path, *, merged: bool = False) -> None:
    """Writes weights, configuration and the tokenizer's files to `dest`: complete or not at all. For adapters see `save_model`.

    The folder is built beside `dest` and renamed into place; an earlier export there is replaced. A crash leaves the earlier
    export or none, never a part. `ConfigError` when `dest` holds something that is not a model folder.
    """
    _check(tokenizer_folder, dest)
    dest.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    try:
        building.chmod(0o755)
        _copy_tokenizer(tokenizer_folder, building)
        save_model(model, building, merged=merged)
        _replace(building, dest)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _check(tokenizer_folder: Path, dest: Path) -> None:
    if not (tokenizer_folder / "tokenizer_config.json").is_file():
        raise ModelNotFound(
            f"exporting to {str(dest)!r}: {str(tokenizer_folder)!r} has no tokenizer_config.json; give the tokenizer's folder."
        )
    if dest.exists() and not (dest / "config.json").is_file() and not (dest.is_dir() and not any(dest.iterdir())):
        raise ConfigError(f"exporting to {str(dest)!r}: it exists and is no model folder; move it away or choose another place.")


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Everything that belongs to the tokenizer: all files of its folder but weights and the model's configuration."""
    for path in source.iterdir():
        if path.is_file() and path.name not in _WEIGHT_NAMES and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, target / path.name)


def _replace(building: Path, dest: Path) -> None:
    """A full folder cannot be renamed over in one call, so the old one steps aside for a moment."""
    if not dest.exists():
        building.rename(dest)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{dest.name}.old.", dir=dest.parent))
    try:
        dest.rename(old / dest.name)
        try:
            building.rename(dest)
        except OSError:
            (old / dest.name).rename(dest)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
