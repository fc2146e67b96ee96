"""How receivers and the publisher of a collective transport meet before the bytes move. Pure: it never waits, and needs no torch.

A receiver asks for a version and the publisher answers which group to meet in, by one line of JSON each way, over TCP. `Gathering`
says when there are enough receivers for one broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from midflight.types import Version

TRANSPORT = "collective"
MAX_LINE = 4096
"""Bytes of a message with its newline: no participant sends a longer one."""

Backend = Literal["gloo", "nccl"]


class Ask(msgspec.Struct, frozen=True):
    """A receiver wants the bytes that hash to `fingerprint`. They name what is wanted; the version is for messages."""

    token: str
    version: Version
    fingerprint: str
    member: str
    """Names the receiver for as long as it lives."""
    group: str | None
    """The group it was last in, if it knows of no failure there."""


class Join(msgspec.Struct, frozen=True, tag=True):
    """Make a group of `world` members through the store at `port`; you are `rank`, the publisher is 0."""

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


Answer = Join | Again | Refused

_ask, _answer = msgspec.json.Decoder(Ask), msgspec.json.Decoder(Answer)


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
    """Where a publisher listens, and the secret that it asks for: the location of a manifest, `tcp://host:port/token`."""

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
    """Slices of at most `bucket_bytes` that cover the buffer in order. Both ends make the same ones, so that broadcasts match."""
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
    """Receivers in the order in which they came. Those that want the same bytes as the first one share one broadcast.

    It begins when `expected` of them have come, or when none has come for `quiet_seconds`: engines are told of a version within
    milliseconds of each other, and one that is late or comes back gets a broadcast of its own.
    """

    def __init__(self, *, expected: int | None, quiet_seconds: float) -> None:
        self._expected, self._quiet_seconds = expected, quiet_seconds
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
        if self._expected is not None and len(together) >= self._expected:
            return 0.0
        return max(0.0, together[-1].since + self._quiet_seconds - now)

    def take(self) -> list[WaitingReceiver]:
        """The receivers of the next broadcast; none if no receiver waits."""
        together = self._together()
        self._waiting = [m for m in self._waiting if m not in together]
        return together

    def _together(self) -> list[WaitingReceiver]:
        return [m for m in self._waiting if m.ask.fingerprint == self._waiting[0].ask.fingerprint]
