"""Versions that a publisher keeps on its device, where they are hashed too: no byte of them goes
through host memory on the way to a server's workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from midflight.errors import WeightsCorrupt
from midflight.types import TensorSpec, WeightManifest
from midflight.weights.device_digest import digests, lanes
from midflight.weights.manifest import extent
from midflight.weights.transports.publisher import Fill

SPARE_BYTES = 2**29
"""Bytes of a device that must stay free beside a version."""
DEVICE_PREFIX = "device-"
"""The beginning of a fingerprint whose digests were computed on a device."""


def device_fingerprint(specs: Iterable[TensorSpec], data: Tensor) -> str:
    """The fingerprint of names, dtypes, shapes and bytes, which are hashed where they lie. `data`
    holds every tensor at its spec's offset. Order and offsets do not count.
    """
    ordered = list(specs)
    found = [lanes(data[spec.offset : spec.offset + spec.num_bytes]) for spec in ordered]
    hashed = digests(found, [spec.num_bytes for spec in ordered])
    names = [spec.name for spec in ordered]
    return total_fingerprint(ordered, dict(zip(names, hashed, strict=True)))


def total_fingerprint(specs: Iterable[TensorSpec], found: Mapping[str, str]) -> str:
    """The fingerprint of tensors whose digests are known by name."""
    total = hashlib.sha256()
    for spec in sorted(specs, key=lambda spec: spec.name):
        shape = ",".join(map(str, spec.shape))
        total.update(f"{found[spec.name]}\0{spec.name}\0{spec.dtype}\0{shape}\0".encode())
    return DEVICE_PREFIX + total.hexdigest()


def verify_of_device(manifest: WeightManifest, copies: Mapping[str, memoryview]) -> None:
    """Raises `WeightsCorrupt` unless the bytes, which are in host memory, are those that were
    published (I7).
    """
    found: list[Tensor] = []
    for spec in manifest.tensors:
        part = torch.zeros(0, dtype=torch.uint8)
        if spec.num_bytes:
            part = torch.frombuffer(copies[spec.name], dtype=torch.uint8)
        found.append(lanes(part))
    hashed = digests(found, [spec.num_bytes for spec in manifest.tensors])
    names = [spec.name for spec in manifest.tensors]
    total = total_fingerprint(manifest.tensors, dict(zip(names, hashed, strict=True)))
    if total != manifest.fingerprint:
        raise WeightsCorrupt(
            f"fetching version {manifest.version} by {manifest.transport}: its bytes hash to "
            f"{total[:19]}, the manifest says {manifest.fingerprint[:19]}; publish the version "
            "again."
        )


def tensor_bytes_of(
    spec: TensorSpec, tensors: Mapping[str, Tensor], fill: Fill, device: torch.device
) -> Tensor:
    """The bytes of one tensor as it is served, in memory of their own on the device."""
    made = torch.empty(spec.num_bytes, dtype=torch.uint8, device=device)
    like = tensors[spec.name]
    fill({spec.name: made.view(like.dtype).view(like.shape)}, tensors)
    return made


def fingerprint_of_each(
    specs: Iterable[TensorSpec], tensors: Mapping[str, Tensor], fill: Fill, device: torch.device
) -> str:
    """As `device_fingerprint`, of tensors that are served one after the other. They take the memory of
    one.
    """
    ordered = list(specs)
    found = [lanes(tensor_bytes_of(spec, tensors, fill, device)) for spec in ordered]
    hashed = digests(found, [spec.num_bytes for spec in ordered])
    names = [spec.name for spec in ordered]
    return total_fingerprint(ordered, dict(zip(names, hashed, strict=True)))


class DeviceBuffer:
    """The memory of the newest version on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._fits: bool | None = None

    def fits(self, num_bytes: int) -> bool:
        """True if the device has room for a version. It is asked after the first step, whose memory
        torch keeps, and answers the same from then on.
        """
        if self._fits is None:
            self._fits = True
            if self.device.type == "cuda":
                free, _ = torch.cuda.mem_get_info(self.device)
                self._fits = free > num_bytes + SPARE_BYTES
        return self._fits

    def filled(
        self, specs: tuple[TensorSpec, ...], tensors: Mapping[str, Tensor], fill: Fill
    ) -> Tensor:
        """Copies the tensors into the memory, packed, in the place of what is there. Returns it as
        uint8.
        """
        size = extent(specs)
        if len(self._memory) != size or self._memory.device.type != self.device.type:
            self._memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        places: dict[str, Tensor] = {}
        for spec in specs:
            like = tensors[spec.name]
            place = self._memory[spec.offset : spec.offset + spec.num_bytes]
            places[spec.name] = place.view(like.dtype).view(like.shape)
        fill(places, tensors)
        return self._memory
