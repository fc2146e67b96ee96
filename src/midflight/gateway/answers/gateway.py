"""The gateway without HTTP: it opens sessions and answers calls. `http` puts it on the network.

A call is first `prepare`d, which is synchronous and finds every fault of the client, and then
`run`.
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
from midflight.gateway.answers.plan import EngineLimits, Job, Planner
from midflight.gateway.answers.readers import Ongoing, Requests
from midflight.gateway.answers.speed import AnswerSpeed
from midflight.gateway.sessions.history import RecordedTurns
from midflight.gateway.sessions.registry import OpenSession, SessionRegistry
from midflight.gateway.sessions.request import CompletionCall, Messages, Source, Text
from midflight.gateway.sessions.request_clock import RequestClock
from midflight.gateway.sessions.responses import KeptResponses
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
"""The size of a request, in bytes, from which its prompts are counted first. Shorter ones tokenise
in some milliseconds.
"""

_PIECE = 2**14
"""The number of letters that are tokenised at a time. A piece takes a few milliseconds, and the
event loop has its turn between two pieces.
"""

_MAX_KEYS = 16
"""The most API keys, outside sessions, whose clients' responses are kept."""

_MARGIN = 2
"""The length that a prompt may have in this check, in contexts. It is more than 1 because a
session's recorded tokens may differ from those of its text.
"""


class UnreadFieldsReport(Protocol):
    """The fields of a request that have no effect."""

    @property
    def fields(self) -> Collection[str]: ...
    @property
    def labels(self) -> tuple[str, ...]:
        """The fields as labels of a metric. There are few different ones."""
        ...

    @property
    def refusal(self) -> RequestRejected | None:
        """The error of a strict gateway."""
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
        own_sampling: bool = False,
        message_format: MessageFormat | None = None,
        apart: Generator | None = None,
        shard: int | None = None,
    ) -> None:
        """`apart` is the generator of the engines that answer unrecorded requests, if there are
        any. With `anonymous` requests without a session's token are answered, untracked. With
        `strict` fields that have no effect are refused. With `own_sampling` a session that trains
        samples as it was opened to, whatever its requests ask for.
        """
        self.tokenizer = tokenizer
        self.message_format = message_format or MessageFormat(tokenizer)
        self.model = model
        self.limits = limits
        self.address = "http://127.0.0.1"
        """The address that agents use, without a path. It is set once the port is known."""
        self.requests = Requests(max_requests=max_requests, orphan_seconds=orphan_seconds)
        """The requests under way over HTTP or in this process, and those that may be retried."""
        self.on_turn: Callable[[TurnKept], None] | None = None
        """Called with each completed turn of a tracked session, before the agent sees it."""
        self.num_running = 0
        """Answers under way."""
        self.pace = AnswerSpeed()
        """The speed of the answers that are trained or evaluated."""
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
            own_sampling=own_sampling,
        )
        self._anonymous = anonymous
        self._strict = strict
        self._sessions = SessionRegistry(
            tokenizer, max_sessions=max_sessions, message_format=self.message_format, shard=shard
        )
        self._scopes: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        """The scopes of each session whose deadlines cancel its running calls."""
        self._anonymous_kept: OrderedDict[str, KeptResponses] = OrderedDict()

    # --- Sessions, for their owner ----------------------------------------------------------------

    def open(
        self,
        key: RolloutKey,
        *,
        sampling: SamplingParams,
        tracked: bool,
        count_all_choices: bool = False,
    ) -> OpenSession:
        """Opens a session; raises `Overloaded` if there are too many. `sampling` gives the
        defaults, and the temperature that counts as the policy's.

        With `count_all_choices` choices (n > 1) that the agent did not continue are trained too,
        not dropped(unchosen).
        """
        handle = self._sessions.open(
            key,
            sampling=sampling,
            tracked=tracked,
            address=self.address,
            count_all_choices=count_all_choices,
        )
        if tracked and key in self._recorded:
            self._sessions.get(handle.session_id).recorded = self._recorded.pop(key)
        return handle

    def replay(self, key: RolloutKey, turns: Iterable[Turn]) -> None:
        """The next tracked session of this rollout gets these turns again instead of new ones, as
        far as its agent asks for them (I8).
        """
        self._recorded[key] = RecordedTurns(turns)

    def close(self, session_id: str) -> SessionRecord:
        """Ends the session. Its running requests are cancelled with `SessionClosed`. Closing it
        again returns the record without rows.
        """
        first = session_id in self._sessions
        trains = first and self._sessions.get(session_id).trains
        record = self._sessions.close(session_id)
        if first:
            ended = SessionEnded(
                record.num_turns,
                record.num_branches,
                record.num_rewritten,
                record.num_mismatches,
            )
            if trains and (record.masked or record.replaced):
                ended = replace(
                    ended,
                    num_trainable=record.num_trainable,
                    masked=record.masked,
                    masked_by=record.masked_by,
                    replaced=record.replaced,
                )
            self._record(ended)
        self._end_requests(session_id)
        self._generator.forget(session_id)
        return record

    def reopen(self, session_id: str) -> OpenSession:
        """The same session for an agent that starts over after its predecessor was lost. It gets
        its completed turns again, as far as it asks for them (I8). Running requests are
        cancelled.
        """
        handle = self._sessions.reopen(session_id, address=self.address)
        self._end_requests(session_id)
        return handle

    def awaits(self, session_id: str) -> bool:
        """True if the last request of the session's agent has not been answered."""
        return self._sessions.get(session_id).awaits

    def request_watch(self, session_id: str) -> RequestClock:
        """Implements the port's method."""
        return self._sessions.get(session_id).clock

    def _end_requests(self, session_id: str) -> None:
        for scope in self._scopes.pop(session_id, ()):
            if not scope.expired():  # its client may have left a moment ago
                scope.reschedule(asyncio.get_running_loop().time())
        self.requests.forget_session(session_id)

    def oldest_version(self, session_id: str) -> Version | None:
        """The oldest version of the tokens received so far, running requests included."""
        return self._sessions.get(session_id).oldest_version

    @property
    def registry(self) -> SessionRegistry:
        """All sessions with their secrets."""
        return self._sessions

    # --- Requests, for agents ---------------------------------------------------------------------

    def session_for(self, *, path_token: str | None, api_key: str | None) -> Session:
        """The session that a request belongs to. Its path names it, or its API key; otherwise the
        session is an anonymous one that is not recorded.
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
        """The responses that a session's agent may refer to. Outside sessions, the clients with one
        API key share them.
        """
        if session.key is not None:
            return session.kept
        owner = api_key or ""
        kept = self._anonymous_kept.pop(owner, None) or KeptResponses()
        self._anonymous_kept[owner] = kept
        if len(self._anonymous_kept) > _MAX_KEYS:
            self._anonymous_kept.popitem(last=False)
        return kept

    def pass_over(self, unread: UnreadFieldsReport, *, path: str) -> None:
        """Counts the fields of a request that have no effect. A strict gateway raises an error for
        them.
        """
        if self._strict and unread.refusal is not None:
            raise unread.refusal
        if unread.fields:
            self._record(FieldsIgnored(path, unread.labels))

    def prepare(self, session: Session, call: CompletionCall) -> Job:
        """Checks a call and plans its tokens. Raises `RequestRejected` and kin, and `Stopping`,
        before anything is generated.
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
        """If the request is long, waits until a thread has counted the tokens of its prompts piece
        by piece. Raises `ContextExceeded` if one cannot fit. This must come before `prepare`: a
        tokenizer holds the interpreter's lock while it works, and a prompt that passes here is some
        contexts long at most.
        """
        if num_bytes >= LONG_BODY:
            for source in call.sources:
                await asyncio.to_thread(
                    _check_length, self.tokenizer, source, self.limits, call.prompt_param
                )

    def check_model(self, asked: str) -> None:
        """Raises `UnknownModel` for any model but the one that is served."""
        self._planner.check_model(asked)

    def count(self, session: Session, source: Source) -> int:
        """The number of tokens of a prompt, as `prepare` would send it."""
        return len(session.plan(source).ids)

    async def run(self, ongoing: Ongoing) -> None:
        """Waits for the answers of a call that `requests` has begun. The wait is ended by them, by
        the deadline of one, by the close of the session, when no client has read them for too long,
        or by the cancellation of the caller. A failure is kept in `ongoing`.
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
        """Ends every request under way with `Stopping`, which its readers receive, and refuses
        further ones with it.
        """
        self._stopping = True
        now = asyncio.get_running_loop().time()
        for scopes in self._scopes.values():
            for scope in scopes:
                if not scope.expired():
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
        """Counts and records a request that ended in an error at the agent's side. `SessionClosed`
        does not count, because the session's owner has ended the session.
        """
        if isinstance(error, SessionClosed):
            return
        session_id = None
        if session is not None:
            session.failed_requests += 1
        if session is not None and session.key is not None:
            session_id = session.session_id
            seconds = retry_seconds(error)
            if seconds is not None:
                session.clock.refused(seconds)
        status = error.status if isinstance(error, MidflightError) else 500
        self._record(RequestFailed(session_id, status, f"{type(error).__name__}: {error}"))

    # --- Inside -----------------------------------------------------------------------------------

    async def _score_prompts(self, job: Job, *, top: int) -> None:
        """Waits until the engines have scored the prompts. The choices of a prompt share its
        scores.
        """
        affinity = job.session.session_id if job.session.key is not None else ""
        for first in job.answers[:: job.call.n]:
            scores = await self._generator_of(job.session).prompt_logprobs(
                tuple(first.prompt.ids), top=top, affinity=affinity
            )
            for answer in job.answers[first.index : first.index + job.call.n]:
                answer.prompt_logprobs = scores

    async def _answer_all(self, ongoing: Ongoing) -> None:
        """Waits for all answers. The first failure ends the others and is raised as it is."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for answer in ongoing.job.answers:
                    tasks.create_task(
                        self._answer(ongoing, answer), name=f"answer {answer.request_id}"
                    )
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _answer(self, ongoing: Ongoing, answer: Answer) -> None:
        """Waits for one answer. If it ends early, for any reason, its tokens get a fate (I3)."""
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
            # An engine refused it, and names fields as `SamplingParams` does.
            refused.param = refused.param and job.call.name_of(refused.param)
            raise
        finally:
            self.num_running -= 1
            session.abandoned(answer)
        # A turn that is given again was counted when it was generated.
        if recorded is None or not session.recorded.in_session:
            self._count(session, answer, turn, started=started)
        ongoing.hear()

    def _count(self, session: Session, answer: Answer, turn: Turn, *, started: float) -> None:
        """Measures and records a finished turn."""
        ended = answer.clock()
        length = len(turn.output_ids)
        num_versions = len({segment.version for segment in turn.segments})
        if answer.placed and not session.is_apart:
            self.pace.answered(length, ended - answer.placed[0][1])
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
                turn.num_resumes,
                ended - started,
            )
        )

    def _generator_of(self, session: Session) -> Generator:
        if session.is_apart and self._apart is not None:
            return self._apart
        return self._generator

    def _tell(self, session: Session, turn: Turn) -> None:
        """Reports a completed turn to `on_turn`. If the session has ended meanwhile, its rows are
        handed over already and nothing is reported.
        """
        if self.on_turn is None or session.key is None:
            return
        if not session.tracked or session.closed:
            return
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
    """Does nothing: no reader waits for the parts of an answer that is sent whole."""


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
    """Raises `ContextExceeded` for a prompt that has at least `count` tokens, if that is too many.
    A message counts as one token or more.
    """
    if count > _MARGIN * limits.max_context:
        raise ContextExceeded(
            f"This model's maximum context length is {limits.max_context} tokens, but the {param} "
            f"has more than {_MARGIN * limits.max_context} tokens. Shorten the {param}.",
            param=param,
        )
