"""Running a job: chunks of its generations in, what the agent sees out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Protocol

from midflight.errors import RequestRejected, first_error
from midflight.gateway.answers.plan import Choice, Job
from midflight.gateway.answers.telling import Telling
from midflight.gateway.sessions.call import Answer, CompletionCall, Delta, Messages, Sink, ToolChoice
from midflight.gateway.sessions.replay import Replay
from midflight.gateway.sessions.session import OpenTurn, Session
from midflight.text import Tokenizer
from midflight.text.formats import MessageFormat
from midflight.types import Chunk, GenerateRequest, RolloutKey, Turn
from midflight.types.facts import Record, TurnFinished


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


class Answering:
    """Runs the choices of jobs; holds no state of them but their number. Bounded by the requests that the gateway admits."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer, message_format: MessageFormat, record: Record) -> None:
        self.on_turn: Callable[[RolloutKey, int, Turn], None] | None = None
        """Told each completed turn of a tracked session and its number there, from 0, before the agent sees it."""
        self.num_running = 0
        """Choices under way."""
        self._generator, self._tokenizer, self._format, self._record = generator, tokenizer, message_format, record

    async def run(self, job: Job, sink: Sink) -> None:
        """Waits for all choices; the first failure ends the others and is raised as it is."""
        if len(job.choices) == 1:
            await self._run_choice(job, job.choices[0], sink)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for choice in job.choices:
                    tasks.create_task(self._run_choice(job, choice, sink), name=f"choice {choice.request.request_id}")
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

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
        except RequestRejected as refused:  # by an engine, which names fields as `SamplingParams` does
            refused.param = refused.param and job.call.name_of(refused.param)
            raise
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
        self._record(
            TurnFinished(
                session_id=session.session_id,
                num_prompt_tokens=len(turn.prompt_ids),
                num_output_tokens=len(turn.output_ids),
                num_versions=len({segment.version for segment in turn.segments}),
                num_resumes=turn.num_resumes,
                seconds=seconds,
            )
        )

    def _telling(self, call: CompletionCall, choice: Choice) -> Telling:
        source, chosen, parser = call.sources[0], call.tool_choice, None
        if isinstance(source, Messages):
            calls, forced = chosen is not ToolChoice.NONE, chosen is ToolChoice.REQUIRED
            parser = self._format.parser(choice.prompt.text, calls=calls, forced=forced, tools=source.tools)
        keep = self._format.kept_token_ids
        return Telling(self._tokenizer, choice.request.sampling, parser, keep=keep, one_call=not call.parallel_tool_calls)
