"""The publisher through memory shared by the processes of one machine: files under /dev/shm, or in
another folder where /dev/shm has no room.

It does not use `multiprocessing.shared_memory`, whose resource tracker removes the segment when any
process that opened it ends.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from midflight.errors import ConfigError
from midflight.models.sizes import fingerprint
from midflight.types import Version, WeightManifest
from midflight.weights.manifest import MAX_HELD, extent, layout
from midflight.weights.transports.kinds import SHARED_MEMORY
from midflight.weights.transports.memory_files import MemoryFile, reserve
from midflight.weights.transports.publisher import (
    Fill,
    Publisher,
    check_slot,
    copied,
    copy_into,
    named_shapes,
)


class SharedMemoryPublisher(Publisher):
    """A file for each version that may be fetched. The live version is one of them, because engines
    that rejoin fetch it.

    A file is overwritten, or removed, only after `release` of its version. With `num_slots` held,
    `publish` raises `SlotBusy`. The end of the handover of v + 1 releases v, so a trainer that
    meets `SlotBusy` waits for that. Each file is locked while its publisher lives (see
    `memory_files.remove_stale`).
    """

    def __init__(
        self,
        name: str,
        *,
        num_slots: int = MAX_HELD,
        reuses: bool = True,
        folder: Path | None = None,
        spare: int = 0,
        threads: int = 1,
    ) -> None:
        """`name` begins the files' names. They lie in `folder` if /dev/shm is missing, or has no
        room for them and `spare` bytes more.

        `reuses`: all versions have one size. Then all files are reserved at the first publication,
        and used again, because fresh memory costs a page fault for every page.
        """
        if not name or "/" in name:
            raise ConfigError(
                f"publishing weights: {name!r} cannot begin a file name; use letters, digits and "
                "dashes."
            )
        self._name = name
        self._num_slots = num_slots
        self._reuses = reuses
        self._folder = folder
        self._spare = spare
        self._threads = threads
        self._held: dict[Version, MemoryFile] = {}
        self._free: list[MemoryFile] = []

    def publish(
        self, version: Version, tensors: Mapping[str, Tensor], fill: Fill = copied
    ) -> WeightManifest:
        """Copies each tensor once into a free file, then takes the fingerprint, which takes half as
        long as the copy.
        """
        check_slot(version, self._held, num_slots=self._num_slots)
        specs = layout(named_shapes(tensors))
        file = self._taken(max(1, extent(specs)))
        self._held[version] = file
        copy_into(file.memory, specs, tensors, fill)
        with memoryview(file.memory) as view:
            digest = fingerprint(specs, view, threads=self._threads)
        return WeightManifest(version, digest, SHARED_MEMORY, str(file.path), specs)

    def release(self, version: Version) -> None:
        """See `Publisher`. An engine that is reading a file that is removed can finish, because its
        memory lives until then.
        """
        file = self._held.pop(version, None)
        if file is None:
            return
        if self._reuses:
            self._free.append(file)
        else:
            file.remove()

    def close(self) -> None:
        """Removes the files. Their memory lives until engines that are reading them, and a
        publication in another thread, have finished.
        """
        for file in [*self._held.values(), *self._free]:
            file.remove()
        self._held.clear()
        self._free.clear()

    def _taken(self, num_bytes: int) -> MemoryFile:
        """A file of this size that no version holds."""
        for file in [file for file in self._free if len(file.memory) != num_bytes]:
            self._free.remove(file)
            file.remove()
        number = self._num_slots - len(self._held) if self._reuses else 1
        while len(self._free) < number:
            self._free.append(
                reserve(self._name, num_bytes, folder=self._folder, spare=self._spare)
            )
        return self._free.pop()
