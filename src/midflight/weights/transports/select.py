"""Choosing a transport by name: the publisher by configuration, the receiver by what the manifest says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from midflight.errors import ConfigError, nearest
from midflight.ports import WeightReceiver
from midflight.weights.transports.receive import TRANSPORTS, FileReceiver

if TYPE_CHECKING:
    from midflight.weights.transports.publish import Publisher


def receiver(*, threads: int = 1) -> WeightReceiver:
    """One receiver for all transports; without torch."""
    return FileReceiver(threads=threads)


def publisher(kind: str, *, name: str, folder: Path, threads: int = 1) -> Publisher:
    """`shared_memory` uses `name` (see `remove_stale`), `file` uses `folder`. Imports torch, which the trainer has anyway."""
    from midflight.weights.transports.file import FilePublisher
    from midflight.weights.transports.shared_memory import SharedMemoryPublisher

    if kind == "shared_memory":
        return SharedMemoryPublisher(name, threads=threads)
    if kind == "file":
        return FilePublisher(folder, threads=threads)
    raise ConfigError(f"weights.transport {kind!r} is unknown.{nearest(kind, TRANSPORTS)}")
