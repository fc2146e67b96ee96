"""The gateway without a wire: sessions, and calls that become generations. `http` puts it on the network.

A call is `prepare`d synchronously (every fault of the client shows there) and then `run`; its events go to a sink.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable

from midflight.errors import MidflightError, SessionClosed, Unauthorized
from midflight.gateway.answers.answering import Answering, Generator
from midflight.gateway.answers.lengths import check_lengths
from midflight.gateway.answers.plan import Job, Planner
from midflight.gateway.answers.retries import Requests
from midflight.gateway.answers.sampling import Limits
from midflight.gateway.sessions.call import Answer, CompletionCall, Delta, Sink, Source
from midflight.gateway.sessions.registry import OpenSession, SessionRegistry
from midflight.gateway.sessions.replay import RecordedTurns
from midflight.gateway.sessions.session import Session
from midflight.text import Tokenizer
from midflight.text.formats import MessageFormat
from midflight.types import RolloutKey, SamplingParams, SessionRecord, Turn, Version
from midflight.types.facts import Record, RequestFailed, SessionEnded


class Gateway:
    """Implements `ports.Sessions`. Bounded by `max_sessions` and `max_requests`."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        record: Record,
        *,
        model: str,
        limits: Limits,
        run_name: str = "run",
        run_seed: int = 0,
        max_sessions: int = 10_000,
        max_requests: int = 4096,
        orphan_seconds: float = 30.0,
        anonymous: bool = True,
        count_all_choices: bool = False,
        message_format: MessageFormat | None = None,
    ) -> None:
        """`anonymous`: requests without a session's token are answered, untracked. `message_format`: default, by the chat template."""
        self.tokenizer = tokenizer
        self.message_format = message_format or MessageFormat(tokenizer)
        self.model = model
        self.limits = limits
        self.address = "http://127.0.0.1"
        """Where agents reach it, without a path; set once the port is known."""
        self.requests = Requests(max_requests=max_requests, orphan_seconds=orphan_seconds)
        """Under way over any wire, and what their retries may ask for."""
        self.answering = Answering(generator, tokenizer, self.message_format, record)
        self._recorded: dict[RolloutKey, RecordedTurns] = {}
        self._generator = generator
        self._record = record
        self._planner = Planner(model=model, limits=limits, message_format=self.message_format, run_name=run_name, run_seed=run_seed)
        self._anonymous = anonymous
        self._sessions = SessionRegistry(tokenizer, max_sessions=max_sessions, message_format=self.message_format)
        self._count_all_choices = count_all_choices
        self._scopes: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        """Cancellation of the calls running in each session."""

    # --- Sessions, for their owner -----------------------------------------------------------------------------------

    def open(self, key: RolloutKey, *, sampling: SamplingParams, tracked: bool, count_all_choices: bool | None = None) -> OpenSession:
        """`sampling` gives defaults, and the temperature that counts as the policy's. Too many sessions: `Overloaded`.

        `count_all_choices`: choices (n > 1) that the agent did not continue are trained too, not dropped(unchosen); default: the
        gateway's."""
        counts_all = self._count_all_choices if count_all_choices is None else count_all_choices
        handle = self._sessions.open(key, sampling=sampling, tracked=tracked, address=self.address, count_all_choices=counts_all)
        if tracked and key in self._recorded:
            self._sessions.get(handle.session_id).recorded = self._recorded.pop(key)
        return handle

    def replay(self, key: RolloutKey, turns: Iterable[Turn]) -> None:
        """The next tracked session of this rollout is given these turns again instead of new ones, as far as its agent asks for them (I8)."""
        self._recorded[key] = RecordedTurns(turns)

    def close(self, session_id: str) -> SessionRecord:
        """Ends the session; what runs in it is cancelled with `SessionClosed`. Closing again gives the record without rows."""
        first = session_id in self._sessions
        record = self._sessions.close(session_id)
        if first:
            self._record(SessionEnded(record.num_turns, record.num_branches, record.num_rewritten, record.num_mismatches))
        for scope in self._scopes.pop(session_id, ()):
            scope.reschedule(asyncio.get_running_loop().time())
        self._generator.forget(session_id)
        self.requests.forget_session(session_id)
        return record

    def oldest_version(self, session_id: str) -> Version | None:
        """Of the tokens received so far, those of running requests too."""
        return self._sessions.get(session_id).oldest_version

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def registry(self) -> SessionRegistry:
        """Who may use which session."""
        return self._sessions

    # --- Requests, for agents ----------------------------------------------------------------------------------------

    def session_for(self, *, path_token: str | None, api_key: str | None) -> Session:
        """The session a request belongs to: by its path, by its API key, else an anonymous one that leaves no trace."""
        if path_token is not None:
            return self._sessions.authorised(path_token)
        if api_key is not None and self._sessions.is_session_token(api_key):
            return self._sessions.authorised(api_key)
        if not self._anonymous:
            raise Unauthorized("this endpoint serves sessions only: use the base URL or API key that was given for yours.")
        return Session("anonymous", self.tokenizer, key=None, sampling=None, tracked=False)

    def prepare(self, session: Session, call: CompletionCall) -> Job:
        """Checks a call and plans its tokens. Raises `RequestRejected` and kin; nothing has been generated then."""
        return self._planner.plan(session, call)

    async def check_lengths(self, call: CompletionCall, *, num_bytes: int) -> None:
        """Waits, if the call is long, for a look at its prompts. To be called before `prepare`, which holds up the event loop."""
        await check_lengths(self.tokenizer, call.sources, self.limits, num_bytes=num_bytes, param=call.prompt_param)

    def count(self, session: Session, source: Source) -> int:
        """Tokens of a prompt, as `prepare` would send it."""
        return len(session.plan(source).ids)

    async def run(self, job: Job, sink: Sink, *, begun: Callable[[asyncio.Timeout], None] | None = None) -> None:
        """Waits for the answers; each event goes to `sink`. Ended by the answers, by the request's deadline (inside the
        generator), by the close of the session (`SessionClosed`), by the cancellation of the caller, or by whoever reschedules
        the scope that `begun` is told of (`TimeoutError`)."""
        session = job.session
        if session.closed:
            raise SessionClosed(f"session {session.session_id} has ended: open a new one.")
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes[session.session_id].add(scope)
                if begun is not None:
                    begun(scope)
                try:
                    await self.answering.run(job, sink)
                finally:
                    self._forget_scope(session, scope)
        except TimeoutError:
            if not session.closed:
                raise
            raise SessionClosed(f"session {session.session_id} ended while the request ran: open a new one.") from None

    async def answers(self, job: Job) -> list[Answer]:
        """Runs a job and waits for all its answers, in order of their choices."""
        found: list[Answer] = []

        def keep(event: Delta | Answer) -> None:
            if isinstance(event, Answer):
                found.append(event)

        await self.run(job, keep)
        return sorted(found, key=lambda answer: answer.choice)

    def failed(self, session: Session | None, error: BaseException) -> None:
        """A request ended in an error at the agent's edge: counted and shown."""
        if session is not None:
            session.failed_requests += 1
        status = error.status if isinstance(error, MidflightError) else 500
        session_id = session.session_id if session is not None and session.key is not None else None
        self._record(RequestFailed(session_id, status, f"{type(error).__name__}: {error}"))

    # --- Inside ------------------------------------------------------------------------------------------------------

    def _forget_scope(self, session: Session, scope: asyncio.Timeout) -> None:
        scopes = self._scopes.get(session.session_id)
        if scopes is not None:
            scopes.discard(scope)
            if not scopes:
                del self._scopes[session.session_id]
