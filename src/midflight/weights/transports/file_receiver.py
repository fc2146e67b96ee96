"""The engine's end of the transports whose bytes are a file. It needs no torch."""

from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from midflight.errors import NotSupported, WeightsCorrupt, nearest
from midflight.models.sizes import fingerprint_views
from midflight.types import TensorSpec, WeightManifest
from midflight.weights.manifest import repacked, set_aside, views
from midflight.weights.transports.kinds import FILES, TRANSPORTS


class FileReceiver:
    """Implements `ports.WeightReceiver`. It copies a version's bytes into memory of its own, then
    verifies the copy.

    If the publisher writes to its slot afterwards, that cannot reach the bytes that were verified
    (I7). A file that shrinks is an error. Through a mapping it would be a crash. The lock of the
    interpreter is free while bytes are read and hashed. The memory is aligned, writable, and lives
    as long as the views, so that an engine may serve from it without copying again.
    """

    def __init__(self, *, threads: int = 1) -> None:
        """`threads` hash tensors side by side. More of them than free cores slow decoding."""
        self._threads = threads

    def fetch(self, manifest: WeightManifest) -> Mapping[str, memoryview]:
        """Bytes of each tensor by name. It blocks for two plain copies of them, once a version
        before was let go.
        """
        if manifest.transport not in FILES:
            raise NotSupported(
                f"fetching version {manifest.version}: unknown transport "
                f"{manifest.transport!r}.{nearest(manifest.transport, TRANSPORTS)}"
            )
        specs = repacked(manifest.tensors)
        copies = views(specs, set_aside(specs))
        try:
            with Path(manifest.location).open("rb", buffering=0) as file:
                for spec in manifest.tensors:
                    _read(file, spec, copies[spec.name], manifest)
        except OSError as error:
            raise WeightsCorrupt(
                f"fetching version {manifest.version}: {error}; publish the version again."
            ) from error
        verify(manifest, copies, threads=self._threads)
        return copies


def verify(manifest: WeightManifest, copies: Mapping[str, memoryview], *, threads: int) -> None:
    """Raises `WeightsCorrupt` unless the bytes are those that were published (I7)."""
    found = fingerprint_views(manifest.tensors, copies, threads=threads)
    if found != manifest.fingerprint:
        raise WeightsCorrupt(
            f"fetching version {manifest.version} by {manifest.transport}: its bytes hash to "
            f"{found[:12]}, the manifest says {manifest.fingerprint[:12]}; publish the version "
            "again."
        )


def _read(file: FileIO, spec: TensorSpec, into: memoryview, manifest: WeightManifest) -> None:
    """Fills `into` with the tensor's bytes. One call of the kernel may read less than asked for."""
    file.seek(spec.offset)
    done = 0
    while done < spec.num_bytes:
        count = file.readinto(into[done:])
        if not count:
            raise WeightsCorrupt(
                f"fetching version {manifest.version}: {manifest.location!r} ends inside tensor "
                f"{spec.name!r}; publish the version again."
            )
        done += count
