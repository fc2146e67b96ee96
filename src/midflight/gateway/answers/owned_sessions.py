"""Sessions that owners outside this process open, score and end. A session without requests ends by
itself.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `SessionExpiry.run` | sessions and records that fall due | the earliest of them | time; a session opened when there was none |
"""

import asyncio
import logging
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

from msgspec.structs import replace

from midflight.errors import RewardFixed, Unauthorized, UnknownSession
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.sessions.registry import OpenSession, shown
from midflight.types import GroupKey, Json, Kind, Result, RolloutKey, SamplingParams, SessionRecord
from midflight.wire.edge import same_token

log = logging.getLogger(__name__)

MAX_ENDED = 10_000
"""The most ended sessions whose records are kept for their owners. Each takes some kilobytes until
its rows have been fetched.
"""
MAX_AT_ONCE = 64
"""The most sessions that are ended between two turns of the event loop. Making the rows of one
takes about a millisecond, and answers must not wait long.
"""


@dataclass(frozen=True, slots=True, eq=False)
class OwnedRecord:
    """An ended session, as its owner gets it."""

    key: RolloutKey
    record: SessionRecord
    task: Json
    said: Result
    """The reward (None if none was given), and the details that came with it."""
    rows_given: bool
    """True if the rows were handed over before. Then they are not here (I3)."""

    @property
    def reward(self) -> float | None:
        return cast("float | None", self.said.reward)  # a late one is refused on arrival


@dataclass(slots=True, eq=False)
class _OwnedSession:
    key: RolloutKey
    handle: OpenSession = field(repr=False)
    keeps_rows: bool
    task: Json
    due: float
    num_seen: int | None = 0
    """The number of requests at the last check. It is None if one was running."""
    record: SessionRecord | None = None
    rows_given: bool = False
    said: Result | None = None


class OwnedSessions:
    """The open and ended sessions of outside owners. Synchronous; times are those of the running
    event loop.

    Every session is checked each `session_seconds`. It ends at the first check that finds nothing
    running and no request since the check before. So it ends after at least that long without a
    request, and less than twice as long. Its record is then kept for `session_seconds`, for an
    owner that comes late; after that the reward stays None. All sessions have the same time to
    live, so the order in which they fall due is the order of insertion, and every move costs O(1).
    The gateway bounds the open sessions, `max_ended` the ended ones.
    """

    def __init__(
        self, gateway: Gateway, *, session_seconds: float, max_ended: int = MAX_ENDED
    ) -> None:
        self._gateway = gateway
        self._seconds = session_seconds
        self._max_ended = max_ended
        self._live: OrderedDict[str, _OwnedSession] = OrderedDict()
        self._ended: OrderedDict[str, _OwnedSession] = OrderedDict()
        self.changed = asyncio.Event()
        """Set when the earliest due may have come nearer."""

    def __len__(self) -> int:
        """The number of open sessions."""
        return len(self._live)

    @property
    def num_ended(self) -> int:
        """The number of records that are kept."""
        return len(self._ended)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._live or session_id in self._ended

    def open(
        self,
        *,
        sampling: SamplingParams,
        keeps_rows: bool,
        task: Json = None,
        count_all_choices: bool = False,
    ) -> OpenSession:
        """Opens a session, or raises `Overloaded` when too many are open. The run neither stores
        the session nor trains on it: its tokens belong to the owner.

        The key is drawn at random, so that two sessions never sample alike. A client that wants the
        same answers again sends seeds.
        """
        key = RolloutKey(GroupKey(0, secrets.randbelow(2**31)), 0, Kind.OUTSIDE)
        handle = self._gateway.open(
            key, sampling=sampling, tracked=False, count_all_choices=count_all_choices
        )
        if not (self._live or self._ended):
            self.changed.set()
        self._live[handle.session_id] = _OwnedSession(
            key, handle, keeps_rows, task, due=self._now() + self._seconds
        )
        return handle

    def check_owner(self, session_id: str, token: str) -> None:
        """Raises `Unauthorized` unless the token is the owner's token of this session."""
        known = self._find(session_id).handle.owner_token
        if not same_token(token, known):
            raise Unauthorized(
                f"not the owner of session {session_id}: use the owner token that was given when "
                "it was opened."
            )

    def score(self, session_id: str, said: Result) -> None:
        """Sets the result, before the session's end or after it. The same result again changes
        nothing; another one raises `RewardFixed`.
        """
        owned = self._find(session_id)
        if owned.said is not None and owned.said != said:
            raise RewardFixed(
                f"scoring session {session_id}: its reward is {owned.said.reward} already; a "
                "reward is given once."
            )
        owned.said = said

    def end(self, session_id: str) -> OwnedRecord:
        """Ends the session if it has not ended, and hands its rows over once (I3). A second call
        returns the record without rows.
        """
        owned = self._find(session_id)
        record = owned.record or self._close(session_id)
        given = OwnedRecord(
            owned.key, record, owned.task, owned.said or Result(None), owned.rows_given
        )
        owned.record = replace(record, rows=())
        owned.rows_given = True
        return given

    def has_reward(self, session_id: str) -> bool:
        """True if a reward was given that is a number. A reward of None does not count."""
        said = self._find(session_id).said
        return said is not None and said.reward is not None

    def expire(self) -> float | None:
        """Looks at the sessions and forgets the records that are due, a bounded number of them.
        Returns the time of the next due, None if there is nothing to wait for.
        """
        now = self._now()
        for owned in list(islice(self._live.values(), MAX_AT_ONCE)):
            if owned.due <= now:
                self._look(owned, now)
        while self._ended and next(iter(self._ended.values())).due <= now:
            self._ended.popitem(last=False)
        earliest = [next(iter(kept.values())).due for kept in (self._live, self._ended) if kept]
        return min(earliest, default=None)

    def _look(self, owned: _OwnedSession, now: float) -> None:
        session_id = owned.handle.session_id
        session = self._gateway.registry.get(session_id)
        if not session.num_running and session.num_requests == owned.num_seen:
            self._close(session_id)
            return
        owned.num_seen = None if session.num_running else session.num_requests
        owned.due = now + self._seconds
        self._live.move_to_end(session_id)

    def _close(self, session_id: str) -> SessionRecord:
        owned = self._live.pop(session_id)
        record = self._gateway.close(session_id)
        owned.record = record if owned.keeps_rows else replace(record, rows=())
        owned.due = self._now() + self._seconds
        self._ended[session_id] = owned
        if len(self._ended) > self._max_ended:
            forgotten, lost = self._ended.popitem(last=False)
            if not lost.rows_given:
                log.warning(
                    (
                        "session %s is forgotten with its rows: %d ended sessions are kept; end "
                        "yours sooner"
                    ),
                    forgotten,
                    self._max_ended,
                )
        return owned.record

    def _find(self, session_id: str) -> _OwnedSession:
        found = self._live.get(session_id) or self._ended.get(session_id)
        if found is None:
            raise UnknownSession(
                f"there is no session {shown(session_id)}: it was not opened here, or ended more "
                f"than {self._seconds:g} s ago; open a new one."
            )
        return found

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class SessionExpiry:
    """Ends sessions in time."""

    def __init__(self, owned: OwnedSessions) -> None:
        self._owned = owned

    async def run(self) -> None:
        """Waits for the earliest due, or for a first session; ended by its task group."""
        while True:
            self._owned.changed.clear()
            due = self._owned.expire()
            try:
                async with asyncio.timeout_at(due):
                    await self._owned.changed.wait()
            except TimeoutError:
                continue
