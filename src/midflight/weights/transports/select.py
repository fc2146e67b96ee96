"""Choosing a transport by name: the publisher by configuration, the receiver by what the manifest
says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from midflight.errors import ConfigError, nearest
from midflight.ports import WeightReceiver
from midflight.types import WeightManifest
from midflight.weights.manifest import MAX_HELD
from midflight.weights.transports.receive import BROADCAST, TRANSPORTS, DeltaReceiver, FileReceiver
from midflight.weights.transports.swarm import TRANSPORT as PULL

if TYPE_CHECKING:
    from midflight.weights.transports.publish import Publisher


STAGE_SECONDS: Final = 60.0
"""As `weights.stage_seconds` where it is unset."""


def receiver(*, threads: int = 1, stage_seconds: float = STAGE_SECONDS) -> WeightReceiver:
    """One receiver for all transports; without torch, until a manifest says `collective` or
    `direct`.

    `stage_seconds` are the handover's for one engine. A transport gives up what says nothing for a
    part of them, so that another try fits in.
    """
    return DeltaReceiver(ByTransport(threads=threads, stage_seconds=stage_seconds), threads=threads)


class ByTransport:
    """Asks the receiver of the manifest's transport. Those that need torch, or more, are made when
    they are first wanted.
    """

    def __init__(self, *, threads: int = 1, stage_seconds: float = STAGE_SECONDS) -> None:
        self._threads = threads
        self._files = FileReceiver(threads=threads)
        self._stage_seconds = stage_seconds
        self._made: dict[str, WeightReceiver] = {}

    def fetch(self, manifest: WeightManifest) -> Mapping[str, memoryview]:
        if manifest.transport not in (*BROADCAST, PULL):
            return self._files.fetch(manifest)
        if manifest.transport not in self._made:
            self._made[manifest.transport] = self._make(manifest.transport)
        return self._made[manifest.transport].fetch(manifest)

    def _make(self, transport: str) -> WeightReceiver:
        if transport == PULL:
            from midflight.weights.transports.pull import PullReceiver

            return PullReceiver(
                answer_seconds=self._stage_seconds / 4, patience=self._stage_seconds / 2
            )
        from midflight.weights.transports.process_group import CollectiveReceiver

        return CollectiveReceiver(threads=self._threads, answer_seconds=self._stage_seconds)


def publisher(
    kind: str,
    *,
    name: str,
    folder: Path,
    host: str = "127.0.0.1",
    full_every: int = 1,
    threads: int = 1,
    stage_seconds: float = STAGE_SECONDS,
) -> Publisher:
    """`shared_memory` uses `name` (see `remove_stale`), `file` uses `folder`, the others listen on
    `host`. Imports torch, which the trainer has anyway.

    With `full_every` above 1 the versions between are differences (see `DeltaPublisher`). Of the
    `stage_seconds` that a handover gives an engine, a fourth is for a group of receivers to come
    together, and for each bucket to be with all of them.
    """
    from midflight.weights.transports.collective import CollectivePublisher
    from midflight.weights.transports.files import FilePublisher
    from midflight.weights.transports.publish import (
        DeltaPublisher,
        SegmentPublisher,
        SharedMemoryPublisher,
    )
    from midflight.weights.transports.shares import PullPublisher

    differences = full_every != 1
    # the oldest version that is held may have a whole period behind it
    kept = MAX_HELD + full_every - 1
    if kind == "shared_memory":
        made = (
            SegmentPublisher(name, threads=threads)
            if differences
            else SharedMemoryPublisher(name, threads=threads)
        )
    elif kind == "file":
        made = FilePublisher(folder, keep=kept, threads=threads)
    elif kind in BROADCAST:
        made = CollectivePublisher(
            host,
            num_slots=kept,
            threads=threads,
            transport=kind,
            deadline_seconds=stage_seconds / 4,
        )
    elif kind == PULL:
        made = PullPublisher(host, num_slots=kept, threads=threads)
    else:
        raise ConfigError(f"weights.transport {kind!r} is unknown.{nearest(kind, TRANSPORTS)}")
    return DeltaPublisher(made, full_every=full_every, threads=threads) if differences else made
