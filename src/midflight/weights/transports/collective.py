"""Publishing by broadcast: the trainer keeps the versions in its own memory, and engines on any machine meet to receive them."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import secrets
import socket
import threading
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from midflight.errors import ConfigError, RunFailed, SlotBusy
from midflight.models.fingerprint import fingerprint
from midflight.types import Version, WeightManifest
from midflight.weights.manifest import extent, layout
from midflight.weights.transports.collective_serve import CollectiveService, Published
from midflight.weights.transports.gathering import Gathering
from midflight.weights.transports.process_group import listen
from midflight.weights.transports.publish import MAX_HELD, named_shapes
from midflight.weights.transports.rendezvous import TRANSPORT, Address, Backend
from midflight.weights.transports.shared_memory import copy_into

BUCKET_BYTES = 64 * 2**20
"""Large enough that a broadcast costs nothing beside its bytes, small enough to be through in a second on a slow network."""

CLOSE_SECONDS = 2.0
"""How long `close` waits for its threads. A broadcast to a receiver that was stopped outlives it, until its own deadline."""


class CollectivePublisher:
    """Versions wait in standing buffers until receivers ask for them: `publish` waits for no receiver, whatever became of it.

    What a receiver gets is the service's matter, in a thread of its own (`CollectiveService`). A version can be fetched until its
    `release`, by engines that come back too. As with the other transports, bytes released while they are read arrive as
    `WeightsCorrupt`.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        backend: Backend = "gloo",
        expected: int | None = None,
        num_slots: int = MAX_HELD,
        bucket_bytes: int = BUCKET_BYTES,
        quiet_seconds: float = 0.05,
        deadline_seconds: float = 10.0,
        threads: int = 1,
    ) -> None:
        """`host`: the address of this machine that engines reach it by; it listens there only. The bytes are not encrypted.

        `expected` receivers begin at once; else, and without the number, those that came begin when `quiet_seconds` passed
        without another. `deadline_seconds` bounds the making of a group and each bucket: 10 s for 64 MiB is a network of
        50 Mbit/s. `nccl` sends from GPU to GPU, which must be different ones.
        """
        self._threads, self._num_slots = threads, num_slots
        self._held: dict[Version, Published] = {}
        self._buffers: dict[Version, mmap.mmap] = {}
        self._free: list[mmap.mmap] = []
        self._listener = _listener(host)
        self._address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))
        self.service = CollectiveService(
            self._held,
            Gathering(expected=expected, quiet_seconds=quiet_seconds),
            host=host,
            token=self._address.token,
            backend=backend,
            bucket_bytes=bucket_bytes,
            deadline_seconds=deadline_seconds,
        )
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self.service.run(self._listener))
        self._thread = threading.Thread(target=self._serve, name="weights-collective", daemon=True)
        self._thread.start()

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """One copy of each tensor into a free buffer, then its fingerprint."""
        self._check(version)
        specs = layout(named_shapes(tensors))
        buffer = self._buffer(extent(specs))
        copy_into(buffer, specs, tensors)
        with memoryview(buffer) as view:
            digest = fingerprint(specs, view, threads=self._threads)
        self._buffers[version] = buffer
        self._held[version] = Published(torch.frombuffer(buffer, dtype=torch.uint8)[: extent(specs)], digest)
        return WeightManifest(version, digest, TRANSPORT, str(self._address), specs)

    def release(self, version: Version) -> None:
        if self._held.pop(version, None) is not None:
            self._free.append(self._buffers.pop(version))

    def close(self) -> None:
        """Receivers that wait or receive get an error at the end of the bucket under way. See `CLOSE_SECONDS`."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ended by itself meanwhile
                self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join(CLOSE_SECONDS)
        for version in tuple(self._held):
            self.release(version)
        self._free.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._serving)
        finally:
            self._listener.close()
            self.service.drop_groups()
            self._loop.close()

    def _check(self, version: Version) -> None:
        if not self._thread.is_alive():
            raise RunFailed(f"publishing version {version}: the service that sends weights has ended; make a new publisher.")
        if version in self._held:
            raise SlotBusy(f"publishing version {version}: it is published already; numbers are never reused.")
        if len(self._held) >= self._num_slots:
            held = ", ".join(map(str, self._held))
            raise SlotBusy(f"publishing version {version}: versions {held} hold all slots; wait until a handover ends and releases one.")

    def _buffer(self, num_bytes: int) -> mmap.mmap:
        """A released version's, if that was as large: memory that stands costs no page faults. Else those are given back."""
        self._free = [b for b in self._free if len(b) == max(1, num_bytes)]
        return self._free.pop() if self._free else mmap.mmap(-1, max(1, num_bytes))


def _listener(host: str) -> socket.socket:
    try:
        return listen(host)
    except OSError as error:
        raise ConfigError(f"publishing weights: cannot listen on {host!r} ({error}); name an address of this machine.") from error
