"""The choice of a transport by name: the publisher by the configuration, the receiver by the
manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from midflight.errors import ConfigError, nearest
from midflight.ports import WeightReceiver
from midflight.types import WeightManifest
from midflight.weights.manifest import MAX_HELD
from midflight.weights.transports.delta_receiver import DeltaReceiver
from midflight.weights.transports.file_receiver import FileReceiver
from midflight.weights.transports.kinds import DIRECT, PULL, SENT, SHARED_MEMORY

if TYPE_CHECKING:
    import torch

    from midflight.weights.transports.publisher import Publisher


STAGE_SECONDS: Final = 60.0
"""The `weights.stage_seconds` of a run where it is unset."""


def receiver(*, threads: int = 1, stage_seconds: float = STAGE_SECONDS) -> WeightReceiver:
    """One receiver for all transports. It needs no torch, until a manifest says `direct`.

    `stage_seconds` are the handover's for one engine. A transport gives up a peer that is silent
    for a part of that time, so that another try fits in.
    """
    return DeltaReceiver(ByTransport(threads=threads, stage_seconds=stage_seconds), threads=threads)


class ByTransport:
    """Asks the receiver of the manifest's transport. Receivers that need torch, or more, are made
    when they are first wanted.
    """

    def __init__(self, *, threads: int = 1, stage_seconds: float = STAGE_SECONDS) -> None:
        self._threads = threads
        self._files = FileReceiver(threads=threads)
        self._stage_seconds = stage_seconds
        self._made: dict[str, WeightReceiver] = {}

    def fetch(self, manifest: WeightManifest) -> Mapping[str, memoryview]:
        transport = manifest.transport
        if transport not in SENT:
            return self._files.fetch(manifest)
        if transport not in self._made:
            self._made[transport] = self._make(transport)
        return self._made[transport].fetch(manifest)

    def _make(self, transport: str) -> WeightReceiver:
        if transport == PULL:
            from midflight.weights.transports.pull import PullReceiver

            return PullReceiver(
                answer_seconds=self._stage_seconds / 4, patience=self._stage_seconds / 2
            )
        from midflight.weights.transports.process_group import BroadcastReceiver

        return BroadcastReceiver(threads=self._threads, answer_seconds=self._stage_seconds)


def publisher(
    kind: str,
    *,
    name: str,
    folder: Path,
    host: str = "127.0.0.1",
    full_every: int = 1,
    threads: int = 1,
    stage_seconds: float = STAGE_SECONDS,
    spare: int = 0,
    device: torch.device | None = None,
    by_handles: bool = False,
    out_of_weights: bool = False,
) -> Publisher:
    """The publisher of this kind. `shared_memory` uses `name`, and `folder` and `spare` where
    /dev/shm is small (see `memory_files`); the others listen on `host`. `direct` keeps the newest
    version on `device`, by default in host memory; with `by_handles` workers of this machine read it
    there. With `out_of_weights` it keeps none: `withdraw` says that tensors change. It imports torch,
    which the trainer has anyway.

    With `full_every` above 1 the versions between are differences (see `DeltaPublisher`). A fourth
    of the `stage_seconds` that a handover gives an engine is for a group of receivers to come
    together, and for each bucket to be with all of them.
    """
    from midflight.weights.transports.broadcast import CPU, BroadcastPublisher
    from midflight.weights.transports.deltas import DeltaPublisher
    from midflight.weights.transports.pull_publisher import PullPublisher
    from midflight.weights.transports.shared_memory import SharedMemoryPublisher

    differences = full_every != 1
    # The oldest version that is held may have a whole period behind it.
    kept = MAX_HELD + full_every - 1
    made: Publisher
    if kind == SHARED_MEMORY:
        made = SharedMemoryPublisher(
            name,
            num_slots=kept,
            reuses=not differences,
            folder=folder,
            spare=spare,
            threads=threads,
        )
    elif kind == DIRECT:
        made = BroadcastPublisher(
            host,
            device=device or CPU,
            backend="handles" if by_handles else None,
            out_of_weights=out_of_weights,
            num_slots=kept,
            threads=threads,
            deadline_seconds=stage_seconds / 4,
        )
    elif kind == PULL:
        made = PullPublisher(host, num_slots=kept, threads=threads)
    else:
        hint = nearest(kind, {SHARED_MEMORY, *SENT})
        raise ConfigError(f"weights.transport {kind!r} is unknown.{hint}")
    if not differences:
        return made
    return DeltaPublisher(made, full_every=full_every, threads=threads)
