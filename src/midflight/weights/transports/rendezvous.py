"""The meeting of receivers and the publisher of a broadcast, before the bytes move.

This part never waits. A receiver asks for a version, and the publisher answers with the group to
meet in, by one line of JSON each way, over TCP. `Gathering` decides when there are enough receivers
for one broadcast. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from midflight.types import BucketHandle, Meeting, TensorSpec, Version

MAX_LINE = 2**16
"""The limit of a message with its newline, in bytes. No participant sends a longer one."""

DIGEST_DIGITS = 32
"""The number of hex digits of a bucket's hash that are sent."""

Backend = Literal["gloo", "nccl", "handles"]
"""How bytes come to the members of a group. `handles`: they read the publisher's bucket on its device.
"""


class Ask(msgspec.Struct, frozen=True):
    """A receiver wants the bytes that hash to `fingerprint`, whatever version they are. The version
    is for messages.
    """

    token: str
    version: Version
    fingerprint: str
    member: str
    """Names the receiver for as long as it lives."""
    group: str | None
    """The group that the receiver was last in, if it knows of no failure there."""
    expected: int | None = None
    """The number of receivers that were told to come, if this one knows it."""
    workers: int | None = None
    """Present if a server's companion asks. So many ranks will come from the server, and the
    companion is not one of them.
    """

    meets: Meeting = "plugin"
    """How the ranks come to a group. Servers' own engines get buckets of whole tensors."""
    handles: bool = False
    """True if the ranks can try to open the publisher's bucket, where it has one for them."""

    @property
    def ranks(self) -> int:
        return self.workers or 1


class Join(msgspec.Struct, frozen=True, tag=True):
    """The receiver is to make a group of `world` members through the store at `port`. It is `rank`
    there, and the publisher is 0.
    """

    group: str
    rank: int
    world: int
    port: int
    backend: Backend
    bucket_bytes: int
    deadline_seconds: float
    """The time for making the group, and for each bucket."""
    on_device: bool = False
    """True if the bytes lie on a device at both ends, and are hashed there."""
    meets: Meeting = "plugin"
    nccl_id: str = ""
    """NCCL's unique id of the group in base64, if the members meet by that."""
    bucket: BucketHandle | None = None
    """The bucket that the ranks are to open, if the backend is `handles`."""


class KeepGroup(msgspec.Struct, frozen=True, tag=True):
    """The group that the receiver named is whole and has the right members. They meet there."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str


class HandlesRefused(msgspec.Struct, frozen=True, tag=True):
    """Ranks of the receiver cannot open the publisher's bucket. They may ask for another way."""

    reason: str


class LastBucketSent(msgspec.Struct, frozen=True, tag=True):
    """The last bucket is sent. Goes to the companion that asked for workers."""

    digests: tuple[str, ...]
    """The beginning of the SHA-256 of each bucket, or its digest of `device_digest` if the bytes are
    on a device.
    """


Answer = Join | KeepGroup | Refused | HandlesRefused | LastBucketSent

_ask = msgspec.json.Decoder(Ask)
_answer = msgspec.json.Decoder(Answer)


def line(message: Ask | Answer) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def read_ask(data: bytes) -> Ask:
    """The question in a line. Raises `msgspec.MsgspecError` for anything else."""
    return _ask.decode(data)


def read_answer(data: bytes) -> Answer:
    """The answer in a line. Raises `msgspec.MsgspecError` for anything else. A publisher that has
    ended sends no data at all.
    """
    return _answer.decode(data)


@dataclass(frozen=True, slots=True)
class Address:
    """The address at which a publisher listens, and the secret that it asks for. It is the location
    of a manifest, `tcp://host:port/token`.
    """

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}/{self.token}"

    @classmethod
    def parse(cls, location: str) -> Address:
        """Reads a manifest's location. Raises `ValueError` if a part is missing. It names the part,
        without the secret.
        """
        url = urlsplit(location)
        token = url.path.removeprefix("/")
        if url.scheme != "tcp" or not url.hostname or not url.port or not token:
            raise ValueError("its location is not tcp://HOST:PORT/TOKEN")
        return cls(url.hostname, url.port, token)


def buckets(num_bytes: int, bucket_bytes: int) -> Iterator[slice]:
    """Slices of at most `bucket_bytes` that cover the buffer in order. Both ends make the same
    slices, so that broadcasts match.
    """
    for start in range(0, num_bytes, bucket_bytes):
        yield slice(start, min(start + bucket_bytes, num_bytes))


def packs(specs: Iterable[TensorSpec], bucket_bytes: int) -> Iterator[tuple[TensorSpec, ...]]:
    """Buckets of whole tensors, in their order. A bucket ends with the tensor that makes it larger
    than `bucket_bytes`, as vLLM's engine cuts them. Tensors without a byte are in none.
    """
    pack: list[TensorSpec] = []
    num_bytes = 0
    for spec in specs:
        if not spec.num_bytes:
            continue
        pack.append(spec)
        num_bytes += spec.num_bytes
        if num_bytes > bucket_bytes:
            yield tuple(pack)
            pack = []
            num_bytes = 0
    if pack:
        yield tuple(pack)


MAX_WAITING = 256
"""The limit of receivers that wait at once. It is more than the engines that one trainer feeds."""


@dataclass(frozen=True, slots=True, eq=False)
class WaitingReceiver:
    """A receiver that waits for a broadcast, and the ways to answer it, which never wait."""

    ask: Ask
    since: float
    """The time when the receiver came, in seconds of the clock that `Gathering` gets."""
    answer: Callable[[Answer], None]
    hang_up: Callable[[], None]


class Gathering:
    """Receivers in the order in which they came. Those that want the same bytes as the first share
    one broadcast.

    The broadcast begins when as many have come as one of them expects, or when none has come for
    `quiet_seconds`. Engines are told of a version within milliseconds of each other, and an engine
    that is late or comes back gets a broadcast of its own.
    """

    def __init__(self, *, quiet_seconds: float, apart: bool = False) -> None:
        """With `apart` the workers of servers and all others get broadcasts of their own, because
        only the workers take bytes on their devices.
        """
        self._quiet_seconds = quiet_seconds
        self._apart = apart
        self._waiting: list[WaitingReceiver] = []

    def join(self, member: WaitingReceiver) -> bool:
        """Adds a receiver, in place of its own earlier question. Returns whether there was room."""
        self._waiting = [m for m in self._waiting if m.ask.member != member.ask.member]
        if len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting.append(member)
        return True

    def leave(self, member: WaitingReceiver) -> None:
        """Removes a receiver that hung up. Nothing happens if its broadcast has begun."""
        self._waiting = [m for m in self._waiting if m is not member]

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the next broadcast may begin. `None` while no receiver waits."""
        together = self._together()
        if not together:
            return None
        expected = [m.ask.expected for m in together if m.ask.expected is not None]
        if expected and len(together) >= max(expected):
            return 0.0
        return max(0.0, together[-1].since + self._quiet_seconds - now)

    def take(self) -> list[WaitingReceiver]:
        """The receivers of the next broadcast; empty if no receiver waits."""
        together = self._together()
        self._waiting = [m for m in self._waiting if m not in together]
        return together

    def _together(self) -> list[WaitingReceiver]:
        """The receivers that want the same bytes as the first."""
        if not self._waiting:
            return []
        first = self._waiting[0].ask
        return [member for member in self._waiting if self._are_alike(first, member.ask)]

    def _are_alike(self, one: Ask, other: Ask) -> bool:
        if one.fingerprint != other.fingerprint:
            return False
        if (one.meets, one.handles) != (other.meets, other.handles):
            return False
        return not self._apart or (one.workers is None) == (other.workers is None)
