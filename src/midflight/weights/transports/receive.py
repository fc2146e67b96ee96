"""The engine's end: a receiver for every transport whose bytes are a file, and a wrapper of any
receiver that keeps one version's bytes and changes them by the differences that lead to another.
Needs no torch.

And how receivers and the publisher of a collective transport meet before the bytes move. That part
never waits: a receiver asks for a version, and the publisher answers which group to meet in, by one
line of JSON each way, over TCP. `Gathering` says when there are enough receivers for one broadcast.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from midflight.errors import NotSupported, WeightsCorrupt, nearest
from midflight.models.sizes import element_bytes, fingerprint_views
from midflight.ports import WeightReceiver
from midflight.types import Delta, TensorSpec, Version, WeightManifest
from midflight.weights.frames import Frames
from midflight.weights.manifest import check_extents, repacked, set_aside, views

# --- Where a broadcast is met ---------------------------------------------------------------------


TRANSPORT = "collective"
DIRECT = "direct"
"""The same, where a server's own workers take the bytes in: its companion asks for them."""
MAX_LINE = 2**16
"""Bytes of a message with its newline: no participant sends a longer one."""

DIGEST_DIGITS = 32
"""Of a bucket's hash, in hex."""

Backend = Literal["gloo", "nccl"]


class Ask(msgspec.Struct, frozen=True):
    """A receiver wants the bytes that hash to `fingerprint`. They name what is wanted; the version
    is for messages.
    """

    token: str
    version: Version
    fingerprint: str
    member: str
    """Names the receiver for as long as it lives."""
    group: str | None
    """The group it was last in, if it knows of no failure there."""
    expected: int | None = None
    """How many receivers were told to come, where it knows."""
    workers: int | None = None
    """Of a server: so many ranks will come from there, and who asks is not one of them."""

    @property
    def ranks(self) -> int:
        return self.workers or 1


class Join(msgspec.Struct, frozen=True, tag=True):
    """Make a group of `world` members through the store at `port`; you are `rank`, the publisher is
    0.
    """

    group: str
    rank: int
    world: int
    port: int
    backend: Backend
    bucket_bytes: int
    deadline_seconds: float
    """For making the group, and for each bucket."""


class Again(msgspec.Struct, frozen=True, tag=True):
    """The group you named is whole and has the right members: meet there."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Sent(msgspec.Struct, frozen=True, tag=True):
    """To who asked for workers, after the last bucket: the beginning of the SHA-256 of each."""

    digests: tuple[str, ...]


Answer = Join | Again | Refused | Sent

_ask = msgspec.json.Decoder(Ask)
_answer = msgspec.json.Decoder(Answer)


def line(message: Ask | Answer) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def read_ask(data: bytes) -> Ask:
    """`msgspec.MsgspecError` for anything else."""
    return _ask.decode(data)


def read_answer(data: bytes) -> Answer:
    """`msgspec.MsgspecError` for anything else; a publisher that ended sends no data at all."""
    return _answer.decode(data)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a publisher listens, and the secret that it asks for: the location of a manifest,
    `tcp://host:port/token`.
    """

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}/{self.token}"

    @classmethod
    def parse(cls, location: str) -> Address:
        """`ValueError` names what is missing, without the secret."""
        url = urlsplit(location)
        token = url.path.removeprefix("/")
        if url.scheme != "tcp" or not url.hostname or not url.port or not token:
            raise ValueError("its location is not tcp://HOST:PORT/TOKEN")
        return cls(url.hostname, url.port, token)


def buckets(num_bytes: int, bucket_bytes: int) -> Iterator[slice]:
    """Slices of at most `bucket_bytes` that cover the buffer in order. Both ends make the same
    ones, so that broadcasts match.
    """
    for start in range(0, num_bytes, bucket_bytes):
        yield slice(start, min(start + bucket_bytes, num_bytes))


MAX_WAITING = 256
"""Receivers that wait at once: more than the engines that one trainer feeds."""


@dataclass(frozen=True, slots=True, eq=False)
class WaitingReceiver:
    """A receiver that waits for a broadcast, and the ways to answer it; they never wait."""

    ask: Ask
    since: float
    """When it came, in seconds of the clock that `Gathering` gets."""
    answer: Callable[[Answer], None]
    hang_up: Callable[[], None]


class Gathering:
    """Receivers in the order in which they came. Those that want the same bytes as the first one
    share one broadcast.

    It begins when as many have come as one of them says were told to, or when none has come for
    `quiet_seconds`: engines are told of a version within milliseconds of each other, and one that
    is late or comes back gets a broadcast of its own.
    """

    def __init__(self, *, quiet_seconds: float) -> None:
        self._quiet_seconds = quiet_seconds
        self._waiting: list[WaitingReceiver] = []

    def join(self, member: WaitingReceiver) -> bool:
        """Adds a receiver, in place of its own earlier question; `False` when there is no room."""
        self._waiting = [m for m in self._waiting if m.ask.member != member.ask.member]
        if len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting.append(member)
        return True

    def leave(self, member: WaitingReceiver) -> None:
        """Removes a receiver that hung up. Nothing happens if its broadcast has begun."""
        self._waiting = [m for m in self._waiting if m is not member]

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the next broadcast may begin; `None` while no receiver waits."""
        together = self._together()
        if not together:
            return None
        if len(together) >= max(
            (m.ask.expected for m in together if m.ask.expected is not None),
            default=MAX_WAITING + 1,
        ):
            return 0.0
        return max(0.0, together[-1].since + self._quiet_seconds - now)

    def take(self) -> list[WaitingReceiver]:
        """The receivers of the next broadcast; none if no receiver waits."""
        together = self._together()
        self._waiting = [m for m in self._waiting if m not in together]
        return together

    def _together(self) -> list[WaitingReceiver]:
        return [m for m in self._waiting if m.ask.fingerprint == self._waiting[0].ask.fingerprint]


# --- Receivers ------------------------------------------------------------------------------------


FILES = frozenset({"shared_memory", "file"})
BROADCAST = frozenset({TRANSPORT, DIRECT})
SENT = BROADCAST | {"pull"}
"""Over the network, from addresses that the manifest names."""
TRANSPORTS = FILES | SENT


class FileReceiver:
    """Implements `ports.WeightReceiver`: copies a version's bytes into memory of its own, then
    verifies the copy.

    What the publisher does to its slot afterwards cannot reach the bytes that were verified (I7),
    and a file that shrinks is an error and not a crash, as it would be through a mapping. The lock
    of the interpreter is free while bytes are read and hashed. The memory is aligned, writable, and
    lives as long as the views: an engine may serve from it without copying again.
    """

    def __init__(self, *, threads: int = 1) -> None:
        """`threads` hash tensors side by side; more than the free cores slows decoding."""
        self._threads = threads

    def fetch(self, manifest: WeightManifest) -> Mapping[str, memoryview]:
        """Bytes of each tensor by name. Blocks for two plain copies of them, once a version before
        was let go.
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
    """`WeightsCorrupt` unless the bytes are those that were published (I7)."""
    found = fingerprint_views(manifest.tensors, copies, threads=threads)
    if found != manifest.fingerprint:
        raise WeightsCorrupt(
            f"fetching version {manifest.version} by {manifest.transport}: its bytes hash to "
            f"{found[:12]}, the manifest says {manifest.fingerprint[:12]}; publish the version "
            "again."
        )


def _read(file: FileIO, spec: TensorSpec, into: memoryview, manifest: WeightManifest) -> None:
    """Fills `into`; one call of the kernel may read less than asked for."""
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


Bytes = Mapping[str, memoryview]


@dataclass(frozen=True, slots=True)
class _Standing:
    """A whole version that no engine serves from."""

    fingerprint: str
    specs: tuple[TensorSpec, ...]
    bytes: Bytes


class DeltaReceiver:
    """Wraps a receiver; implements `ports.WeightReceiver`. A manifest without differences passes
    through.

    From the first difference on, a standing copy of the last version fetched is kept: once the size
    of the weights. Without differences there is none. If the copy is one of the versions that the
    manifest's differences lead through, only the later differences are applied; otherwise (after a
    restart, or a period that was skipped) the whole version at the beginning is fetched first. The
    result is verified and copied for the caller. Versions in between are not verified, because an
    error in them would show in the result. If the result is wrong, the standing copy is dropped,
    and the next attempt begins with the whole version.
    """

    def __init__(self, inner: WeightReceiver, *, threads: int = 1) -> None:
        self._inner = inner
        self._threads = threads
        self._standing: _Standing | None = None
        self._one_at_a_time = threading.Lock()
        """A caller that gave up waiting for a fetch may begin another while the first still changes
        the standing copy.
        """

    def fetch(self, manifest: WeightManifest) -> Bytes:
        """Bytes of each tensor by name. Waits for the fetch under way, which ends by itself.
        `RequestRejected` for extents that make no sense, before anything is set aside for them."""
        check_extents(manifest)
        with self._one_at_a_time:
            return self._by_differences(manifest) if manifest.deltas else self._whole(manifest)

    def _whole(self, manifest: WeightManifest) -> Bytes:
        fetched = self._inner.fetch(manifest)
        if self._standing is not None:
            specs = repacked(manifest.tensors)
            self._standing = None  # before its successor is made: two would be one too many
            self._standing = _Standing(manifest.fingerprint, specs, _copied(specs, fetched))
        return fetched

    def _by_differences(self, manifest: WeightManifest) -> Bytes:
        specs = repacked(manifest.tensors)
        start, weights = self._nearest(manifest, specs)
        made = [*(d.base for d in manifest.deltas[1:]), manifest.version]
        for version, delta in list(zip(made, manifest.deltas, strict=True))[start:]:
            self._apply(version, delta, manifest, weights)
        found = fingerprint_views(specs, weights, threads=self._threads)
        if found != manifest.fingerprint:
            raise WeightsCorrupt(
                f"fetching version {manifest.version}: its differences lead to {found[:12]}, the "
                f"manifest says {manifest.fingerprint[:12]}; stage it again, which begins with the "
                "whole version."
            )
        self._standing = _Standing(manifest.fingerprint, specs, weights)
        return _copied(specs, weights)

    def _nearest(
        self, manifest: WeightManifest, specs: tuple[TensorSpec, ...]
    ) -> tuple[int, Bytes]:
        """The weights to begin with, and the number of differences they include. No copy is kept
        until they are verified again.
        """
        standing = self._standing
        self._standing = None
        way = [d.base_fingerprint for d in manifest.deltas] + [manifest.fingerprint]
        if standing is not None and standing.specs == specs and standing.fingerprint in way:
            return way.index(standing.fingerprint), standing.bytes
        del standing  # before the whole version takes as much memory again
        first = manifest.deltas[0]
        return 0, self._inner.fetch(
            replace(manifest, version=first.base, fingerprint=first.base_fingerprint, deltas=())
        )

    def _apply(
        self, version: Version, delta: Delta, manifest: WeightManifest, weights: Bytes
    ) -> None:
        """Makes `version`. The tensors change in the manifest's order, in which the payload was
        made.
        """
        print_ = delta.payload_fingerprint
        location = delta.location
        payload = WeightManifest(
            version,
            print_,
            manifest.transport,
            location,
            (delta.payload,),
            receivers=manifest.receivers,
        )
        frames = Frames(self._inner.fetch(payload)[delta.payload.name])
        try:
            for spec in manifest.tensors:
                frames.apply(weights[spec.name], width=element_bytes(spec.dtype))
            frames.end()
        except ValueError as error:
            raise WeightsCorrupt(
                f"fetching version {manifest.version}: the difference from version {delta.base} is "
                f"none ({error}); publish a whole version."
            ) from error


def _copied(specs: tuple[TensorSpec, ...], source: Bytes) -> Bytes:
    """Copies of the tensors in new memory: aligned, writable, and living as long as the views."""
    copies = views(specs, set_aside(specs))
    for name, copy in copies.items():
        copy[:] = source[name]
    return copies
