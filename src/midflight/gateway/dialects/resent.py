"""Bodies that begin as an earlier one of their session did. Agents send the whole conversation with
each turn; of such a body only what is new is read.

Two bodies with the same bytes up to the end of a message are read alike until there. So the
messages before that place are left out of the body, and what is left is read as any body is. If
that fails for any reason, the whole body is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import randbits
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from midflight.errors import RequestRejected
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.sessions.seams import ResentMessages, Seam
from midflight.text import Message

Given = TypeVar("Given")
_SEED = randbits(64)
"""Makes the digests of bodies others in each process, so that no client can prepare two bodies of
one digest. It would deceive only itself.
"""
LEAST_BYTES = 2**14
"""The length from which on bodies are remembered. Shorter ones are read as fast as they are
compared, and what is remembered takes some kilobytes.
"""
_MAX_KNOWN = 2
"""The most bodies of a session that are remembered: two sub-agents may speak in turn."""
_BLANKS = b" \t\n\r"
_MARK = b'"cache_control"'
_NUM_MARKED = 4
"""Clients that mark messages for a cache move the marks on with each turn. So many of the last
messages may have one that is gone in the next body.
"""


class _MessagesField(msgspec.Struct):
    messages: list[msgspec.Raw]


_decode = msgspec.json.Decoder(_MessagesField).decode


@dataclass(frozen=True, slots=True)
class KnownBody:
    """A body up to the end of the last message that is expected to come again as it is."""

    num_bytes: int
    digest: bytes
    opening: int
    """The place of the bracket before its first message."""
    head: tuple[Message, ...]
    """The messages that come from other fields."""
    unread: UnreadFields
    """The fields of its messages that have no effect."""
    total: int
    """The number of its messages."""
    seam: Seam


@dataclass(frozen=True, slots=True)
class ResentBody:
    """A body that begins as a known one did."""

    known: KnownBody
    body: bytes
    short: bytes
    """The body without the messages that are known."""
    state: Any
    """The digest of the bytes that are known, which can go on."""

    @property
    def num_cut(self) -> int:
        """The bytes that are left out."""
        return len(self.body) - len(self.short)


@dataclass(slots=True)
class SentMessages:
    """The messages of a body, with what the next body needs to know of them."""

    resent: ResentBody | None
    first: int
    """The number of the body's messages that were read with an earlier body."""
    unread: UnreadFields
    """The fields without effect of the messages that are expected to come again."""
    num_marked: int
    """So many of the last messages may come in another form."""
    whole: Callable[[], Sequence[Message]]
    """Reads all messages."""
    total: int = 0
    """The number of the messages that are expected to come again."""
    head: tuple[Message, ...] = ()
    """The messages that come from other fields."""

    @classmethod
    def of(
        cls, body: bytes, resent: ResentBody | None, whole: Callable[[], Sequence[Message]]
    ) -> SentMessages:
        """Reads nothing of the new messages yet: `whole` gives all of them when they are wanted."""
        new = body if resent is None else resent.short
        marked = _NUM_MARKED if _MARK in new else 0
        if resent is None:
            return cls(None, 0, UnreadFields(), marked, whole)
        known = resent.known
        return cls(resent, known.total, known.unread.copy(), marked, whole)

    def read(
        self,
        new: Sequence[Given],
        reader: Callable[[Sequence[Given], UnreadFields, int], Sequence[Message]],
        unread: UnreadFields,
        *,
        head: Sequence[Message] = (),
    ) -> tuple[Sequence[Message], int]:
        """The whole conversation, and the number of its last messages that may come in another
        form. `new` are the messages of the body that were not read before, which `reader` reads; it
        gets the place of the first one. `head` are those from other fields. Raises
        `RequestRejected` if the conversation must be read from its beginning.
        """
        cut = max(0, len(new) - self.num_marked)
        self.total = self.first + cut
        self.head = tuple(head)
        steady = reader(new[:cut], self.unread, self.first)
        every = self.unread.copy()
        marked = reader(new[cut:], every, self.total)
        unread.add(every)
        if self.resent is None:
            return (*head, *steady, *marked), len(marked)
        if self.head != self.resent.known.head:
            raise RequestRejected("the conversation has another beginning: send it whole.")
        return ResentMessages(self.resent.known.seam, (*steady, *marked), self.whole), len(marked)


class KnownBodies:
    """The last bodies of one session in one dialect."""

    def __init__(self) -> None:
        self._known: deque[KnownBody] = deque(maxlen=_MAX_KNOWN)

    def find(self, body: bytes) -> ResentBody | None:
        """The longest known body that this one begins as, if it goes on with more messages."""
        view = memoryview(body)
        for known in sorted(self._known, key=lambda each: -each.num_bytes):
            end = known.num_bytes
            if len(body) <= end:
                continue
            state = xxhash.xxh3_128(view[:end], _SEED)
            if state.digest() != known.digest:
                continue
            after = end + _num_blanks(body, end)
            if body[after : after + 1] != b",":
                continue
            short = body[: known.opening + 1] + body[after + 1 :]
            places = places_of_messages(short)
            if places is not None and places[0] == known.opening:
                return ResentBody(known, body, short, state)
        return None

    def keep(self, body: bytes, sent: SentMessages, seam: Seam) -> None:
        """Remembers a body, whose prompt has this seam."""
        resent = sent.resent
        places = places_of_messages(
            body if resent is None else resent.short, sent.total - sent.first
        )
        if places is None:
            return
        opening, end = places
        if resent is None:
            state = xxhash.xxh3_128(memoryview(body)[:end], _SEED)
        else:
            end += resent.num_cut
            state = resent.state
            state.update(memoryview(body)[resent.known.num_bytes : end])
        self._known.append(
            KnownBody(end, state.digest(), opening, sent.head, sent.unread, sent.total, seam)
        )


def places_of_messages(body: bytes, number: int = 1) -> tuple[int, int] | None:
    """The place of the bracket before the first message of a body, and the end of its message
    `number`, counted from 1. `None` if the body has not so many, or is not read here.
    """
    try:
        messages = _decode(body).messages
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if not 1 <= number <= len(messages):
        return None
    start = _address(body)
    opening = _address(messages[0]) - start - 1
    while opening > 0 and body[opening] in _BLANKS:
        opening -= 1
    last = messages[number - 1]
    return opening, _address(last) - start + len(memoryview(last))


def _address(data: bytes | msgspec.Raw) -> int:
    """Where the bytes lie in memory. What msgspec does not decode lies in the body itself."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def _num_blanks(body: bytes, start: int) -> int:
    """The number of blanks from this place on."""
    end = start
    while end < len(body) and body[end] in _BLANKS:
        end += 1
    return end - start
