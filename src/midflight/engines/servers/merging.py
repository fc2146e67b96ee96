"""A model folder with adapters as plain weights, for servers that load those. Imports torch: import it where there are adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from midflight.models.adapter import Adapter
from midflight.models.lora import merged
from midflight.models.names import as_tensors
from midflight.types import TensorSpec

Given = tuple[tuple[TensorSpec, ...], Mapping[str, memoryview]]


def write_merged(model: Path, adapter: Adapter, folder: Path, *, given: Given | None = None) -> None:
    """Writes the base of `model` with `given` adapters merged into it to `folder`, in the base's dtype; without any, with its own."""
    adapters = load_file(adapter.weights) if given is None else as_tensors(*given)
    base: dict[str, Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        base |= load_file(path)
    save_file(merged(base, adapters, scale=adapter.scale), folder / "model.safetensors", metadata={"format": "pt"})
