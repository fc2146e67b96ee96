"""A wrapper of any receiver that keeps one version's bytes and changes them by the differences that
lead to another. It needs no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from midflight.errors import WeightsCorrupt
from midflight.models.sizes import element_bytes, fingerprint_views
from midflight.ports import WeightReceiver
from midflight.types import Delta, TensorSpec, Version, WeightManifest
from midflight.weights.difference_codec import Frames
from midflight.weights.manifest import check_extents, repacked, set_aside, views

Bytes = Mapping[str, memoryview]


@dataclass(frozen=True, slots=True)
class _KeptVersion:
    """A whole version that no engine serves from."""

    fingerprint: str
    specs: tuple[TensorSpec, ...]
    bytes: Bytes


class DeltaReceiver:
    """Wraps a receiver, and implements `ports.WeightReceiver`. A manifest without differences
    passes through.

    From the first difference on, it keeps a copy of the last version fetched, which is once the
    size of the weights. Without differences there is none. If the copy is one of the versions that
    the manifest's differences lead through, only the later differences are applied. Otherwise
    (after a restart, or a period that was skipped) the whole version at the beginning is fetched
    first. The result is verified and copied for the caller. Versions in between are not verified,
    because an error in them would show in the result. If the result is wrong, the standing copy is
    dropped, and the next attempt begins with the whole version.
    """

    def __init__(self, inner: WeightReceiver, *, threads: int = 1) -> None:
        self._inner = inner
        self._threads = threads
        self._standing: _KeptVersion | None = None
        self._one_at_a_time = threading.Lock()
        """A caller that gave up waiting for a fetch may begin another while the first still changes
        the standing copy.
        """

    def fetch(self, manifest: WeightManifest) -> Bytes:
        """Bytes of each tensor by name. Waits for the fetch under way, which ends by itself. Raises
        `RequestRejected` for extents that make no sense, before any memory is set aside for them.
        """
        check_extents(manifest)
        with self._one_at_a_time:
            if manifest.deltas:
                return self._by_differences(manifest)
            return self._whole(manifest)

    def _whole(self, manifest: WeightManifest) -> Bytes:
        fetched = self._inner.fetch(manifest)
        if self._standing is not None:
            specs = repacked(manifest.tensors)
            # The old copy goes before its successor is made: two would be one too many.
            self._standing = None
            self._standing = _KeptVersion(manifest.fingerprint, specs, _copied(specs, fetched))
        return fetched

    def _by_differences(self, manifest: WeightManifest) -> Bytes:
        specs = repacked(manifest.tensors)
        start, weights = self._nearest(manifest, specs)
        made = [delta.base for delta in manifest.deltas[1:]]
        made.append(manifest.version)
        steps = list(zip(made, manifest.deltas, strict=True))
        for version, delta in steps[start:]:
            self._apply(version, delta, manifest, weights)
        found = fingerprint_views(specs, weights, threads=self._threads)
        if found != manifest.fingerprint:
            raise WeightsCorrupt(
                f"fetching version {manifest.version}: its differences lead to {found[:12]}, the "
                f"manifest says {manifest.fingerprint[:12]}; stage it again, which begins with the "
                "whole version."
            )
        self._standing = _KeptVersion(manifest.fingerprint, specs, weights)
        return _copied(specs, weights)

    def _nearest(
        self, manifest: WeightManifest, specs: tuple[TensorSpec, ...]
    ) -> tuple[int, Bytes]:
        """The number of differences that the first weights include, and these weights. No copy is
        kept until they are verified again.
        """
        standing = self._standing
        self._standing = None
        way = [delta.base_fingerprint for delta in manifest.deltas]
        way.append(manifest.fingerprint)
        if standing is not None and standing.specs == specs and standing.fingerprint in way:
            return way.index(standing.fingerprint), standing.bytes
        # The copy goes before the whole version takes as much memory again.
        del standing
        first = manifest.deltas[0]
        whole = replace(manifest, version=first.base, fingerprint=first.base_fingerprint, deltas=())
        return 0, self._inner.fetch(whole)

    def _apply(
        self, version: Version, delta: Delta, manifest: WeightManifest, weights: Bytes
    ) -> None:
        """Changes the weights into those of `version`. The tensors change in the manifest's order,
        in which the payload was made.
        """
        payload = WeightManifest(
            version=version,
            fingerprint=delta.payload_fingerprint,
            transport=manifest.transport,
            location=delta.location,
            tensors=(delta.payload,),
            receivers=manifest.receivers,
        )
        frames = Frames(self._inner.fetch(payload)[delta.payload.name])
        try:
            for spec in manifest.tensors:
                frames.apply(weights[spec.name], width=element_bytes(spec.dtype))
            frames.end()
        except ValueError as error:
            raise WeightsCorrupt(
                f"fetching version {manifest.version}: the difference from version {delta.base} is "
                f"none ({error}); publish a whole version."
            ) from error


def _copied(specs: tuple[TensorSpec, ...], source: Bytes) -> Bytes:
    """Copies of the tensors in new memory, which is aligned, writable, and lives as long as the
    views.
    """
    copies = views(specs, set_aside(specs))
    for name, copy in copies.items():
        copy[:] = source[name]
    return copies
