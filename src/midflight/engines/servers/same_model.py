"""Whether a server holds the model that we mean, as far as its folder can be read from here."""

from __future__ import annotations

from pathlib import Path

from midflight.errors import EngineError, ModelNotFound
from midflight.models.sizes import ModelSizes, sizes_of

_OF_THE_SHAPES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


def check_same_model(theirs: str, ours: Path, *, url: str) -> None:
    """`EngineError` where they certainly differ: our weights would not fit, and a token id outside its vocabulary kills SGLang."""
    found, wanted = _sizes(Path(theirs)), _sizes(ours)
    if found is None or wanted is None:
        return
    for name in _OF_THE_SHAPES:
        if getattr(found, name) != getattr(wanted, name):
            raise EngineError(
                f"attaching to {url}: it serves {theirs!r}, whose {name} is {getattr(found, name)}, and {str(ours)!r} has "
                f"{getattr(wanted, name)}; start the server with the same model, or give its model to Midflight (--model, model.path)."
            )


def _sizes(folder: Path) -> ModelSizes | None:
    """`None` where it cannot be read: on another machine, or named as a repository."""
    try:
        return sizes_of(folder) if folder.is_absolute() else None
    except (ModelNotFound, OSError):
        return None
