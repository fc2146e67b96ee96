"""The gateway without a wire: sessions, and calls that become answers. `http` puts it on the
network.

A call is `prepare`d synchronously (every fault of the client shows there) and then `run`.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from msgspec.structs import replace

from midflight.errors import (
    ContextExceeded,
    MidflightError,
    RequestRejected,
    SessionClosed,
    Stopping,
    Unauthorized,
    first_error,
)
from midflight.gateway.answers.answer import Answer
from midflight.gateway.answers.generation import Generator
from midflight.gateway.answers.pace import Pace
from midflight.gateway.answers.plan import EngineLimits, Job, Planner
from midflight.gateway.answers.readers import Ongoing, Requests
from midflight.gateway.sessions.history import RecordedTurns
from midflight.gateway.sessions.kept import KeptResponses
from midflight.gateway.sessions.registry import OpenSession, SessionRegistry
from midflight.gateway.sessions.request import CompletionCall, Messages, Source, Text
from midflight.gateway.sessions.request_clock import RequestClock
from midflight.gateway.sessions.session import Session
from midflight.text import Tokenizer
from midflight.text.formats import MessageFormat
from midflight.types import RolloutKey, SamplingParams, SessionRecord, Turn, TurnTimes, Version
from midflight.types.facts import (
    FieldsIgnored,
    Record,
    RequestFailed,
    SessionEnded,
    TurnFinished,
    TurnKept,
)
from midflight.wire.edge import retry_seconds

LONG_BODY = 2**17
"""Bytes of a request from which its prompts are looked at first; shorter ones tokenise in some
milliseconds.
"""

_PIECE = 2**14
"""Letters tokenised at a time, a few milliseconds each: between two, the event loop has its
turn.
"""

_MAX_KEYS = 16
"""Keys of clients outside sessions whose responses are kept."""

_MARGIN = 2
"""How many times the context a prompt may have here. A session's own tokens may be other ones than
those of its text.
"""


class PassedOver(Protocol):
    """What of a request has no effect."""

    @property
    def fields(self) -> Collection[str]: ...
    @property
    def labels(self) -> tuple[str, ...]:
        """The fields as labels of a metric, of which there are few."""
        ...

    @property
    def refusal(self) -> RequestRejected | None:
        """What a strict gateway says to it."""
        ...


class Gateway:
    """Implements `ports.Sessions`. Bounded by `max_sessions` and `max_requests`."""

    _stopping = False

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        record: Record,
        *,
        model: str,
        limits: EngineLimits,
        run_name: str = "run",
        run_seed: int = 0,
        max_sessions: int = 10_000,
        max_requests: int = 4096,
        orphan_seconds: float = 30.0,
        anonymous: bool = True,
        strict: bool = False,
        count_all_choices: bool = False,
        message_format: MessageFormat | None = None,
        apart: Generator | None = None,
        shard: int | None = None,
    ) -> None:
        """`apart`: of the engines that answer what no run records nor trains, if there are any.
        `anonymous`: requests without a session's token are answered, untracked. `strict`: what has
        no effect is refused.
        """
        self.tokenizer = tokenizer
        self.message_format = message_format or MessageFormat(tokenizer)
        self.model = model
        self.limits = limits
        self.address = "http://127.0.0.1"
        """Where agents reach it, without a path; set once the port is known."""
        self.requests = Requests(max_requests=max_requests, orphan_seconds=orphan_seconds)
        """Under way over any wire, and what their retries may ask for."""
        self.on_turn: Callable[[TurnKept], None] | None = None
        """Told each completed turn of a tracked session, before the agent sees it."""
        self.num_running = 0
        """Answers under way."""
        self.pace = Pace()
        """Of the answers that are trained or evaluated."""
        self._recorded: dict[RolloutKey, RecordedTurns] = {}
        self._generator = generator
        self._apart = apart
        self._record = record
        self._planner = Planner(
            tokenizer,
            self.message_format,
            model=model,
            limits=limits,
            run=(run_name, run_seed),
            strict=strict,
        )
        self._anonymous = anonymous
        self._strict = strict
        self._count_all_choices = count_all_choices
        self._sessions = SessionRegistry(
            tokenizer, max_sessions=max_sessions, message_format=self.message_format, shard=shard
        )
        self._scopes: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        """Cancellation of the calls running in each session."""
        self._anonymous_kept: OrderedDict[str, KeptResponses] = OrderedDict()

    # --- Sessions, for their owner ----------------------------------------------------------------

    def open(
        self,
        key: RolloutKey,
        *,
        sampling: SamplingParams,
        tracked: bool,
        count_all_choices: bool | None = None,
    ) -> OpenSession:
        """`sampling` gives defaults, and the temperature that counts as the policy's. Too many
        sessions: `Overloaded`.

        `count_all_choices`: choices (n > 1) that the agent did not continue are trained too, not
        dropped(unchosen); default: the gateway's."""
        counts_all = self._count_all_choices if count_all_choices is None else count_all_choices
        handle = self._sessions.open(
            key,
            sampling=sampling,
            tracked=tracked,
            address=self.address,
            count_all_choices=counts_all,
        )
        if tracked and key in self._recorded:
            self._sessions.get(handle.session_id).recorded = self._recorded.pop(key)
        return handle

    def replay(self, key: RolloutKey, turns: Iterable[Turn]) -> None:
        """The next tracked session of this rollout is given these turns again instead of new ones,
        as far as its agent asks for them (I8).
        """
        self._recorded[key] = RecordedTurns(turns)

    def close(self, session_id: str) -> SessionRecord:
        """Ends the session; what runs in it is cancelled with `SessionClosed`. Closing again gives
        the record without rows.
        """
        first = session_id in self._sessions
        record = self._sessions.close(session_id)
        if first:
            self._record(
                SessionEnded(
                    record.num_turns,
                    record.num_branches,
                    record.num_rewritten,
                    record.num_mismatches,
                )
            )
        self._end_requests(session_id)
        self._generator.forget(session_id)
        return record

    def reopen(self, session_id: str) -> OpenSession:
        """The same session for an agent that begins again after the one before was lost: it is
        given its completed turns again, as far as it asks for them (I8). What runs in it is
        cancelled."""
        handle = self._sessions.reopen(session_id, address=self.address)
        self._end_requests(session_id)
        return handle

    def awaits(self, session_id: str) -> bool:
        """Whether the last request of the session's agent has had no answer."""
        return self._sessions.get(session_id).awaits

    def request_watch(self, session_id: str) -> RequestClock:
        """See the port."""
        return self._sessions.get(session_id).clock

    def _end_requests(self, session_id: str) -> None:
        for scope in self._scopes.pop(session_id, ()):
            if not scope.expired():  # its client may have left a moment ago
                scope.reschedule(asyncio.get_running_loop().time())
        self.requests.forget_session(session_id)

    def oldest_version(self, session_id: str) -> Version | None:
        """Of the tokens received so far, those of running requests too."""
        return self._sessions.get(session_id).oldest_version

    @property
    def registry(self) -> SessionRegistry:
        """All sessions, and their secrets."""
        return self._sessions

    # --- Requests, for agents ---------------------------------------------------------------------

    def session_for(self, *, path_token: str | None, api_key: str | None) -> Session:
        """The session a request belongs to: by its path, by its API key, else an anonymous one that
        leaves no trace.
        """
        if path_token is not None:
            return self._sessions.authorised(path_token)
        if api_key is not None and self._sessions.is_session_token(api_key):
            return self._sessions.authorised(api_key)
        if not self._anonymous:
            raise Unauthorized(
                "this endpoint serves sessions only: use the base URL or API key that was given "
                "for yours."
            )
        return Session("anonymous", self.tokenizer, key=None, sampling=None, tracked=False)

    def kept_for(self, session: Session, api_key: str | None) -> KeptResponses:
        """The responses that a session's agent may name; outside sessions, those of the clients
        with this key.
        """
        if session.key is not None:
            return session.kept
        kept = self._anonymous_kept.pop(api_key or "", None) or KeptResponses()
        self._anonymous_kept[api_key or ""] = kept
        if len(self._anonymous_kept) > _MAX_KEYS:
            self._anonymous_kept.popitem(last=False)
        return kept

    def pass_over(self, unread: PassedOver, *, path: str) -> None:
        """Counts the fields of a request that have no effect; raises what a strict gateway says to
        them.
        """
        if self._strict and unread.refusal is not None:
            raise unread.refusal
        if unread.fields:
            self._record(FieldsIgnored(path, unread.labels))

    def prepare(self, session: Session, call: CompletionCall) -> Job:
        """Checks a call and plans its tokens. Raises `RequestRejected` and kin, and `Stopping`;
        nothing has been generated then.
        """
        if self._stopping:
            raise _stopping()
        if session.is_apart and self._apart is None:
            raise RequestRejected(
                "asking what is not trained: no engine is reserved for that; set "
                "environment.untracked.engines to a number below engine.count, or ask a server of "
                "your own."
            )
        return self._planner.plan(session, call)

    async def check_lengths(self, call: CompletionCall, *, num_bytes: int) -> None:
        """Waits, if the request is long, until a thread has counted its prompts' tokens piece by
        piece; `ContextExceeded` where one cannot fit. To be called before `prepare`: a tokenizer
        keeps the interpreter to itself while it works, and what passes here is some contexts long
        at most."""
        if num_bytes >= LONG_BODY:
            for source in call.sources:
                await asyncio.to_thread(
                    _check_length, self.tokenizer, source, self.limits, call.prompt_param
                )

    def count(self, session: Session, source: Source) -> int:
        """Tokens of a prompt, as `prepare` would send it."""
        return len(session.plan(source).ids)

    async def run(self, ongoing: Ongoing) -> None:
        """Waits for the answers of a call that `requests` has begun; ended by them, by the deadline
        of one, by the close of the session, when no client has read them for too long, or by the
        cancellation of the caller. Its failure is kept in `ongoing`.
        """
        session = ongoing.job.session
        answers = ongoing.job.answers
        error: Exception | None = None
        try:
            if session.closed:
                raise SessionClosed(f"session {session.session_id} has ended: open a new one.")
            async with asyncio.timeout(None) as scope:
                self._scopes[session.session_id].add(scope)
                ongoing.runs_in(scope)
                try:
                    if ongoing.job.call.prompt_logprobs is not None:
                        await self._score_prompts(ongoing.job, top=ongoing.job.call.prompt_logprobs)
                    if len(answers) == 1:
                        await self._answer(ongoing, answers[0])
                    else:
                        await self._answer_all(ongoing)
                finally:
                    self._forget_scope(session, scope)
        except Exception as failure:
            error = failure
            if isinstance(failure, TimeoutError) and self._stopping:
                error = _stopping()
            elif isinstance(failure, TimeoutError) and session.closed:
                error = SessionClosed(
                    f"session {session.session_id} ended while the request ran: open a new one."
                )
        except BaseException:  # the caller was cancelled
            error = _stopping()
            raise
        finally:
            self.requests.end(ongoing, error, now=asyncio.get_running_loop().time())

    def stop(self) -> None:
        """Ends every request under way with `Stopping`, which its readers are told, and refuses
        further ones with it.
        """
        self._stopping = True
        now = asyncio.get_running_loop().time()
        for scope in [
            scope for scopes in self._scopes.values() for scope in scopes if not scope.expired()
        ]:
            scope.reschedule(now)

    async def answers(self, job: Job) -> Sequence[Answer]:
        """Runs a job and waits for all its answers."""
        ongoing = Ongoing(job)
        self.requests.begin(ongoing, None)
        request = job.session.clock.begin()
        try:
            await self.run(ongoing)
        finally:
            request.end()
        if ongoing.error is not None:
            raise ongoing.error
        return job.answers

    def failed(self, session: Session | None, error: BaseException) -> None:
        """A request ended in an error at the agent's edge: counted and shown, unless the session's
        owner has ended the session meanwhile.
        """
        if isinstance(error, SessionClosed):
            return
        if session is not None:
            session.failed_requests += 1
            if session.key is not None and (seconds := retry_seconds(error)) is not None:
                session.clock.refused(seconds)
        status = error.status if isinstance(error, MidflightError) else 500
        session_id = session.session_id if session is not None and session.key is not None else None
        self._record(RequestFailed(session_id, status, f"{type(error).__name__}: {error}"))

    # --- Inside -----------------------------------------------------------------------------------

    async def _score_prompts(self, job: Job, *, top: int) -> None:
        """Waits for the engines. The choices of a prompt share what is known of it."""
        affinity = job.session.session_id if job.session.key is not None else ""
        for first in job.answers[:: job.call.n]:
            scores = await self._generator_of(job.session).prompt_logprobs(
                first.prompt.ids, top=top, affinity=affinity
            )
            for answer in job.answers[first.index : first.index + job.call.n]:
                answer.prompt_logprobs = scores

    async def _answer_all(self, ongoing: Ongoing) -> None:
        """Waits for all answers; the first failure ends the others and is raised as it is."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for answer in ongoing.job.answers:
                    tasks.create_task(
                        self._answer(ongoing, answer), name=f"answer {answer.request_id}"
                    )
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _answer(self, ongoing: Ongoing, answer: Answer) -> None:
        """Waits for one answer. Whatever ends it early, its tokens get a fate (I3)."""
        job = ongoing.job
        session = ongoing.job.session
        answer.clock = asyncio.get_running_loop().time
        started = answer.clock()
        affinity = session.session_id if session.key is not None else ""
        recorded = session.recorded.take(answer.request, session.role_name)
        session.begin(answer)
        self.num_running += 1
        try:
            if recorded is not None:
                answer.replay(recorded)
            else:
                told = ongoing.hear if job.call.stream else _told_whole
                await self._generator_of(session).generate(
                    answer, affinity=affinity, may_abort=job.call.may_abort, told=told
                )
            turn = answer.close()
            if session.finished(answer, turn, reply=answer.text, message=answer.message):
                self._tell(session, turn)
        except RequestRejected as refused:
            # by an engine, which names fields as `SamplingParams` does
            refused.param = refused.param and job.call.name_of(refused.param)
            raise
        finally:
            self.num_running -= 1
            session.abandoned(answer)
        # else it was counted when it was generated
        if recorded is None or not session.recorded.in_session:
            ended = answer.clock()
            num_versions = len({segment.version for segment in turn.segments})
            if answer.placed and not session.is_apart:
                self.pace.answered(len(turn.output_ids), ended - answer.placed[0][1])
            length = len(turn.output_ids)
            num_resumes = turn.num_resumes
            seconds = ended - started
            if session.key is not None:
                session.times.append(
                    TurnTimes(started, ended, tuple(answer.placed), tuple(answer.sampled), length)
                )
            self._record(
                TurnFinished(
                    session.session_id,
                    len(turn.prompt_ids),
                    length,
                    num_versions,
                    num_resumes,
                    seconds,
                )
            )
        ongoing.hear()

    def _generator_of(self, session: Session) -> Generator:
        return self._apart if session.is_apart and self._apart is not None else self._generator

    def _tell(self, session: Session, turn: Turn) -> None:
        """Nothing of a session that has ended meanwhile: its rows are handed over already."""
        if (
            self.on_turn is not None
            and session.tracked
            and session.key is not None
            and not session.closed
        ):
            of_role = replace(turn, role=session.role_name) if session.role_name else turn
            self.on_turn(TurnKept(session.key, session.num_recorded - 1, of_role))

    def _forget_scope(self, session: Session, scope: asyncio.Timeout) -> None:
        scopes = self._scopes.get(session.session_id)
        if scopes is not None:
            scopes.discard(scope)
            if not scopes:
                del self._scopes[session.session_id]


def _stopping() -> Stopping:
    return Stopping("the gateway is stopping: try again when it is back.")


def _told_whole() -> None:
    """For an answer that is told whole: no reader waits for its parts."""


def _check_length(tokenizer: Tokenizer, source: Source, limits: EngineLimits, param: str) -> None:
    match source:
        case Messages():
            _check_count(len(source.messages), limits, param)
            tools = [tool.as_json() for tool in source.tools] or None
            text = tokenizer.prompt(
                source.messages, tools=tools, options=source.options, ending=source.ending
            )
        case Text(text):
            pass
        case _:
            return
    count = 0
    for start in range(0, len(text), _PIECE):
        count += len(tokenizer.encode(text[start : start + _PIECE]))
        _check_count(count, limits, param)


def _check_count(count: int, limits: EngineLimits, param: str) -> None:
    """`count`: tokens at least. A message is one token or more."""
    if count > _MARGIN * limits.max_context:
        raise ContextExceeded(
            f"This model's maximum context length is {limits.max_context} tokens, but the {param} "
            f"has more than {_MARGIN * limits.max_context} tokens. Shorten the {param}.",
            param=param,
        )
