"""All sessions by id, with their secrets. Synchronous.

A session's token is `<id>.<secret>`. Its agent uses it in the address or as the API key. The
session's owner has another token, `<id>.<other secret>`. The owner's token allows to score, read
and end the session, which the agent must not do. Only the id is ever printed.
"""

import base64
import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

from msgspec.structs import replace

from midflight.errors import Overloaded, SessionClosed, Unauthorized, UnknownSession
from midflight.gateway.sessions.session import Session
from midflight.gateway.sessions.tree import Matcher
from midflight.text import Tokenizer
from midflight.text.formats import MessageFormat
from midflight.types import RolloutKey, SamplingParams, SessionRecord
from midflight.types.names import PART, UNTRACKED, parted
from midflight.wire.edge import same_token

PREFIX = "mf-"
"""The beginning of every session id. It distinguishes a session's token from any other API key."""

_SECRET_BYTES = 18
"""The length of each of a session's two secrets: too long to guess, and a whole number of base64
letters.
"""
_REMEMBERED = 10_000
"""The most ended sessions that still answer 410; older ones are unknown. A record without rows has
some hundred bytes.
"""


@dataclass(frozen=True, slots=True)
class OpenSession:
    """The access to a session that an environment's runner gets (`SessionHandle`). The secrets stay
    out of its repr.
    """

    session_id: str
    base_url: str = field(repr=False)
    api_key: str = field(repr=False)
    owner_token: str = field(repr=False)


class SessionRegistry:
    """Opens, finds and closes sessions, and checks their tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_sessions: int,
        message_format: MessageFormat | None = None,
        shard: int | None = None,
    ) -> None:
        """`shard` is the number of this gateway among several; the ids of its sessions then begin
        with it.
        """
        self._prefix = PREFIX if shard is None else f"{PREFIX}s{shard}-"
        self._tokenizer = tokenizer
        self._matcher = Matcher(tokenizer, message_format)
        self._max_sessions = max_sessions
        self._live: dict[str, Session] = {}
        self._secrets: dict[str, tuple[str, str]] = {}
        """The agent's secret and the owner's secret of each session."""
        self._ended: OrderedDict[str, SessionRecord] = OrderedDict()
        self._serial = 0
        self._num_drawn = 0
        self._key = secrets.token_bytes(64)
        """All secrets are derived from this key. Asking the system for each of them would cost more
        than the rest of opening a session.
        """

    def __contains__(self, session_id: str) -> bool:
        """True if the session is live."""
        return session_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def open(
        self,
        key: RolloutKey,
        *,
        sampling: SamplingParams,
        tracked: bool,
        address: str,
        count_all_choices: bool = False,
    ) -> OpenSession:
        if len(self._live) >= self._max_sessions:
            raise Overloaded(
                f"opening a session: {len(self._live)} are open, the most allowed. Close some, or "
                "raise gateway.max_sessions."
            )
        self._serial += 1
        session_id = f"{self._prefix}{key}-{self._serial}"
        self._live[session_id] = Session(
            session_id,
            self._tokenizer,
            key=key,
            sampling=sampling,
            tracked=tracked,
            matcher=self._matcher,
            count_all_choices=count_all_choices,
        )
        return self._with_new_secrets(session_id, address)

    def reopen(self, session_id: str, *, address: str) -> OpenSession:
        """The same session under new secrets, for an agent that starts over. The old secrets are no
        longer valid.
        """
        self.get(session_id).begin_again()
        return self._with_new_secrets(session_id, address)

    def _with_new_secrets(self, session_id: str, address: str) -> OpenSession:
        self._num_drawn += 1
        drawn = hashlib.blake2b(
            b"%d" % self._num_drawn, key=self._key, digest_size=2 * _SECRET_BYTES
        ).digest()
        both = base64.urlsafe_b64encode(drawn).decode()
        half = len(both) // 2
        agent = both[:half]
        owner = both[half:]
        self._secrets[session_id] = (agent, owner)
        token = f"{session_id}.{agent}"
        return OpenSession(session_id, f"{address}/s/{token}/v1", token, f"{session_id}.{owner}")

    def close(self, session_id: str) -> SessionRecord:
        """Ends the session and returns its record. Its tokens are handed over once (I3): closing it
        again returns the record without rows.
        """
        session = self._live.pop(session_id, None)
        if session is None:
            return self._ended_record(session_id)
        record = session.close()
        self._ended[session_id] = replace(
            record, rows=(), masked={}, masked_by={}, replaced={}, dropped={}, failed_requests=0
        )
        if len(self._ended) > _REMEMBERED:
            forgotten, _ = self._ended.popitem(last=False)
            self._secrets.pop(forgotten, None)
        return record

    def get(self, session_id: str) -> Session:
        """The live session with this id, for its owner in this process."""
        session = self._live.get(session_id)
        if session is None:
            self._ended_record(session_id)
            raise SessionClosed(f"session {session_id} has ended: open a new one.")
        return session

    def authorised(self, token: str) -> Session:
        """The live session, or the part of one, that a client's token names."""
        whole, part = parted(token) if PART in token else (token, "")
        session_id, _, secret = whole.partition(".")
        if not same_token(secret, self._known(session_id)[0]):
            raise Unauthorized(
                f"wrong secret for session {session_id}: use the address or key that was given for "
                "it."
            )
        session = self.get(session_id)
        if not part:
            return session
        return session.apart() if part == UNTRACKED else session.role(part)

    def check_owner(self, session_id: str, token: str) -> None:
        """Raises `Unauthorized` unless the token is the owner's token of this session. This works
        after the session's end too, as long as it is remembered.
        """
        named, _, secret = token.partition(".")
        if named != session_id or not same_token(secret, self._known(session_id)[1]):
            raise Unauthorized(
                f"not the owner of session {shown(session_id)}: use the owner token that was given "
                "when it was opened."
            )

    def owner_token(self, session_id: str) -> str:
        """The owner's token of a session in this process. A worker in another process that runs its
        rollout needs it.
        """
        return f"{session_id}.{self._known(session_id)[1]}"

    def is_session_token(self, api_key: str) -> bool:
        return api_key.startswith(PREFIX) and "." in api_key

    def _known(self, session_id: str) -> tuple[str, str]:
        known = self._secrets.get(session_id)
        if known is None:
            raise UnknownSession(
                f"there is no session {shown(session_id)}: use the address that was given for the "
                "session."
            )
        return known

    def _ended_record(self, session_id: str) -> SessionRecord:
        record = self._ended.get(session_id)
        if record is None:
            raise UnknownSession(
                f"there is no session {shown(session_id)}: use one that `open` returned."
            )
        return record

    def __repr__(self) -> str:
        return f"<SessionRegistry of {len(self._live)}>"


def shown(name: str) -> str:
    """A session's name as it may be printed. A client may have sent a token or any other secret in
    its place.
    """
    if not name.startswith(PREFIX):
        return "of that name"
    return repr(name.partition(".")[0][:80])
