"""What a foreign trainer does with weights: each version is a safetensors file of its own, which it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from midflight.types import Version, WeightManifest
from midflight.weights.transports.posted_files import manifest_of
from midflight.weights.transports.publisher import Fill, Publisher, copied, filled


class PostedFiles(Publisher):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def publish(self, version: Version, tensors: Mapping[str, Tensor], fill: Fill = copied) -> WeightManifest:
        if fill is not copied:
            tensors = filled(tensors, fill)
        path = self._folder / f"{version}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        return manifest_of(path, version=version, fitting=lambda specs: specs)

    def release(self, version: Version) -> None:
        """Does nothing: a foreign trainer keeps its files for as long as it wants."""

    def close(self) -> None:
        for path in self._folder.glob("*.safetensors"):
            path.unlink()
