"""Export of a model with its tokenizer into a folder, which is complete or not there at all."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from transformers import PreTrainedModel

from midflight.errors import ConfigError, ModelNotFound
from midflight.models.load import save_model
from midflight.models.permissions import open_to_others

_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
_WEIGHT_NAMES = ("config.json", "generation_config.json")


def export_model(
    model: PreTrainedModel, tokenizer_folder: Path, dest: Path, *, merged: bool = False
) -> None:
    """Writes weights, configuration and the tokenizer's files to `dest`: complete or not at all.
    For adapters see `save_model`.

    The folder is built beside `dest` and renamed into place, where it replaces an earlier export. A
    crash leaves the earlier export or none, never a part. Raises `ConfigError` if `dest` holds
    something that is not a model folder.
    """
    _check(tokenizer_folder, dest)
    dest.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    try:
        _copy_tokenizer(tokenizer_folder, building)
        save_model(model, building, merged=merged)
        open_to_others(building)
        _replace(building, dest)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _check(tokenizer_folder: Path, dest: Path) -> None:
    if not (tokenizer_folder / "tokenizer_config.json").is_file():
        raise ModelNotFound(
            f"exporting to {str(dest)!r}: {str(tokenizer_folder)!r} has no tokenizer_config.json; "
            "give the tokenizer's folder."
        )
    if not dest.exists() or (dest / "config.json").is_file():
        return
    is_empty_folder = dest.is_dir() and not any(dest.iterdir())
    if not is_empty_folder:
        raise ConfigError(
            f"exporting to {str(dest)!r}: it exists and is no model folder; move it away or choose "
            "another place."
        )


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the files of the tokenizer's folder, except for weights and the model's
    configuration.
    """
    for path in source.iterdir():
        is_of_model = path.name in _WEIGHT_NAMES or path.name.endswith(_WEIGHT_SUFFIXES)
        if path.is_file() and not is_of_model:
            shutil.copyfile(path, target / path.name)


def _replace(building: Path, dest: Path) -> None:
    """Puts the new folder in place. A rename cannot replace a full folder, so the old one is moved
    aside for a moment.
    """
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
