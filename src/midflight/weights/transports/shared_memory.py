"""Publishers through memory shared by the processes of one machine: files under /dev/shm, or in
another folder where /dev/shm has no room.

They do not use `multiprocessing.shared_memory`, whose resource tracker removes the segment when any
process that opened it ends.
"""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from midflight.errors import ConfigError
from midflight.models.sizes import fingerprint
from midflight.types import Version, WeightManifest
from midflight.weights.manifest import MAX_DELTAS, MAX_HELD, aligned, extent, layout
from midflight.weights.transports.kinds import SHARED_MEMORY
from midflight.weights.transports.memory_files import reserve
from midflight.weights.transports.publisher import Publisher, check_slot, copy_into, named_shapes


class SharedMemoryPublisher(Publisher):
    """A file with a standing slot for each version that may be fetched. The live version is one of
    them, because engines that rejoin fetch it.

    A slot is overwritten only after `release` of its version. Until then `publish` raises
    `SlotBusy`. The end of the handover of v + 1 releases v, so a trainer that meets `SlotBusy`
    waits for that. The file is reserved in full at the first publish, and locked while its
    publisher lives (see `memory_files.remove_stale`).
    """

    def __init__(
        self, name: str, *, folder: Path | None = None, spare: int = 0, threads: int = 1
    ) -> None:
        """`name` begins the file's name. The file lies in `folder` if /dev/shm is missing, or has
        no room for it and `spare` bytes more.
        """
        if not name or "/" in name:
            raise ConfigError(
                f"publishing weights: {name!r} cannot begin a file name; use letters, digits and "
                "dashes."
            )
        self._name = name
        self._folder = folder
        self._spare = spare
        self._threads = threads
        self._versions: list[Version | None] = [None] * MAX_HELD
        self._slot_bytes = 0
        self._path: Path | None = None
        self._file: int | None = None
        self._map: mmap.mmap | None = None

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """Copies each tensor once into a free slot, then takes the fingerprint, which takes half as
        long as the copy.
        """
        slot = self._free_slot(version)
        shapes = named_shapes(tensors)
        shared, path = self._open(extent(layout(shapes)), version)
        specs = layout(shapes, start=slot * self._slot_bytes)
        copy_into(shared, specs, tensors)
        with memoryview(shared) as view:
            digest = fingerprint(specs, view, threads=self._threads)
        self._versions[slot] = version
        return WeightManifest(version, digest, SHARED_MEMORY, str(path), specs)

    def release(self, version: Version) -> None:
        if version in self._versions:
            self._versions[self._versions.index(version)] = None

    def close(self) -> None:
        """Removes the file. Its memory lives until engines that are reading it, and a publication
        in another thread, have finished.
        """
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._file is not None:
            os.close(self._file)
        self._path = None
        self._map = None
        self._file = None
        self._versions = [None] * len(self._versions)

    def _free_slot(self, version: Version) -> int:
        held = [one for one in self._versions if one is not None]
        check_slot(version, held, num_slots=len(self._versions))
        return self._versions.index(None)

    def _open(self, num_bytes: int, version: Version) -> tuple[mmap.mmap, Path]:
        """The mapped file, which is made at the first publish."""
        if self._map is None or self._path is None:
            self._slot_bytes = aligned(max(1, num_bytes), mmap.PAGESIZE)
            total = self._slot_bytes * len(self._versions)
            self._path, self._file = reserve(
                self._name, total, folder=self._folder, spare=self._spare
            )
            self._map = mmap.mmap(self._file, total)
        if num_bytes > self._slot_bytes:
            raise ConfigError(
                f"publishing version {version}: {num_bytes} bytes do not fit the slot of "
                f"{self._slot_bytes}; all versions must have the same tensors."
            )
        return self._map, self._path


class SegmentPublisher(Publisher):
    """A file for each version, which is kept until its release, for `DeltaPublisher`.

    Fresh memory costs a page fault for every page, so slots that are used again suit versions of
    one size better. Each file is locked while its publisher lives (see
    `memory_files.remove_stale`).
    """

    def __init__(
        self, name: str, *, folder: Path | None = None, spare: int = 0, threads: int = 1
    ) -> None:
        """The parameters are those of `SharedMemoryPublisher`."""
        self._name = name
        self._folder = folder
        self._spare = spare
        self._threads = threads
        self._files: dict[Version, tuple[Path, int]] = {}

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        check_slot(version, self._files, num_slots=MAX_HELD + MAX_DELTAS)
        specs = layout(named_shapes(tensors))
        size = max(1, extent(specs))
        path, file = reserve(self._name, size, folder=self._folder, spare=self._spare)
        self._files[version] = (path, file)
        with mmap.mmap(file, 0) as shared:
            copy_into(shared, specs, tensors)
            with memoryview(shared) as view:
                digest = fingerprint(specs, view, threads=self._threads)
        return WeightManifest(version, digest, SHARED_MEMORY, str(path), specs)

    def release(self, version: Version) -> None:
        """Removes the version's file. An engine that is reading it can finish, because its memory
        lives until then.
        """
        if version in self._files:
            path, file = self._files.pop(version)
            path.unlink(missing_ok=True)
            os.close(file)

    def close(self) -> None:
        for version in tuple(self._files):
            self.release(version)
