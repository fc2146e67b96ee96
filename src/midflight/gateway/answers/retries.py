"""Which requests are under way, how many may be, and which of them a retry means. Synchronous; times are the loop's.

A retry (DECISIONS 14) has the idempotency key of the original; or its body and a header that says so, and nobody reads the
original any more. It is told the original's answer: one generation, one turn. Identical calls without either are distinct.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from midflight.errors import IdempotencyConflict, Overloaded, RequestRejected
from midflight.gateway.answers.ongoing import Ongoing

MAX_KEPT = 1024
"""Finished answers kept for retries; each holds its tokens, some kilobytes. A retry comes within seconds of the loss."""
MAX_KEY_CHARS = 256
"""Of an idempotency key; SDKs send about 40."""
MAX_RETRY_AFTER_SECONDS = 60
"""The most that a refusal advises: long enough for any pause of a handover, short enough to notice that it is over."""

_SMOOTHING = 0.1
"""Weight of the newest interval in the mean time between two ends: about the last ten count."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Who asks for what: by this a retry finds its original."""

    owner: str = field(repr=False)
    """The session; without one, the API key."""
    key: str | None
    """The client's idempotency key."""
    digest: bytes
    """Of the route and the body."""
    is_retry: bool
    """Whether the client says that he has asked before."""


def ticket(headers: Mapping[bytes, bytes], *, session_id: str | None, api_key: str | None, path: str, body: bytes) -> Ticket | None:
    """`None` where nothing tells a retry from a second request: without session and without idempotency key."""
    key = headers.get(b"idempotency-key", b"").decode("latin-1") or None
    if key is not None and len(key) > MAX_KEY_CHARS:
        raise RequestRejected(f"the Idempotency-Key has {len(key)} characters: send {MAX_KEY_CHARS} at most.", param="Idempotency-Key")
    if session_id is None and key is None:
        return None
    owner = f"session {session_id}" if session_id is not None else f"key {api_key or ''}"
    digest = hashlib.blake2b(body, digest_size=16, person=path.encode()[-16:]).digest()
    return Ticket(owner, key, digest, _says_retry(headers.get(b"x-stainless-retry-count")))


class Requests:
    """At most `max_requests` under way. One that has a ticket survives the loss of its client for `orphan_seconds`."""

    def __init__(self, *, max_requests: int, orphan_seconds: float, max_kept: int = MAX_KEPT) -> None:
        self._max_requests, self._orphan_seconds, self._max_kept = max_requests, orphan_seconds, max_kept
        self._by_key: dict[tuple[str, str], Ongoing] = {}
        self._by_digest: defaultdict[tuple[str, bytes], list[Ongoing]] = defaultdict(list)
        self._tickets: dict[Ongoing, Ticket] = {}
        self._kept: OrderedDict[Ongoing, float] = OrderedDict()
        """Finished ones and when they are forgotten, soonest first."""
        self.num_running = 0
        self._last_end = -math.inf
        self._mean_interval = 0.0

    @property
    def num_known(self) -> int:
        """Answers that a retry could find, running and finished."""
        return len(self._tickets)

    @property
    def orphan_seconds(self) -> float:
        return self._orphan_seconds

    def find(self, asked: Ticket | None, *, now: float) -> Ongoing | None:
        """The original of a retry. Another body under a known key is an `IdempotencyConflict`."""
        self._expire(now)
        if asked is None:
            return None
        if asked.key is not None:
            return self._original(asked, asked.key)
        if not asked.is_retry:
            return None
        alike = self._by_digest.get((asked.owner, asked.digest), ())
        return next((ongoing for ongoing in alike if ongoing.is_lost and not ongoing.is_cancelled), None)

    def check_room(self) -> None:
        """`Overloaded` if there is no room for another request."""
        if self.num_running >= self._max_requests:
            seconds = min(max(1, math.ceil(self._mean_interval)), MAX_RETRY_AFTER_SECONDS)
            raise Overloaded(
                f"{self.num_running} requests are under way, the most allowed: try again in {seconds} s, or raise gateway.max_requests.",
                retry_after_seconds=seconds,
            )

    def begin(self, ongoing: Ongoing, asked: Ticket | None) -> None:
        """Its generation starts; `end` must follow."""
        self.num_running += 1
        if asked is None:
            return
        self._tickets[ongoing] = asked
        self._by_digest[asked.owner, asked.digest].append(ongoing)
        if asked.key is not None:
            self._by_key[asked.owner, asked.key] = ongoing

    def end(self, ongoing: Ongoing, error: Exception | None, *, now: float) -> None:
        """Its generation is over. A failure is not kept: who tries again gets another generation."""
        self.num_running -= 1
        if self._last_end > -math.inf:
            self._mean_interval += _SMOOTHING * (now - self._last_end - self._mean_interval)
        self._last_end = now
        ongoing.end(error)
        if error is not None:
            self._forget(ongoing)

    def settle(self, ongoing: Ongoing, *, now: float) -> None:
        """A reader has left. What was told whole can be asked for again by its key alone; nothing can, once its session has ended."""
        asked = self._tickets.get(ongoing)
        if asked is None or not ongoing.ended or ongoing.is_read:
            return
        if ongoing.job.session.closed or (asked.key is None and ongoing.delivered):
            self._forget(ongoing)
            return
        self._kept[ongoing] = now + self._orphan_seconds
        self._kept.move_to_end(ongoing)
        if len(self._kept) > self._max_kept:
            self._forget(next(iter(self._kept)))

    def forget_session(self, session_id: str) -> None:
        """Its finished answers; the running ones end by themselves."""
        for ongoing in [kept for kept in self._kept if self._tickets[kept].owner == f"session {session_id}"]:
            self._forget(ongoing)

    def _original(self, asked: Ticket, key: str) -> Ongoing | None:
        found = self._by_key.get((asked.owner, key))
        if found is None or found.is_cancelled:
            return None
        if self._tickets[found].digest != asked.digest:
            raise IdempotencyConflict(
                f"the Idempotency-Key {key!r} was sent with another body before: send the same body again, or a new key.",
                param="Idempotency-Key",
            )
        return found

    def _expire(self, now: float) -> None:
        while self._kept:
            oldest, due = next(iter(self._kept.items()))
            if due > now:
                return
            self._forget(oldest)

    def _forget(self, ongoing: Ongoing) -> None:
        self._kept.pop(ongoing, None)
        asked = self._tickets.pop(ongoing, None)
        if asked is None:
            return
        alike = self._by_digest[asked.owner, asked.digest]
        alike.remove(ongoing)
        if not alike:
            del self._by_digest[asked.owner, asked.digest]
        if asked.key is not None and self._by_key.get((asked.owner, asked.key)) is ongoing:
            del self._by_key[asked.owner, asked.key]


def _says_retry(count: bytes | None) -> bool:
    """SDKs count their attempts from 0."""
    return count is not None and count.isdigit() and count.strip(b"0") != b""
