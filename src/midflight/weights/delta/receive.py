"""The engine's end: keeps one version's bytes, and changes them by the differences that lead to another. Needs no torch."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from midflight.errors import WeightsCorrupt
from midflight.models.fingerprint import fingerprint_views
from midflight.models.sizes import element_bytes
from midflight.ports import WeightReceiver
from midflight.types import Delta, TensorSpec, Version, WeightManifest
from midflight.weights.delta.codec import Frames
from midflight.weights.manifest import check_extents, repacked, set_aside, views

Bytes = Mapping[str, memoryview]


@dataclass(frozen=True, slots=True)
class _Standing:
    """A whole version that no engine serves from."""

    fingerprint: str
    specs: tuple[TensorSpec, ...]
    bytes: Bytes


class DeltaReceiver:
    """Wraps a receiver; implements `ports.WeightReceiver`. A manifest without differences passes through.

    From the first difference on a standing copy of the last version fetched is kept, once the size of the weights; those who never
    meet one pay nothing. The copy is brought to the base of the first difference that it lacks: it may be any version on the manifest's
    way; when it is none (a restart, a period that was skipped), the whole version at the beginning is fetched. What comes out is
    verified, and copied for the caller; versions in between are not, for no error in them could give the right end. When it
    is wrong, the standing copy is forgotten, so that the next attempt begins with the whole version.
    """

    def __init__(self, inner: WeightReceiver, *, threads: int = 1) -> None:
        self._inner, self._threads = inner, threads
        self._standing: _Standing | None = None
        self._one_at_a_time = threading.Lock()
        """Whoever gave up waiting for a fetch may begin another, while the first still changes the standing copy."""

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
        """The weights to begin with, and how many differences they are past. Nothing is standing until they are verified again."""
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
    """In memory of their own: aligned, writable, and living as long as the views."""
    copies = views(specs, set_aside(specs))
    for name, copy in copies.items():
        copy[:] = source[name]
    return copies
