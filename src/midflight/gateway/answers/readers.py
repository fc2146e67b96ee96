"""The readers of an answer: the client that made the request, and clients that retry it.
Synchronous, except for a reader's waits.

Usually an answer has one reader. A retry adds another reader, which begins at the first token. A
request is a retry if it has the idempotency key of the original. It is one too if it has the same
body and a header that says so, and the original has lost its reader. The retry gets the original's
answer: one generation, one turn. Identical calls without a key or a header are distinct. Times are
the loop's.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from secrets import randbits

import xxhash

from midflight.errors import IdempotencyConflict, Overloaded, RequestRejected
from midflight.gateway.answers.answer import START, Event, Mark
from midflight.gateway.answers.plan import Job
from midflight.gateway.sessions.request_clock import OpenRequest
from midflight.types.names import parted

MAX_KEPT = 1024
"""The most finished answers that are kept for retries. Each holds its tokens, some kilobytes. A
retry comes within seconds of the loss.
"""
MAX_KEY_CHARS = 256
"""The longest idempotency key; SDKs send about 40 characters."""
MAX_RETRY_AFTER_SECONDS = 60
"""The longest wait that a refusal advises. It is long enough for any pause of a handover, and short
enough to notice the pause's end soon.
"""

_SEED = randbits(64)
"""Makes the digests of bodies others in each process, so that no client can prepare two bodies of
one digest.
"""
_SMOOTHING = 0.1
"""The weight of the newest interval in the mean time between two ends. About the last ten intervals
count.
"""


class Ongoing:
    """A call, from its start until its answers are complete or it has failed. `hear` wakes all its
    readers.

    Without readers it goes on for `orphan_seconds`; 0 cancels it at once. A new reader keeps it
    alive again.
    """

    __slots__ = (
        "_readers",
        "_scope",
        "created",
        "delivered",
        "ended",
        "error",
        "job",
        "orphan_seconds",
    )

    def __init__(self, job: Job, *, created: int = 0, orphan_seconds: float = 0.0) -> None:
        """`created`: Unix seconds, the same for every reader."""
        self.job = job
        self.created = created
        self.orphan_seconds = orphan_seconds
        self.ended = False
        self.error: Exception | None = None
        self.delivered = False
        """True if some reader has received all of it."""
        self._readers: list[Reader] = []
        self._scope: asyncio.Timeout | None = None

    def runs_in(self, scope: asyncio.Timeout) -> None:
        """Sets the scope whose deadline cancels the generation. The close of the session uses the
        same deadline.
        """
        self._scope = scope

    def hear(self) -> None:
        """Wakes the readers: an answer has grown, or was closed."""
        for reader in self._readers:
            reader.wake(news=True)

    def end(self, error: Exception | None = None) -> None:
        """The answers are complete, or the call has failed. All readers are woken."""
        self.ended = True
        self.error = error
        self._scope = None
        for reader in self._readers:
            reader.has_news = True
            reader.stop_waiting()
            reader.wake()

    @property
    def is_lost(self) -> bool:
        """True if it has no reader, and no reader has received all of it."""
        return not self._readers and not self.delivered

    @property
    def is_read(self) -> bool:
        return bool(self._readers)

    @property
    def is_cancelled(self) -> bool:
        """True if it was without a reader for too long. It will only be cleaned up."""
        return self._scope is not None and self._scope.expired()

    def join(self, request: OpenRequest | None = None) -> Reader:
        """A new reader, which begins at the first token. `request` ends with the answer, or when
        the reader has left.
        """
        reader = Reader(self, request)
        if self.ended:
            reader.stop_waiting()
        self._readers.append(reader)
        self._hold_until(None)
        return reader

    def leave(self, reader: Reader) -> None:
        """Removes a reader. Leaving again does nothing."""
        if reader in self._readers:
            self._readers.remove(reader)
            if not self._readers:
                self._hold_until(asyncio.get_running_loop().time() + self.orphan_seconds)

    def _hold_until(self, when: float | None) -> None:
        """Sets the deadline of the scope. A closed session has already set it to end the call, and
        that must not be undone.
        """
        if self._scope is not None and not self._scope.expired() and not self.job.session.closed:
            self._scope.reschedule(when)


class Reader:
    """One client's position in the answers of a call. News that it has not taken are merged, so a
    slow reader costs no memory of its own.
    """

    __slots__ = ("_marks", "_request", "_waiter", "done", "gone", "has_news", "ongoing", "tell")

    def __init__(self, ongoing: Ongoing, request: OpenRequest | None = None) -> None:
        self.ongoing = ongoing
        self._request = request
        self.gone = False
        """True if the client left before it had received everything."""
        self.done = False
        """True if the last byte was sent."""
        self.tell: Callable[[], None] | None = None
        """Sends news to the client at once, without a switch to the task that waits for them."""
        self.has_news = True
        self._marks: list[Mark] = [START] * len(ongoing.job.answers)
        """The part of each answer that the client has received; `_TOLD` for all of it."""
        self._waiter: asyncio.Future[None] | None = None

    def wake(self, *, news: bool = False) -> None:
        self.has_news |= news
        if self._waiter is None or self._waiter.done():
            return
        if not news or self.tell is None:
            self._waiter.set_result(None)
            return
        try:
            self.tell()
        except Exception as error:  # the error belongs to this reader, not to the caller
            self._waiter.set_exception(error)

    def take(self) -> list[Event]:
        """The new events: the news of each answer, and the answer itself once it is closed."""
        self.has_news = False
        events: list[Event] = []
        for place, answer in enumerate(self.ongoing.job.answers):
            mark = self._marks[place]
            if mark is _TOLD:
                continue
            now = answer.mark
            if now != mark:
                events.append(answer.since(mark))
            self._marks[place] = now
            if answer.is_closed:
                events.append(answer)
                self._marks[place] = _TOLD
        return events

    def news(self) -> asyncio.Future[None]:
        """A future that is done when there is news, at the end, when the client has left, or after
        a `wake`. Only one task may wait for it at a time.
        """
        self._waiter = asyncio.get_running_loop().create_future()
        if self.has_news or self.ongoing.ended or self.gone:
            self._waiter.set_result(None)
        return self._waiter

    async def wait_for_end(self) -> None:
        """Waits for the end, or until the client has left."""
        while not (self.ongoing.ended or self.gone):
            self.has_news = False
            await self.news()

    def stop_waiting(self) -> None:
        """The client no longer waits, because the answer is complete or the client has left."""
        if self._request is not None:
            self._request.end()

    def go(self) -> None:
        """The client has left, so nothing more is sent to it. After the last byte this does
        nothing.
        """
        if not self.done:
            self.gone = True
            self.stop_waiting()
            self.ongoing.leave(self)
            self.wake()

    def told_all(self) -> None:
        """The last byte was sent."""
        self.done = not self.gone
        self.ongoing.delivered |= self.done and self.ongoing.error is None


_TOLD: Mark = (-1, -1, -1)
"""The mark of an answer that the client has received completely."""


@dataclass(frozen=True, slots=True)
class RetryTicket:
    """The owner and the content of a request. A retry finds its original by them."""

    owner: str = field(repr=False)
    """The session; without one, the API key."""
    key: str | None
    """The client's idempotency key."""
    digest: bytes
    """The digest of the route and the body."""
    is_retry: bool
    """True if the client says that it has sent the request before."""


def retry_ticket(
    headers: Mapping[bytes, bytes],
    *,
    session_id: str | None,
    api_key: str | None,
    path: str,
    body: bytes,
) -> RetryTicket | None:
    """The ticket of a request. Returns `None` without a session and without an idempotency key,
    because then a retry cannot be told from a second request.
    """
    key = headers.get(b"idempotency-key", b"").decode("latin-1") or None
    if key is not None and len(key) > MAX_KEY_CHARS:
        raise RequestRejected(
            f"the Idempotency-Key has {len(key)} characters: send {MAX_KEY_CHARS} at most.",
            param="Idempotency-Key",
        )
    if session_id is None and key is None:
        return None
    owner = f"session {session_id}" if session_id is not None else f"key {api_key or ''}"
    digest = path.encode() + xxhash.xxh3_128_digest(body, _SEED)
    return RetryTicket(owner, key, digest, _says_retry(headers.get(b"x-stainless-retry-count")))


class Requests:
    """The requests under way, at most `max_requests`, and finished ones that may be retried. A
    request with a ticket survives the loss of its client for `orphan_seconds`.
    """

    def __init__(
        self, *, max_requests: int, orphan_seconds: float, max_kept: int = MAX_KEPT
    ) -> None:
        self._max_requests = max_requests
        self._orphan_seconds = orphan_seconds
        self._max_kept = max_kept
        self._by_key: dict[tuple[str, str], Ongoing] = {}
        self._by_digest: defaultdict[tuple[str, bytes], list[Ongoing]] = defaultdict(list)
        self._tickets: dict[Ongoing, RetryTicket] = {}
        self._kept: OrderedDict[Ongoing, float] = OrderedDict()
        """Finished requests and the times when they are forgotten, soonest first."""
        self.num_running = 0
        self._last_end = -math.inf
        self._mean_interval = 0.0

    @property
    def orphan_seconds(self) -> float:
        return self._orphan_seconds

    def find(self, asked: RetryTicket | None, *, now: float) -> Ongoing | None:
        """The original of a retry. Another body under a known key raises `IdempotencyConflict`."""
        self._expire(now)
        if asked is None:
            return None
        if asked.key is not None:
            return self._original(asked, asked.key)
        if not asked.is_retry:
            return None
        for ongoing in self._by_digest.get((asked.owner, asked.digest), ()):
            if ongoing.is_lost and not ongoing.is_cancelled:
                return ongoing
        return None

    def check_room(self) -> None:
        """Raises `Overloaded` if there is no room for another request."""
        if self.num_running >= self._max_requests:
            seconds = min(max(1, math.ceil(self._mean_interval)), MAX_RETRY_AFTER_SECONDS)
            raise Overloaded(
                (
                    f"{self.num_running} requests are under way, the most allowed: try again in "
                    f"{seconds} s, or raise gateway.max_sessions."
                ),
                retry_after_seconds=seconds,
            )

    def begin(self, ongoing: Ongoing, asked: RetryTicket | None) -> None:
        """The generation starts; `end` must follow."""
        self.num_running += 1
        if asked is None:
            return
        self._tickets[ongoing] = asked
        self._by_digest[asked.owner, asked.digest].append(ongoing)
        if asked.key is not None:
            self._by_key[asked.owner, asked.key] = ongoing

    def end(self, ongoing: Ongoing, error: Exception | None, *, now: float) -> None:
        """The generation is over. A failure is not kept: the next try gets another generation."""
        self.num_running -= 1
        if self._last_end > -math.inf:
            self._mean_interval += _SMOOTHING * (now - self._last_end - self._mean_interval)
        self._last_end = now
        ongoing.end(error)
        if error is not None:
            self._forget(ongoing)

    def settle(self, ongoing: Ongoing, *, now: float) -> None:
        """A reader has left. The request is kept for a retry if it has ended and its session has
        not. If it was delivered completely, only its key can name it again.
        """
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
        """Forgets the finished requests of a session. The running ones end by themselves."""
        owner = f"session {session_id}"
        finished = [kept for kept in self._kept if parted(self._tickets[kept].owner)[0] == owner]
        for ongoing in finished:
            self._forget(ongoing)

    def _original(self, asked: RetryTicket, key: str) -> Ongoing | None:
        found = self._by_key.get((asked.owner, key))
        if found is None or found.is_cancelled:
            return None
        if self._tickets[found].digest != asked.digest:
            raise IdempotencyConflict(
                (
                    f"the Idempotency-Key {key!r} was sent with another body before: send the same "
                    "body again, or a new key."
                ),
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
    """True if the header names a retry. SDKs count their retries from 0."""
    return count is not None and count.isdigit() and count.strip(b"0") != b""
