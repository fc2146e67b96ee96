"""A wrapper of any publisher that publishes most versions as differences from the one before."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from midflight.models.sizes import element_bytes, fingerprint
from midflight.types import Delta, TensorSpec, Version, WeightManifest
from midflight.weights.difference_codec import encode
from midflight.weights.manifest import MAX_HELD, extent, repacked, set_aside, views
from midflight.weights.transports.publisher import (
    Fill,
    Publisher,
    check_slot,
    copied,
    filled,
    named_shapes,
)

WORTH = 0.8
"""A difference that is larger than this share of the whole is not worth two more passes over the
weights on each side.
"""


class DeltaPublisher(Publisher):
    """Wraps a publisher that keeps each version until its release.

    A version is whole when it is the first or the `full_every`th since the last whole one, when
    names, shapes or dtypes have changed, and when its difference does not pay. A difference does
    not pay when it alone is more than `WORTH` of the whole, or when it is more than the whole with
    those before it, so that no engine ever reads more than twice the size of the weights. If a
    first difference does not pay, the rest of the period is whole, and no difference is tried.

    A payload stays published while a version that is not released needs it, and so do the payloads
    that lead to the newest version, because the next difference starts there. Payloads that are no
    longer needed are released at the next publication. With versions released in order and at most
    `MAX_HELD` held, that takes four times the memory of the weights at worst (differences as large
    as their whole version, and two whole versions). If differences are small, it takes twice the
    memory of the weights after a refresh, and once at other times. In addition the newest version's
    bytes are kept here, which is once the size of the weights.
    """

    def __init__(self, inner: Publisher, *, full_every: int, threads: int = 1) -> None:
        """`full_every` counts versions: from 2 to `MAX_DELTAS` + 1."""
        self._inner = inner
        self._full_every = full_every
        self._threads = threads
        self._standing = memoryview(b"")
        """The bytes of the newest version, packed."""
        self._newest: WeightManifest | None = None
        """The version that the next difference starts from. It is `None` if `_standing` may not be
        a published version.
        """
        self._num_untried = 0
        """The number of versions to publish whole before a difference is tried again."""
        self._held: dict[Version, WeightManifest] = {}
        self._inside: set[Version] = set()
        """The versions that the inner publisher holds."""

    def publish(
        self, version: Version, tensors: Mapping[str, Tensor], fill: Fill = copied
    ) -> WeightManifest:
        """Blocks for the comparison, the compression of the changes and one hash of the whole.
        Raises `SlotBusy` until a release.
        """
        check_slot(version, self._held, num_slots=MAX_HELD)
        self._release_unneeded()
        if fill is not copied:  # both the whole and its difference are made of whole tensors
            tensors = filled(tensors, fill)
        base = self._newest
        self._newest = None
        manifest: WeightManifest | None = None
        if base is not None and self._is_due(base, tensors):
            manifest = self._as_difference(base, version, tensors)
        if manifest is None:
            manifest = self._whole(version, tensors)
        self._newest = manifest
        self._held[version] = manifest
        return manifest

    def release(self, version: Version) -> None:
        """Takes note only. A version that is not needed any more is released at the next
        publication.
        """
        self._held.pop(version, None)

    def close(self) -> None:
        self._inner.close()
        self._standing = memoryview(b"")
        self._held = {}
        self._inside = set()
        self._newest = None

    def _is_due(self, base: WeightManifest, tensors: Mapping[str, Tensor]) -> bool:
        """True if a difference should be tried. It is not tried if one as large as the last would
        be too large.
        """
        if self._num_untried:
            self._num_untried -= 1
            return False
        if len(base.deltas) + 1 >= self._full_every:
            return False
        if base.deltas and base.deltas[-1].payload.num_bytes > _room(base):
            return False
        shapes = {(spec.name, spec.dtype, spec.shape) for spec in base.tensors}
        return shapes == set(named_shapes(tensors))

    def _as_difference(
        self, base: WeightManifest, version: Version, tensors: Mapping[str, Tensor]
    ) -> WeightManifest | None:
        """Publishes the version as a difference. Returns `None` if that does not pay. Tensors are
        in the base's order, which a transport may have chosen.
        """
        specs = repacked(base.tensors)
        limit = min(_room(base), int(WORTH * _size(specs)))
        payload = self._payload(specs, tensors, limit=limit)
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
        """The encoded difference. Meanwhile the new bytes take the place of the old. Returns `None`
        as soon as it is longer than `limit`.
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
        needed = set[Version]()
        for manifest in self._held.values():
            needed |= _way(manifest)
        if self._newest is not None:
            needed |= _way(self._newest)
        for version in self._inside - needed:
            self._inner.release(version)
            self._inside.remove(version)


def _way(manifest: WeightManifest) -> set[Version]:
    """The versions whose bytes lead to this one. It is among them."""
    way = {delta.base for delta in manifest.deltas}
    way.add(manifest.version)
    return way


def _room(base: WeightManifest) -> int:
    """The most bytes that the next difference may have."""
    return _size(base.tensors) - sum(d.payload.num_bytes for d in base.deltas)


def _size(specs: Iterable[TensorSpec]) -> int:
    return sum(s.num_bytes for s in specs)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's own bytes if it is contiguous and on the CPU, else those of a copy."""
    flat: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return flat
