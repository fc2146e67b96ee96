"""Versions that a foreign trainer publishes: the safetensors file that it names, or the manifest
that it sends. Importing this needs no torch, so that the rollout process can use it.

Format of the file: eight bytes with the header's length N (little endian), N bytes of JSON, then
the data that its offsets count from.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from midflight.config.replaced import REPLACED_TRANSPORTS
from midflight.errors import ConfigError, RequestRejected, nearest
from midflight.models.sizes import fingerprint_views
from midflight.types import TensorSpec, Version, WeightManifest
from midflight.weights.manifest import check_extents, extent, is_sound
from midflight.weights.transports.kinds import DIRECT, FILE, PULL, TRANSPORTS
from midflight.weights.transports.rendezvous import Address
from midflight.weights.transports.swarm import sources_in

Specs = tuple[TensorSpec, ...]

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit: a larger number is not the length of a header."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def manifest_of(
    path: Path, *, version: Version, fitting: Callable[[Specs], Specs]
) -> WeightManifest:
    """Reads and hashes the whole file, about a second per gigabyte. Raises `RequestRejected` if no
    engine could serve it.

    `fitting` chooses the tensors to serve, and refuses a file that does not fit the model.
    """
    try:
        specs = fitting(read_specs(path))
        with path.open("rb") as file:
            hashed = fingerprint_views(specs, _Reading(file, specs))
        return WeightManifest(version, hashed, FILE, str(path.resolve()), specs)
    except (OSError, ValueError, ConfigError) as error:
        raise RequestRejected(
            (
                f"publishing version {version} from {str(path)!r}: {error}; write a whole "
                "safetensors file that this machine can read."
            ),
            param="file",
        ) from error


def check_readable(manifest: WeightManifest) -> None:
    """Raises `RequestRejected` if no engine could read a version that a trainer says it published.
    Engines verify the bytes themselves.
    """
    if manifest.transport not in TRANSPORTS:
        remedy = nearest(manifest.transport, TRANSPORTS)
        if manifest.transport in REPLACED_TRANSPORTS:
            remedy = f" Publish by {REPLACED_TRANSPORTS[manifest.transport].value!r}."
        raise RequestRejected(
            f"transport is {manifest.transport[:80]!r}: not one of them.{remedy}",
            param="transport",
        )
    check_extents(manifest)
    for location, specs in (
        (manifest.location, manifest.tensors),
        *((d.location, (d.payload,)) for d in manifest.deltas),
    ):
        try:
            if manifest.transport == DIRECT:
                Address.parse(location)
            elif manifest.transport == PULL:
                sources_in(location)
            elif (size := _size(Path(location))) < extent(specs):
                raise ValueError(f"it has {size} bytes of {extent(specs)}")
        except (OSError, ValueError) as error:
            raise RequestRejected(
                (
                    f"publishing version {manifest.version} from {location!r}: {error}; name a "
                    "file that this machine can read."
                ),
                param="location",
            ) from error


def read_specs(path: Path) -> Specs:
    """The places of the tensors of a file, as offsets from the beginning of the file. Raises
    `ValueError` if the file is not whole.
    """
    size = _size(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"it is no safetensors file, or not a whole one ({size} bytes)")
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    entries = {
        name: msgspec.json.decode(raw, type=_Entry)
        for name, raw in header.items()
        if name != "__metadata__"
    }
    specs = tuple(
        TensorSpec(
            name,
            e.dtype,
            e.shape,
            8 + length + e.data_offsets[0],
            e.data_offsets[1] - e.data_offsets[0],
        )
        for name, e in entries.items()
    )
    for spec in specs:
        if spec.offset < 8 + length or not is_sound(spec):
            raise ValueError(f"the extent of tensor {spec.name!r} does not fit its shape")
    if extent(specs) > size:
        raise ValueError(f"it has {size} bytes of {extent(specs)}")
    return specs


def _size(path: Path) -> int:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for its writer
        raise ValueError("it is no file")
    return status.st_size


class _Reading(Mapping[str, memoryview]):
    """Tensors of a file that another process may still write to, each read when it is asked for. A
    file that was cut gives a `ValueError`; mapped into memory it would end the process."""

    def __init__(self, file: BinaryIO, specs: Specs) -> None:
        self._file = file
        self._specs = {spec.name: spec for spec in specs}

    def __getitem__(self, name: str) -> memoryview:
        spec = self._specs[name]
        self._file.seek(spec.offset)
        data = self._file.read(spec.num_bytes)
        if len(data) != spec.num_bytes:
            raise ValueError(f"it ends within tensor {name!r}")
        return memoryview(data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)
