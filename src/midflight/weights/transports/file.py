"""Publishing through a folder that trainer and engines both see: one safetensors file per version."""

from __future__ import annotations

import contextlib
import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Self, cast

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from midflight.errors import ConfigError
from midflight.models.fingerprint import fingerprint_views
from midflight.types import TensorSpec, Version, WeightManifest
from midflight.weights.manifest import views

KEEP = 2
"""Files kept: the version being served and the one being staged."""


class FilePublisher:
    """Writes `<version>.safetensors` under another name, then renames it: a reader sees a whole file or none.

    Nothing is synced to disk: after a power cut the trainer publishes again. Older files than the newest `KEEP` are removed at
    each publish; an engine that still had one open reads on, one that comes later is told and rejoins at the current version.
    """

    def __init__(self, folder: Path, *, threads: int = 1) -> None:
        self._folder, self._threads = folder, threads

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        path = self._folder / f"{version:08d}.safetensors"
        partial = self._folder / ".publishing.partial"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, partial)
            specs = read_specs(partial)
            digest = _digest(partial, specs, self._threads)
            partial.rename(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"publishing version {version} to {str(self._folder)!r}: {error}; give a writable folder with room."
            ) from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
        self._remove_old()
        return WeightManifest(version, digest, "file", str(path), specs)

    def release(self, version: Version) -> None:
        """Nothing to do: what is kept is decided by age."""

    def close(self) -> None:
        for path in self._published():
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _published(self) -> list[Path]:
        return sorted(p for p in self._folder.glob("*.safetensors") if p.stem.isdigit())

    def _remove_old(self) -> None:
        for path in self._published()[:-KEEP]:
            path.unlink(missing_ok=True)


def read_specs(path: Path) -> tuple[TensorSpec, ...]:
    """Where the tensors of a safetensors file lie; offsets from the beginning of the file.

    Format: eight bytes with the header's length N (little endian), N bytes of JSON, then the data that its offsets count from.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = cast(dict[str, dict[str, object]], json.loads(file.read(length)))
    specs: list[TensorSpec] = []
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = cast(list[int], entry["data_offsets"])
            shape = tuple(cast(list[int], entry["shape"]))
            specs.append(TensorSpec(name, cast(str, entry["dtype"]), shape, 8 + length + start, end - start))
    return tuple(specs)


def _digest(path: Path, specs: tuple[TensorSpec, ...], threads: int) -> str:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as whole:
        parts = views(specs, whole)
        try:
            return fingerprint_views(specs, parts, threads=threads)
        finally:
            for part in parts.values():
                part.release()
