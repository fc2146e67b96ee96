"""The engine's end: a receiver for every transport whose bytes are a file, and a wrapper of any receiver that keeps one version's bytes
and changes them by the differences that lead to another. Needs no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

from midflight.errors import NotSupported, WeightsCorrupt, nearest
from midflight.models.fingerprint import fingerprint_views
from midflight.models.sizes import element_bytes
from midflight.ports import WeightReceiver
from midflight.types import Delta, TensorSpec, Version, WeightManifest
from midflight.weights.delta import Frames
from midflight.weights.manifest import check_extents, repacked, set_aside, views

FILES = frozenset({"shared_memory", "file"})
TRANSPORTS = FILES | {"collective"}


class FileReceiver:
    """Implements `ports.WeightReceiver`: copies a version's bytes into memory of its own, then verifies the copy.

    What the publisher does to its slot afterwards cannot reach the bytes that were verified (I7), and a file that shrinks is an
    error and not a crash, as it would be through a mapping. The lock of the interpreter is free while bytes are read and hashed.
    The memory is aligned, writable, and lives as long as the views: an engine may serve from it without copying again.
    """

    def __init__(self, *, threads: int = 1) -> None:
        """`threads` hash tensors side by side; more than the free cores slows decoding."""
        self._threads = threads

    def fetch(self, manifest: WeightManifest) -> Mapping[str, memoryview]:
        """Bytes of each tensor by name. Blocks for about a second per gigabyte, hashing most of it."""
        if manifest.transport not in FILES:
            raise NotSupported(
                f"fetching version {manifest.version}: unknown transport {manifest.transport!r}.{nearest(manifest.transport, TRANSPORTS)}"
            )
        specs = repacked(manifest.tensors)
        copies = views(specs, set_aside(specs))
        try:
            with Path(manifest.location).open("rb", buffering=0) as file:
                for spec in manifest.tensors:
                    _read(file, spec, copies[spec.name], manifest)
        except OSError as error:
            raise WeightsCorrupt(f"fetching version {manifest.version}: {error}; publish the version again.") from error
        verify(manifest, copies, threads=self._threads)
        return copies


def verify(manifest: WeightManifest, copies: Mapping[str, memoryview], *, threads: int) -> None:
    """`WeightsCorrupt` unless the bytes are those that were published (I7)."""
    found = fingerprint_views(manifest.tensors, copies, threads=threads)
    if found != manifest.fingerprint:
        raise WeightsCorrupt(
            f"fetching version {manifest.version} by {manifest.transport}: its bytes hash to {found[:12]}, the manifest says "
            f"{manifest.fingerprint[:12]}; publish the version again."
        )


def _read(file: FileIO, spec: TensorSpec, into: memoryview, manifest: WeightManifest) -> None:
    """Fills `into`; one call of the kernel may read less than asked for."""
    file.seek(spec.offset)
    done = 0
    while done < spec.num_bytes:
        count = file.readinto(into[done:])
        if not count:
            raise WeightsCorrupt(
                f"fetching version {manifest.version}: {manifest.location!r} ends inside tensor {spec.name!r}; publish the version again."
            )
        done += count


Bytes = Mapping[str, memoryview]


@dataclass(frozen=True, slots=True)
class _Standing:
    """A whole version that no engine serves from."""

    fingerprint: str
    specs: tuple[TensorSpec, ...]
    bytes: Bytes


class DeltaReceiver:
    """Wraps a receiver; implements `ports.WeightReceiver`. A manifest without differences passes through.

    From the first difference on, a standing copy of the last version fetched is kept: once the size of the weights. Without differences
    there is none. If the copy is one of the versions that the manifest's differences lead through, only the later differences are
    applied; otherwise (after a restart, or a period that was skipped) the whole version at the beginning is fetched first. The result is
    verified and copied for the caller. Versions in between are not verified, because an error in them would show in the result. If
    the result is wrong, the standing copy is dropped, and the next attempt begins with the whole version.
    """

    def __init__(self, inner: WeightReceiver, *, threads: int = 1) -> None:
        self._inner, self._threads = inner, threads
        self._standing: _Standing | None = None
        self._one_at_a_time = threading.Lock()
        """A caller that gave up waiting for a fetch may begin another while the first still changes the standing copy."""

    def fetch(self, manifest: WeightManifest) -> Bytes:
        """Bytes of each tensor by name. Waits for the fetch under way, which ends by itself. `RequestRejected` for extents that
        make no sense, before anything is set aside for them."""
        check_extents(manifest)
        with self._one_at_a_time:
            return self._by_differences(manifest) if manifest.deltas else self._whole(manifest)

    def _whole(self, manifest: WeightManifest) -> Bytes:
        fetched = self._inner.fetch(manifest)
        if self._standing is not None:
            specs = repacked(manifest.tensors)
            self._standing = None  # before its successor is made: two would be one too many
            self._standing = _Standing(manifest.fingerprint, specs, _copied(specs, fetched))
        return fetched

    def _by_differences(self, manifest: WeightManifest) -> Bytes:
        specs = repacked(manifest.tensors)
        start, weights = self._nearest(manifest, specs)
        made = [*(d.base for d in manifest.deltas[1:]), manifest.version]
        for version, delta in list(zip(made, manifest.deltas, strict=True))[start:]:
            self._apply(version, delta, manifest, weights)
        found = fingerprint_views(specs, weights, threads=self._threads)
        if found != manifest.fingerprint:
            raise WeightsCorrupt(
                f"fetching version {manifest.version}: its differences lead to {found[:12]}, the manifest says {manifest.fingerprint[:12]}; "
                "stage it again, which begins with the whole version."
            )
        self._standing = _Standing(manifest.fingerprint, specs, weights)
        return _copied(specs, weights)

    def _nearest(self, manifest: WeightManifest, specs: tuple[TensorSpec, ...]) -> tuple[int, Bytes]:
        """The weights to begin with, and the number of differences they include. No copy is kept until they are verified again."""
        standing, self._standing = self._standing, None
        way = [d.base_fingerprint for d in manifest.deltas] + [manifest.fingerprint]
        if standing is not None and standing.specs == specs and standing.fingerprint in way:
            return way.index(standing.fingerprint), standing.bytes
        del standing  # before the whole version takes as much memory again
        first = manifest.deltas[0]
        return 0, self._inner.fetch(replace(manifest, version=first.base, fingerprint=first.base_fingerprint, deltas=()))

    def _apply(self, version: Version, delta: Delta, manifest: WeightManifest, weights: Bytes) -> None:
        """Makes `version`. The tensors change in the manifest's order, in which the payload was made."""
        payload = WeightManifest(version, delta.payload_fingerprint, manifest.transport, delta.location, (delta.payload,))
        frames = Frames(self._inner.fetch(payload)[delta.payload.name])
        try:
            for spec in manifest.tensors:
                frames.apply(weights[spec.name], width=element_bytes(spec.dtype))
            frames.end()
        except ValueError as error:
            raise WeightsCorrupt(
                f"fetching version {manifest.version}: the difference from version {delta.base} is none ({error}); publish a whole version."
            ) from error


def _copied(specs: tuple[TensorSpec, ...], source: Bytes) -> Bytes:
    """Copies of the tensors in new memory: aligned, writable, and living as long as the views."""
    copies = views(specs, set_aside(specs))
    for name, copy in copies.items():
        copy[:] = source[name]
    return copies
