"""The gateway without a wire: sessions, and calls that become generations. `http` puts it on the network.

A call is `prepare`d synchronously (every fault of the client shows there) and then `run`; its events go to a sink.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from midflight.errors import MidflightError, RequestRejected, SessionClosed, Unauthorized, UnknownModel, nearest
from midflight.gateway.call import Answer, CompletionCall, Delta, Messages, Sink, Source, ToolChoice
from midflight.gateway.lengths import check_lengths
from midflight.gateway.registry import OpenSession, SessionRegistry
from midflight.gateway.replay import RecordedTurns, Replay
from midflight.gateway.retries import Requests
from midflight.gateway.sampling import Limits, check_prompt, params_for, samples_the_policy
from midflight.gateway.session import OpenTurn, Session
from midflight.gateway.telling import Telling
from midflight.gateway.tree import Prompt
from midflight.ports import Observer
from midflight.text import Tokenizer
from midflight.text.formats import MessageFormat
from midflight.types import Chunk, GenerateRequest, RolloutKey, SamplingParams, SessionRecord, Turn, Version

MAX_CHOICES = 1024
"""Choices of one call, over all its prompts: each is a generation of its own, and a batch is not a way round admission."""


class Generation(Protocol):
    """One unbroken answer, over pauses, aborts and deaths of engines; its last chunk carries `finish`."""

    @property
    def num_overshoot(self) -> int: ...
    @property
    def num_resumes(self) -> int: ...
    def __aiter__(self) -> AsyncIterator[Chunk]: ...
    async def __anext__(self) -> Chunk: ...
    async def aclose(self) -> None: ...


class Generator(Protocol):
    """What the gateway generates with: `resume.Generator`."""

    def generate(self, request: GenerateRequest, *, affinity: str, may_abort: bool = False) -> Generation: ...
    def forget(self, affinity: str) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One generation of a job."""

    index: int
    prompt: Prompt
    request: GenerateRequest
    policy_sampled: bool
    number: int
    """Of its request in the session; the choices of n > 1 share it."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A checked call, ready to run."""

    session: Session
    call: CompletionCall
    choices: tuple[Choice, ...]

    @property
    def request_id(self) -> str:
        return self.choices[0].request.request_id


class Gateway:
    """Implements `ports.Sessions`. Bounded by `max_sessions` and `max_requests`."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        observer: Observer,
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
        self.on_turn: Callable[[RolloutKey, int, Turn], None] | None = None
        """Told each completed turn of a tracked session and its number there, from 0, before the agent sees it; set by who keeps them (I8)."""
        self.requests = Requests(max_requests=max_requests, orphan_seconds=orphan_seconds)
        """Under way over any wire, and what their retries may ask for."""
        self.num_running = 0
        """Choices under way."""
        self._recorded: dict[RolloutKey, RecordedTurns] = {}
        self._generator = generator
        self._observer = observer
        self._run_name, self._run_seed = run_name, run_seed
        self._anonymous = anonymous
        self._sessions = SessionRegistry(tokenizer, max_sessions=max_sessions, message_format=self.message_format)
        self._prefix = secrets.token_hex(4)
        self._count_all_choices = count_all_choices
        self._scopes: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        """Cancellation of the calls running in each session."""
        self._serial = 0

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
            self._observer.session_closed(
                num_turns=record.num_turns,
                num_branches=record.num_branches,
                num_rewritten=record.num_rewritten,
                num_mismatches=record.num_mismatches,
            )
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
        if call.model is not None and call.model != self.model:
            raise UnknownModel(f"the model {call.model!r} does not exist.{nearest(call.model, [self.model])}", param="model")
        if not 1 <= len(call.sources) * call.n <= MAX_CHOICES:
            raise RequestRejected(f"{len(call.sources)} prompts with n = {call.n}: ask for 1 to {MAX_CHOICES} choices at once.", param="n")
        prompts = [session.plan(source) for source in call.sources]
        for prompt in prompts:
            check_prompt(prompt.ids, self.limits, param=call.prompt_param)
        calls = [self._constrained(call, prompt) for prompt in prompts]
        params = [
            params_for(each, len(prompt.ids), defaults=session.sampling, limits=self.limits)
            for each, prompt in zip(calls, prompts, strict=True)
        ]
        choices = [
            self._choice(session, call, place * call.n + k, prompt, sampling, number)
            for place, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
            for number in [session.next_request()]
            for k in range(call.n)
        ]
        return Job(session, call, tuple(choices))

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
                    await self._run_choices(job, sink)
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
        self._observer.request_failed(session_id=session_id, status=status, error=f"{type(error).__name__}: {error}")

    # --- Inside ------------------------------------------------------------------------------------------------------

    def _constrained(self, call: CompletionCall, prompt: Prompt) -> CompletionCall:
        """A tool call that must come is sampled under a grammar; so is a response format after thinking, or a call instead of it."""
        source, grammar = call.sources[0], call.asked.grammar
        if not isinstance(source, Messages) or (grammar is None and call.tool_choice is not ToolChoice.REQUIRED):
            return call
        if call.tool_choice is ToolChoice.REQUIRED:
            tools = [tool for tool in source.tools if call.forced_tool in (None, tool.name)]
            grammar = self.message_format.calls_grammar(tools, parallel=call.parallel_tool_calls, prompt_text=prompt.text)
        elif grammar is not None and call.tool_choice is ToolChoice.AUTO:
            parallel = call.parallel_tool_calls
            grammar = self.message_format.calls_or(grammar, source.tools, parallel=parallel, prompt_text=prompt.text)
        elif grammar is not None:
            grammar = self.message_format.after_thinking(grammar, prompt_text=prompt.text)
        return replace(call, asked=replace(call.asked, grammar=grammar))

    def _telling(self, call: CompletionCall, choice: Choice) -> Telling:
        source, chosen, parser = call.sources[0], call.tool_choice, None
        if isinstance(source, Messages):
            calls, forced = chosen is not ToolChoice.NONE, chosen is ToolChoice.REQUIRED
            parser = self.message_format.parser(choice.prompt.text, calls=calls, forced=forced, tools=source.tools)
        keep = self.message_format.kept_token_ids
        return Telling(self.tokenizer, choice.request.sampling, parser, keep=keep, one_call=not call.parallel_tool_calls)

    def _choice(self, session: Session, call: CompletionCall, index: int, prompt: Prompt, sampling: SamplingParams, number: int) -> Choice:
        self._serial += 1
        seed = session.seed(self._run_name, self._run_seed, prompt.ids, asked=call.asked.seed, choice=index % call.n)
        single = len(call.sources) * call.n == 1
        own = call.request_id if call.request_id is None or single else f"{call.request_id}-{index}"
        return Choice(
            index=index,
            prompt=prompt,
            request=GenerateRequest(
                request_id=own or f"{session.session_id}.{self._prefix}{self._serial:08d}",
                input_ids=prompt.ids,
                num_prompt_tokens=len(prompt.ids),
                sampling=replace(sampling, seed=seed),
                eager=call.stream,
            ),
            policy_sampled=samples_the_policy(sampling, session.sampling),
            number=number,
        )

    def _forget_scope(self, session: Session, scope: asyncio.Timeout) -> None:
        scopes = self._scopes.get(session.session_id)
        if scopes is not None:
            scopes.discard(scope)
            if not scopes:
                del self._scopes[session.session_id]

    async def _run_choices(self, job: Job, sink: Sink) -> None:
        if len(job.choices) == 1:
            await self._run_choice(job, job.choices[0], sink)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for choice in job.choices:
                    tasks.create_task(self._run_choice(job, choice, sink), name=f"choice {choice.request.request_id}")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run_choice(self, job: Job, choice: Choice, sink: Sink) -> None:
        """Waits for the chunks of one generation. Whatever ends it early, its tokens get a fate (I3)."""
        session = job.session
        started = asyncio.get_running_loop().time()
        affinity = session.session_id if session.key is not None else ""
        recorded = session.recorded.take(choice.request)
        if recorded is not None:
            generation: Generation = Replay(recorded)
        else:
            generation = self._generator.generate(choice.request, affinity=affinity, may_abort=job.call.may_abort)
        open_turn = session.begin(choice.prompt, policy_sampled=choice.policy_sampled, request=choice.number)
        telling = self._telling(job.call, choice)
        self.num_running += 1
        try:
            await self._receive(job, choice, generation, open_turn, telling=telling, sink=sink)
            turn = open_turn.closed(num_resumes=generation.num_resumes)
            tail, pieces = telling.end() if job.call.stream else telling.whole(turn.output_ids)
            session.finished(open_turn, turn, reply=telling.text, message=telling.message)
            self._tell(session, turn)
        finally:
            self.num_running -= 1
            session.abandoned(open_turn)
        self._report(session, turn, seconds=asyncio.get_running_loop().time() - started)
        sink(
            Answer(
                choice=choice.index,
                request_id=choice.request.request_id,
                prompt=choice.prompt,
                turn=turn,
                text=telling.text,
                tail=tail,
                message=telling.message,
                tail_pieces=pieces,
                top_logprobs=tuple(open_turn.top_logprobs),
            )
        )

    async def _receive(
        self, job: Job, choice: Choice, generation: Generation, open_turn: OpenTurn, *, telling: Telling, sink: Sink
    ) -> None:
        """Waits for chunks until the finish; tells them as they come if the call streams."""
        async with aclosing(generation):
            async for chunk in generation:
                job.session.received(open_turn, chunk, num_overshoot=generation.num_overshoot)
                if job.call.stream and chunk.token_ids:
                    text, pieces = telling.push(chunk.token_ids)
                    sink(Delta(choice.index, text, chunk.token_ids, chunk.logprobs, pieces, chunk.top_logprobs))

    def _tell(self, session: Session, turn: Turn) -> None:
        """Nothing of a session that has ended meanwhile: its rows are handed over already."""
        if self.on_turn is not None and session.tracked and session.key is not None and not session.closed:
            self.on_turn(session.key, len(session.tree.nodes) - 1, turn)

    def _report(self, session: Session, turn: Turn, *, seconds: float) -> None:
        self._observer.turn_finished(
            session_id=session.session_id,
            num_prompt_tokens=len(turn.prompt_ids),
            num_output_tokens=len(turn.output_ids),
            num_versions=len({segment.version for segment in turn.segments}),
            num_resumes=turn.num_resumes,
            seconds=seconds,
        )
