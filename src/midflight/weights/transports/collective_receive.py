"""The engine's end of the collective transport: ask the publisher for a version, meet it in a group, receive, verify."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from midflight.errors import EngineUnavailable, WeightsCorrupt
from midflight.types import WeightManifest
from midflight.weights.manifest import extent, repacked, set_aside, views
from midflight.weights.transports.process_group import Group, GroupBroken, join_store
from midflight.weights.transports.receive import verify
from midflight.weights.transports.rendezvous import MAX_LINE, Address, Again, Answer, Ask, Join, Refused, buckets, line, read_answer

ATTEMPTS = 2
"""A receiver that dies takes the group with it, and the others must not pay for it; a second time is for the handover to judge."""


class CollectiveReceiver:
    """Implements `ports.WeightReceiver`. It keeps its group for the next version: making one must not be paid for each.

    Each rank of an engine with several is a receiver of its own. One `fetch` at a time; another waits for it.
    """

    def __init__(self, *, threads: int = 1, answer_seconds: float = 60.0) -> None:
        """`answer_seconds`: how long the publisher may be busy with the rounds before ours. A group's own deadlines come from it."""
        self._threads, self._answer_seconds = threads, answer_seconds
        self._member = secrets.token_hex(8)
        self._group: Group | None = None
        self._one_at_a_time = threading.Lock()

    def fetch(self, manifest: WeightManifest) -> Mapping[str, memoryview]:
        """Bytes of each tensor by name. `EngineUnavailable` when the publisher or the group is gone, by the deadlines at the latest."""
        specs = repacked(manifest.tensors)
        buffer = set_aside(specs)
        data = torch.frombuffer(buffer, dtype=torch.uint8)[: extent(specs)]
        with self._one_at_a_time:
            self._receive(manifest, data)
        copies = views(specs, buffer)
        verify(manifest, copies, threads=self._threads)
        return copies

    def _receive(self, manifest: WeightManifest, data: Tensor) -> None:
        broken: GroupBroken | None = None
        for _ in range(ATTEMPTS):
            try:
                return self._once(manifest, data)
            except GroupBroken as error:
                self._group, broken = None, error
        raise EngineUnavailable(
            f"fetching version {manifest.version}: the broadcast broke {ATTEMPTS} times ({broken}); see which other engine died, and stage again."
        ) from broken

    def _once(self, manifest: WeightManifest, data: Tensor) -> None:
        try:
            address = Address.parse(manifest.location)
            with socket.create_connection((address.host, address.port), timeout=self._answer_seconds) as publisher:
                group = self._group = self._meet(self._ask(publisher, address, manifest), publisher, manifest)
                for part in buckets(data.numel(), group.terms.bucket_bytes):
                    group.broadcast(data[part])
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._group = None
            raise EngineUnavailable(
                f"fetching version {manifest.version}: the publisher does not answer ({error}); publish the version again."
            ) from error

    def _ask(self, publisher: socket.socket, address: Address, manifest: WeightManifest) -> Answer:
        """Waits for the others who want this version, and for the rounds before."""
        group = self._group.terms.group if self._group is not None else None
        publisher.sendall(line(Ask(address.token, manifest.version, manifest.fingerprint, self._member, group)))
        with publisher.makefile("rb") as answers:
            return read_answer(answers.readline(MAX_LINE))

    def _meet(self, answer: Answer, publisher: socket.socket, manifest: WeightManifest) -> Group:
        match answer:
            case Join():
                self._group = None  # before the new one, for it may hold sockets and memory
                host = publisher.getpeername()[0]
                return Group(answer, join_store(host, answer), interface=publisher.getsockname()[0])
            case Again() if self._group is not None:
                return self._group
            case Refused(reason):
                raise WeightsCorrupt(f"fetching version {manifest.version}: {reason}; publish a version again.")
            case _:
                raise ValueError("it names a group that was never made")
