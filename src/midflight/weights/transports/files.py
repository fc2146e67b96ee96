"""Versions as files that trainer and engines both see. Each version is one safetensors file, with
the places of its tensors and their hash.

Format: eight bytes with the header's length N (little endian), N bytes of JSON, then the data that
its offsets count from. Importing this needs no torch, so that the launcher and the rollout process
can use it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

import msgspec
from safetensors import SafetensorError

from midflight.errors import ConfigError, RequestRejected, nearest
from midflight.models.permissions import open_to_others
from midflight.models.sizes import fingerprint_views
from midflight.types import TensorSpec, Version, WeightManifest
from midflight.weights.manifest import MAX_HELD, check_extents, extent, is_sound, views
from midflight.weights.transports.kinds import BROADCAST, PULL, TRANSPORTS
from midflight.weights.transports.rendezvous import Address
from midflight.weights.transports.swarm import sources_in

if TYPE_CHECKING:
    from torch import Tensor


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
        return WeightManifest(version, hashed, "file", str(path.resolve()), specs)
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
        raise RequestRejected(
            (
                f"transport is {manifest.transport[:80]!r}: not one of "
                f"them.{nearest(manifest.transport, TRANSPORTS)}"
            ),
            param="transport",
        )
    check_extents(manifest)
    for location, specs in (
        (manifest.location, manifest.tensors),
        *((d.location, (d.payload,)) for d in manifest.deltas),
    ):
        try:
            if manifest.transport in BROADCAST:
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


def digest(path: Path, specs: Specs, *, threads: int = 1) -> str:
    """The fingerprint of the tensors of a file that is no longer written to."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as whole,
    ):
        parts = views(specs, whole)
        try:
            return fingerprint_views(specs, parts, threads=threads)
        finally:
            for part in parts.values():
                part.release()


class FilePublisher:
    """Writes `<version>.safetensors` under another name, then renames it: a reader sees a whole
    file or none.

    Nothing is synced to disk: after a power cut the trainer publishes again. Each publication
    removes all files but the newest `keep`. An engine that has one open can read it to the end. An
    engine that comes later gets an error and rejoins at the current version.
    """

    def __init__(self, folder: Path, *, keep: int = MAX_HELD, threads: int = 1) -> None:
        self._folder = folder.absolute()
        self._keep = keep
        self._threads = threads

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        from safetensors.torch import save_file  # here, because only the trainer has torch

        path = self._folder / f"{version:08d}.safetensors"
        partial = self._folder / ".publishing.partial"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, partial)
            open_to_others(partial)
            specs = read_specs(partial)
            hashed = digest(partial, specs, threads=self._threads)
            partial.rename(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"publishing version {version} to {str(self._folder)!r}: {error}; give a writable "
                "folder with room."
            ) from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
        self._remove_old()
        return WeightManifest(version, hashed, "file", str(path), specs)

    def release(self, version: Version) -> None:
        """Does nothing: files are removed by age."""

    def close(self) -> None:
        for path in self._published():
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _published(self) -> list[Path]:
        return sorted(p for p in self._folder.glob("*.safetensors") if p.stem.isdigit())

    def _remove_old(self) -> None:
        for path in self._published()[: -self._keep]:
            path.unlink(missing_ok=True)


SHARED = Path("/dev/shm")
SUFFIX = ".weights"


def remove_stale(name: str, *, folder: Path | None = None) -> list[Path]:
    """Removes files that dead publishers left under this name, and returns them. Files of living
    ones are locked and stay.
    """
    removed: list[Path] = []
    for place in [folder] if folder is not None else [SHARED, Path(tempfile.gettempdir())]:
        for path in sorted(place.glob(f"{name}-*{SUFFIX}")):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path)
    return removed
