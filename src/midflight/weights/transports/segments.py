"""Publishing through shared memory where versions differ in size: a file for each, as large as it, gone at its release."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from torch import Tensor

from midflight.errors import SlotBusy
from midflight.models.fingerprint import fingerprint
from midflight.types import Version, WeightManifest
from midflight.weights.manifest import extent, layout
from midflight.weights.transports.publish import named_shapes
from midflight.weights.transports.shared_memory import copy_into, folders, reserve


class SegmentPublisher:
    """Keeps every version until its release; whoever publishes bounds how many those are.

    Fresh memory costs a page fault for every page, so versions of one size are better off in standing slots. Each file is locked
    while its publisher lives (see `stale.remove_stale`).
    """

    def __init__(self, name: str, *, folder: Path | None = None, threads: int = 1) -> None:
        """As `SharedMemoryPublisher`."""
        self._name, self._folder, self._threads = name, folder, threads
        self._files: dict[Version, tuple[Path, int]] = {}

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        if version in self._files:
            raise SlotBusy(f"publishing version {version}: it is published already; numbers are never reused.")
        specs = layout(named_shapes(tensors))
        path, file = self._files[version] = reserve(folders(self._folder), self._name, max(1, extent(specs)))
        with mmap.mmap(file, 0) as shared:
            copy_into(shared, specs, tensors)
            with memoryview(shared) as view:
                digest = fingerprint(specs, view, threads=self._threads)
        return WeightManifest(version, digest, "shared_memory", str(path), specs)

    def release(self, version: Version) -> None:
        """An engine that is reading the file finishes, for its memory lives until then."""
        if version in self._files:
            path, file = self._files.pop(version)
            path.unlink(missing_ok=True)
            os.close(file)

    def close(self) -> None:
        for version in tuple(self._files):
            self.release(version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
