"""Publishing through a folder that trainer and engines both see: one safetensors file per version."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from midflight.errors import ConfigError
from midflight.types import Version, WeightManifest
from midflight.weights.transports.publish import MAX_HELD
from midflight.weights.transports.published_file import digest, read_specs


class FilePublisher:
    """Writes `<version>.safetensors` under another name, then renames it: a reader sees a whole file or none.

    Nothing is synced to disk: after a power cut the trainer publishes again. Older files than the newest `keep` are removed at
    each publish; an engine that still had one open reads on, one that comes later is told and rejoins at the current version.
    """

    def __init__(self, folder: Path, *, keep: int = MAX_HELD, threads: int = 1) -> None:
        self._folder, self._keep, self._threads = folder.absolute(), keep, threads

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        path = self._folder / f"{version:08d}.safetensors"
        partial = self._folder / ".publishing.partial"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, partial)
            specs = read_specs(partial)
            hashed = digest(partial, specs, threads=self._threads)
            partial.rename(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"publishing version {version} to {str(self._folder)!r}: {error}; give a writable folder with room."
            ) from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
        self._remove_old()
        return WeightManifest(version, hashed, "file", str(path), specs)

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
        for path in self._published()[: -self._keep]:
            path.unlink(missing_ok=True)
