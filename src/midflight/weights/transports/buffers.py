"""Buffers in the publisher's own process, for the transports that send from there."""

import mmap

from midflight.types import Version
from midflight.weights.transports.publisher import check_slot


class StandingBuffers:
    """The memory of versions that wait in the publisher's own process. Memory that was in use costs
    no page faults, so the buffer of a released version is used again.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._held: dict[Version, mmap.mmap] = {}
        self._free: list[mmap.mmap] = []

    def take(self, version: Version, num_bytes: int) -> mmap.mmap:
        """A buffer for the version: that of a released version, if it is as large. Other released
        buffers are freed. Raises `SlotBusy` until a release.
        """
        check_slot(version, self._held, num_slots=self._num_slots)
        size = max(1, num_bytes)
        self._free = [buffer for buffer in self._free if len(buffer) == size]
        if self._free:
            return self._free.pop()
        return mmap.mmap(-1, size)

    def hold(self, version: Version, buffer: mmap.mmap) -> None:
        """Says that the buffer holds the version from now on."""
        self._held[version] = buffer

    def release(self, version: Version) -> None:
        """Says that the version's buffer may be used again. Idempotent."""
        if version in self._held:
            self._free.append(self._held.pop(version))

    def clear(self) -> None:
        self._held.clear()
        self._free.clear()
