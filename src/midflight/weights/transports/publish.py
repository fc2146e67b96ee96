"""The trainer's end of a transport: the Protocol of a publisher, and a wrapper of any that
publishes most versions as differences from the one before; and the publisher through memory shared
by the processes of one machine: a file of standing slots under /dev/shm.

Not `multiprocessing.shared_memory`: its resource tracker removes the segment when any process that
opened it ends.
"""

import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from midflight.errors import ConfigError, SlotBusy
from midflight.models.names import dtype_name
from midflight.models.sizes import element_bytes, fingerprint
from midflight.types import Delta, TensorSpec, Version, WeightManifest
from midflight.weights.frames import encode
from midflight.weights.manifest import (
    MAX_DELTAS,
    MAX_HELD,
    aligned,
    extent,
    layout,
    repacked,
    set_aside,
    views,
)
from midflight.weights.transports.files import SHARED, SUFFIX


class Publisher(Protocol):
    """Puts versions where engines can fetch them. Blocking and not thread-safe: the trainer is its
    one caller.
    """

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """Copies the tensors: they may change as soon as this returns."""
        ...

    def release(self, version: Version) -> None:
        """No engine will fetch this version any more. Idempotent; unknown versions are no error."""
        ...

    def close(self) -> None:
        """Removes what was published. Idempotent. A publication under way in another thread is not
        waited for, and may fail.
        """
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


def named_shapes(tensors: Mapping[str, Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, safetensors dtype, shape) of each, as `manifest.layout` takes them."""
    return [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]


WORTH = 0.8
"""Share of the whole size above which a difference is not worth two more passes over the weights on
each side.
"""


class DeltaPublisher:
    """Wraps a publisher that keeps each version until its release.

    A version is whole when it is the first or the `full_every`th since the last whole one, when
    names, shapes or dtypes have changed, and when its difference does not pay: alone more than
    `WORTH` of the whole, or with those before it more than the whole, so that no engine ever reads
    more than twice the size of the weights. Where a first difference does not pay, the rest of the
    period is whole without trying.

    A payload stays published while a version that is not released needs it, and so do the payloads
    that lead to the newest version, because the next difference starts there. What is no longer
    needed is released at the next publication. With versions released in order and at most
    `MAX_HELD` held, that takes four times the memory of the weights at worst (differences as large
    as their whole version, and two whole versions). Where differences are small it takes twice that
    memory after a refresh, and once at other times. In addition the newest version's bytes are kept
    here: once the size of the weights.
    """

    def __init__(self, inner: Publisher, *, full_every: int, threads: int = 1) -> None:
        """`full_every` in versions."""
        if not 2 <= full_every <= MAX_DELTAS + 1:
            raise ConfigError(
                f"publishing differences: full_every is {full_every}; it must be from 2 to "
                f"{MAX_DELTAS + 1}."
            )
        self._inner = inner
        self._full_every = full_every
        self._threads = threads
        self._standing = memoryview(b"")
        """The bytes of the newest version, packed."""
        self._newest: WeightManifest | None = None
        """The version that the next difference starts from; `None` when `_standing` may not be a
        published version.
        """
        self._num_untried = 0
        """Versions to publish whole before a difference is tried again."""
        self._held: dict[Version, WeightManifest] = {}
        self._inside: set[Version] = set()
        """Versions that the inner publisher holds."""

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """Blocks for the comparison, the compression of what changed and one hash of the whole.
        `SlotBusy` until a release.
        """
        self._check(version)
        self._release_unneeded()
        base = self._newest
        self._newest = None
        manifest = (
            self._as_difference(base, version, tensors)
            if base and self._is_due(base, tensors)
            else None
        )
        self._newest = self._held[version] = manifest or self._whole(version, tensors)
        return self._newest

    def release(self, version: Version) -> None:
        """Only noted: a version that nothing needs any more is released at the next publication."""
        self._held.pop(version, None)

    def close(self) -> None:
        self._inner.close()
        self._standing = memoryview(b"")
        self._held = {}
        self._inside = set()
        self._newest = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check(self, version: Version) -> None:
        if version in self._inside:
            raise SlotBusy(
                f"publishing version {version}: it is published already; numbers are never reused."
            )
        if len(self._held) >= MAX_HELD:
            held = ", ".join(map(str, self._held))
            raise SlotBusy(
                f"publishing version {version}: versions {held} are not released; wait until a "
                "handover ends and releases one."
            )

    def _is_due(self, base: WeightManifest, tensors: Mapping[str, Tensor]) -> bool:
        """Whether to try a difference. It is not tried where one as large as the last would be too
        large.
        """
        if self._num_untried:
            self._num_untried -= 1
            return False
        fits = not base.deltas or base.deltas[-1].payload.num_bytes <= _room(base)
        same = {(s.name, s.dtype, s.shape) for s in base.tensors} == set(named_shapes(tensors))
        return fits and same and len(base.deltas) + 1 < self._full_every

    def _as_difference(
        self, base: WeightManifest, version: Version, tensors: Mapping[str, Tensor]
    ) -> WeightManifest | None:
        """Publishes the version as a difference; `None` when that does not pay. Tensors are in the
        base's order, which a transport may have chosen.
        """
        specs = repacked(base.tensors)
        payload = self._payload(specs, tensors, limit=min(_room(base), int(WORTH * _size(specs))))
        if not payload:
            self._num_untried = 0 if base.deltas else self._full_every - 1
            return None
        whole = fingerprint(specs, self._standing, threads=self._threads)
        sent = self._put(version, {"delta": torch.frombuffer(payload, dtype=torch.uint8)})
        delta = Delta(
            base.version, base.fingerprint, sent.location, sent.tensors[0], sent.fingerprint
        )
        return replace(base, version=version, fingerprint=whole, deltas=(*base.deltas, delta))

    def _payload(
        self, specs: tuple[TensorSpec, ...], tensors: Mapping[str, Tensor], *, limit: int
    ) -> bytearray | None:
        """The encoded difference, while the new bytes take the place of the old; `None` as soon as
        it is longer than `limit`.
        """
        payload = bytearray()
        old = views(specs, self._standing)
        for spec in specs:
            new = _bytes_of(tensors[spec.name])
            for frame in encode(old[spec.name], new, width=element_bytes(spec.dtype)):
                payload += frame
                if len(payload) > limit:
                    return None
            old[spec.name][:] = new
        return payload

    def _whole(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        manifest = self._put(version, tensors)
        self._stand(repacked(manifest.tensors), tensors)
        return manifest

    def _stand(self, specs: tuple[TensorSpec, ...], tensors: Mapping[str, Tensor]) -> None:
        if len(self._standing) != max(1, extent(specs)):
            self._standing = set_aside(specs)
        for name, into in views(specs, self._standing).items():
            into[:] = _bytes_of(tensors[name])

    def _put(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        manifest = self._inner.publish(version, tensors)
        self._inside.add(version)
        return manifest

    def _release_unneeded(self) -> None:
        reached = [*self._held.values(), *([self._newest] if self._newest else [])]
        for version in self._inside - {v for manifest in reached for v in _way(manifest)}:
            self._inner.release(version)
            self._inside.remove(version)


def _way(manifest: WeightManifest) -> set[Version]:
    """The versions whose bytes lead to this one."""
    return {manifest.version, *(d.base for d in manifest.deltas)}


def _room(base: WeightManifest) -> int:
    """The most bytes that the next difference may have."""
    return _size(base.tensors) - sum(d.payload.num_bytes for d in base.deltas)


def _size(specs: Iterable[TensorSpec]) -> int:
    return sum(s.num_bytes for s in specs)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's own bytes where it is contiguous and on the CPU, else those of a copy."""
    flat: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return flat


class StandingBuffers:
    """Memory of versions that wait in the publisher's own process: in use it costs no page faults,
    so a released one is used again.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._held: dict[Version, mmap.mmap] = {}
        self._free: list[mmap.mmap] = []

    def take(self, version: Version, num_bytes: int) -> mmap.mmap:
        """That of a released version, if it is as large; others are freed. `SlotBusy` until a
        release.
        """
        if version in self._held:
            raise SlotBusy(
                f"publishing version {version}: it is published already; numbers are never reused."
            )
        if len(self._held) >= self._num_slots:
            held = ", ".join(map(str, self._held))
            raise SlotBusy(
                f"publishing version {version}: versions {held} hold all slots; wait until a "
                "handover ends and releases one."
            )
        self._free = [b for b in self._free if len(b) == max(1, num_bytes)]
        return self._free.pop() if self._free else mmap.mmap(-1, max(1, num_bytes))

    def hold(self, version: Version, buffer: mmap.mmap) -> None:
        """It holds the version from now on."""
        self._held[version] = buffer

    def release(self, version: Version) -> None:
        """Idempotent."""
        if version in self._held:
            self._free.append(self._held.pop(version))

    def clear(self) -> None:
        self._held.clear()
        self._free.clear()


# --- Shared memory --------------------------------------------------------------------------------


class SharedMemoryPublisher:
    """A standing slot for each version that may be fetched; the live version is one, because
    engines that rejoin fetch it.

    A slot is overwritten only after `release` of its version: until then `publish` raises
    `SlotBusy`. The end of the handover of v + 1 is what releases v, so a trainer that meets
    `SlotBusy` waits for that. The file is reserved in full at the first publish, and locked while
    its publisher lives (see `files.remove_stale`).
    """

    def __init__(self, name: str, *, folder: Path | None = None, threads: int = 1) -> None:
        """`name` begins the file's name. `folder` defaults to /dev/shm, or the temporary folder
        where that is missing or too small.
        """
        if not name or "/" in name:
            raise ConfigError(
                f"publishing weights: {name!r} cannot begin a file name; use letters, digits and "
                "dashes."
            )
        self._name = name
        self._folder = folder
        self._threads = threads
        self._versions: list[Version | None] = [None] * MAX_HELD
        self._slot_bytes = 0
        self._path: Path | None = None
        self._file: int | None = None
        self._map: mmap.mmap | None = None

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """One copy of each tensor into a free slot, then its fingerprint, which takes half as long
        as the copy.
        """
        slot = self._free_slot(version)
        shapes = named_shapes(tensors)
        shared, path = self._open(extent(layout(shapes)), version)
        specs = layout(shapes, start=slot * self._slot_bytes)
        copy_into(shared, specs, tensors)
        with memoryview(shared) as view:
            digest = fingerprint(specs, view, threads=self._threads)
        self._versions[slot] = version
        return WeightManifest(version, digest, "shared_memory", str(path), specs)

    def release(self, version: Version) -> None:
        self._versions = [None if v == version else v for v in self._versions]

    def close(self) -> None:
        """Removes the file; its memory lives until engines that are reading it, and a publication
        in another thread, have finished.
        """
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._file is not None:
            os.close(self._file)
        self._path = self._map = self._file = None
        self._versions = [None] * len(self._versions)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _free_slot(self, version: Version) -> int:
        if version in self._versions:
            raise SlotBusy(
                f"publishing version {version}: it is published already; numbers are never reused."
            )
        if None not in self._versions:
            held = ", ".join(map(str, self._versions))
            raise SlotBusy(
                f"publishing version {version}: versions {held} hold all slots; wait until a "
                "handover ends and releases one."
            )
        return self._versions.index(None)

    def _open(self, num_bytes: int, version: Version) -> tuple[mmap.mmap, Path]:
        """The mapped file; made at the first publish."""
        if self._map is None or self._path is None:
            self._slot_bytes = aligned(max(1, num_bytes), mmap.PAGESIZE)
            total = self._slot_bytes * len(self._versions)
            self._path, self._file = reserve(folders(self._folder), self._name, total)
            self._map = mmap.mmap(self._file, total)
        if num_bytes > self._slot_bytes:
            raise ConfigError(
                f"publishing version {version}: {num_bytes} bytes do not fit the slot of "
                f"{self._slot_bytes}; all versions must have the same tensors."
            )
        return self._map, self._path


def folders(given: Path | None) -> list[Path]:
    """Where shared memory may lie, the best place first."""
    return [given] if given is not None else [SHARED, Path(tempfile.gettempdir())]


def reserve(places: list[Path], name: str, num_bytes: int) -> tuple[Path, int]:
    """A new locked file with all its memory set aside, in the first folder that has room: path and
    descriptor.

    Without the reservation a full /dev/shm would kill the process at the first write (SIGBUS).
    """
    first: OSError | None = None
    for place in places:
        try:
            return _create(place, name, num_bytes)
        except OSError as error:
            first = first or error
    raise ConfigError(
        f"publishing weights: no room for {num_bytes} bytes of shared memory ({first}); enlarge "
        "/dev/shm (containers: --shm-size) or set weights.transport to file."
    )


def _create(folder: Path, name: str, num_bytes: int) -> tuple[Path, int]:
    file, path = tempfile.mkstemp(prefix=f"{name}-{os.getpid()}-", suffix=SUFFIX, dir=folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(file, 0, num_bytes)
        if os.fstat(file).st_nlink == 0:
            raise BlockingIOError(f"{path} was removed as stale before it was locked")
    except OSError:
        os.close(file)
        Path(path).unlink(missing_ok=True)
        raise
    return Path(path), file


@torch.no_grad()
def copy_into(
    buffer: mmap.mmap, specs: tuple[TensorSpec, ...], tensors: Mapping[str, Tensor]
) -> None:
    for spec in specs:
        source = tensors[spec.name]
        if spec.num_bytes:
            slot = torch.frombuffer(
                buffer, dtype=source.dtype, count=source.numel(), offset=spec.offset
            )
            slot.view(source.shape).copy_(source)


class SegmentPublisher:
    """Keeps every version until its release; the caller bounds their number.

    Fresh memory costs a page fault for every page, so versions of one size are better off in
    standing slots. Each file is locked while its publisher lives (see `files.remove_stale`).
    """

    def __init__(self, name: str, *, folder: Path | None = None, threads: int = 1) -> None:
        """The parameters are those of `SharedMemoryPublisher`."""
        self._name = name
        self._folder = folder
        self._threads = threads
        self._files: dict[Version, tuple[Path, int]] = {}

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        if version in self._files:
            raise SlotBusy(
                f"publishing version {version}: it is published already; numbers are never reused."
            )
        specs = layout(named_shapes(tensors))
        path, file = self._files[version] = reserve(
            folders(self._folder), self._name, max(1, extent(specs))
        )
        with mmap.mmap(file, 0) as shared:
            copy_into(shared, specs, tensors)
            with memoryview(shared) as view:
                digest = fingerprint(specs, view, threads=self._threads)
        return WeightManifest(version, digest, "shared_memory", str(path), specs)

    def release(self, version: Version) -> None:
        """An engine that is reading the file can finish: its memory lives until then."""
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
