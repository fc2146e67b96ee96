"""What receivers and the publisher of a collective transport say to each other before the bytes move. Pure; needs no torch.

One line of JSON each way, over TCP: a receiver asks for a version, and the publisher answers which group to meet in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from midflight.types import Version

TRANSPORT = "collective"
MAX_LINE = 4096
"""Bytes of a message with its newline: a longer one is nobody's who belongs here."""

Backend = Literal["gloo", "nccl"]


class Ask(msgspec.Struct, frozen=True):
    """A receiver wants the bytes that hash to `fingerprint`. They name what is wanted; the version is for messages."""

    token: str
    version: Version
    fingerprint: str
    member: str
    """The receiver, as long as it lives."""
    group: str | None
    """The group it was in last, if that is still whole as far as it knows."""


class Join(msgspec.Struct, frozen=True, tag=True):
    """Make a group of `world` members through the store at `port`; you are `rank`, the publisher is 0."""

    group: str
    rank: int
    world: int
    port: int
    backend: Backend
    bucket_bytes: int
    deadline_seconds: float
    """For the making of the group, and for each bucket."""


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
    """`msgspec.MsgspecError` for anything else; no data at all is what a publisher that ended leaves."""
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
    """The same on both ends, so that broadcasts match: slices of at most `bucket_bytes` that cover the buffer in order."""
    for start in range(0, num_bytes, bucket_bytes):
        yield slice(start, min(start + bucket_bytes, num_bytes))
