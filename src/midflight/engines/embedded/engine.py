"""The embedded engine: the engine port over a `transformers` model in this process."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from transformers import PreTrainedModel

from midflight import types
from midflight.engines.embedded.decode_thread import DecodeThread
from midflight.engines.embedded.grammar import Constraint, Grammars
from midflight.engines.embedded.packed_layers import PackedLayers
from midflight.engines.embedded.prefixes import PrefixRoom
from midflight.engines.embedded.probe import served
from midflight.engines.embedded.scheduler import Scheduler
from midflight.engines.embedded.scoring import likely_tokens, portions, token_logprobs
from midflight.engines.embedded.table import Submission
from midflight.engines.embedded.weights import EngineWeights
from midflight.engines.requests import check_request, check_rows
from midflight.engines.streams import ChunkStream, ChunkStreams, Outlet, StepOutput
from midflight.errors import EngineError, EngineUnavailable
from midflight.models.device_memory import give_back
from midflight.models.routing import routers_of
from midflight.ports import WeightReceiver
from midflight.text.detokenizer import StopMatcher
from midflight.text.tokenizer import Tokenizer
from midflight.types.facts import EngineStepped, Record

_log = logging.getLogger(__name__)
_LOCAL = 0
"""The outlet of the callers inside the process."""
_ALL_PARTS = frozenset(types.MemoryPart)
PAUSE_LEASE_SECONDS = 30.0
"""An engine paused for longer without renewal resumes by itself, so that a dead controller cannot
freeze it.
"""


@dataclass(frozen=True, slots=True)
class Generated:
    """The result of `generate_all` for one request. The tuples have the length of `token_ids`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[types.Version, ...]
    kv_versions: tuple[types.Version, ...]
    finish: types.Finish
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Empty unless asked for."""
    kept: tuple[bytes, ...] = ()
    """Empty unless asked for."""
    experts: bytes = b""
    """The same bytes as `experts` of `types.Chunk`."""
    key_runs: types.KeyRuns = ()
    """As in `types.Chunk`, of the first token."""


class EmbeddedEngine:
    """A thin shell. The scheduler owns the requests and runs on one worker thread. The waits are
    here, on the event loop.

    `run` must run for anything but `generate_all` to come back. Everything else is called on the
    event loop that runs it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: Tokenizer,
        name: str,
        receiver: WeightReceiver,
        record: Record,
        max_running: int,
        max_batch_tokens: int,
        max_context: int,
        pause_lease_seconds: float = PAUSE_LEASE_SECONDS,
        version: types.Version = 0,
        prefixes: PrefixRoom = PrefixRoom(),
        records_experts: bool = False,
        guesses: int = 0,
        packs: bool = False,
    ) -> None:
        """`prefixes` limits the storage for requests that begin alike. With `records_experts` the
        choices of a mixture's routers are recorded. At most `guesses` tokens are guessed ahead.
        With `packs` layers multiply with copies of their weights (`packed_layers`): versions may
        replace the model's weights, but nobody may write to them.

        Afterwards `warning` says why the model is served more slowly than others. It is empty if
        the model is not.
        """
        self._name = name
        self._tokenizer = tokenizer
        self._record = record
        self._lease_seconds = pause_lease_seconds
        self._model = model
        self._max_batch_tokens = max_batch_tokens
        self._capabilities = _capabilities(model, max_context=max_context, max_running=max_running)
        routers = routers_of(model) if records_experts else None
        sizes = {
            "max_running": max_running,
            "max_batch_tokens": max_batch_tokens,
            "max_context": max_context,
        }
        runner, self._manner, self.warning = served(model, **sizes)
        packed = PackedLayers(model) if packs else None
        self._weights = EngineWeights(model, receiver, version=version, packed=packed)
        self._scheduler = Scheduler(
            runner, version=version, prefixes=prefixes, routers=routers, guesses=guesses, **sizes
        )
        self._thread = DecodeThread(self._scheduler)
        self._runs = False
        self._counter = itertools.count(1)
        self._live: dict[int, str] = {}
        """The id of each request that has not ended, by its handle."""
        self._grammars = Grammars(tokenizer, vocab_size=self._capabilities.vocab_size)
        self._compiling: dict[int, str] = {}
        """The id of each request whose grammar is being compiled, by a ticket. An abort removes the
        ticket.
        """
        self._one_compilation = asyncio.Lock()
        """Only one grammar is compiled at a time, so that compiling takes at most one core from
        decoding.
        """
        self._local = ChunkStreams()
        self._outlets: dict[int, Outlet] = {_LOCAL: self._local}
        self._lease: asyncio.TimerHandle | None = None
        self._pausing = 0
        self._asleep = set[types.MemoryPart]()
        """The parts of its memory that it has given away."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def capabilities(self) -> types.Capabilities:
        return self._capabilities

    async def run(self) -> None:
        """Decodes until cancelled. A crash of the decode loop ends every open request with
        `EngineUnavailable`, and this call too.
        """
        self._runs = True
        deliver = partial(asyncio.get_running_loop().call_soon_threadsafe, self._on_step)
        error = EngineUnavailable("the engine was stopped. Send the request to another engine.")
        try:
            await asyncio.to_thread(self._thread.run, deliver)
        except EngineUnavailable as crash:
            error = crash
            raise
        finally:
            self._thread.stop()
            self._end_lease()
            for outlet in list(self._outlets.values()):
                outlet.fail(error)

    # --- Requests ---------------------------------------------------------------------------------

    async def generate(self, request: types.GenerateRequest) -> AsyncGenerator[types.Chunk]:
        """Yields until a chunk with `finish`. Each wait is for the decode thread, or for `run` to
        end. The first wait is also for `submit`.
        """
        handle = await self.submit(request, outlet=_LOCAL)
        stream = ChunkStream(eager=request.eager)
        self._local.open(handle, stream)
        try:
            async for chunk in stream:
                yield chunk
        finally:
            stream.close()
            if self._local.close(handle):
                self.abort_handles(frozenset({handle}))

    async def abort(self, request_id: str | None) -> None:
        if request_id is None:
            self._compiling = {}
            await self._abort(None)
            return
        self._compiling = {
            ticket: known for ticket, known in self._compiling.items() if known != request_id
        }
        handles = frozenset(handle for handle, known in self._live.items() if known == request_id)
        if handles:
            await self._abort(handles)

    async def _abort(self, handles: frozenset[int] | None) -> None:
        """Waits for the step in progress."""
        await asyncio.wrap_future(self._thread.call(lambda: self._scheduler.abort(handles)))

    def open_outlet(self, outlet: Outlet) -> int:
        """Registers a receiver of whole steps; its number goes to `submit`."""
        number = next(self._counter)
        self._outlets[number] = outlet
        return number

    def close_outlet(self, number: int, handles: frozenset[int]) -> None:
        """Gives nothing more to the outlet, and aborts its requests, which `handles` names."""
        self._outlets.pop(number, None)
        self.abort_handles(handles)

    async def submit(self, request: types.GenerateRequest, *, outlet: int) -> int:
        """Queues a request and returns its handle, which appears in the steps given to its outlet.
        Raises `RequestRejected` if the request is not in order.

        Waits only if the request has a grammar: for the grammars before it to be compiled, and for
        the thread that compiles it.
        """
        request = request.with_own_ids
        self._check(request)
        if request.sampling.grammar is None:
            submission = self._submission(request, outlet)
        else:
            submission = await self._compiled(request, outlet)
        self._thread.post(lambda: self._scheduler.submit(submission))
        self._live[submission.handle] = request.request_id
        return submission.handle

    def abort_handles(self, handles: frozenset[int]) -> None:
        """Ends these requests, and does not wait until they have ended."""
        with contextlib.suppress(EngineUnavailable):
            self._thread.post(lambda: self._scheduler.abort(handles))

    def generate_all(self, requests: Sequence[types.GenerateRequest]) -> list[Generated]:
        """Generates in the calling thread while `run` does not run, for warm starts and tests.
        Results are in the order of `requests`.

        The error of a request whose grammar fails is raised when all others have ended.
        """
        if self._runs:
            raise EngineError(
                "generating inline: the engine's loop runs. Use `generate` while it does."
            )
        for request in requests:
            self._check(request)
        submissions = [self._submission(r, _LOCAL, self._constraint(r)) for r in requests]
        for submission in submissions:
            self._scheduler.submit(submission)
        answers = {submission.handle: _PartialAnswer() for submission in submissions}
        failures: list[Exception] = []
        while self._scheduler.has_work():
            step = self._scheduler.step()
            _deal(step, answers)
            failures += [error for _, _, error in step.failures]
        if failures:
            raise failures[0]
        return [answers[submission.handle].generated() for submission in submissions]

    async def score(
        self, token_ids: types.Int32, row_offsets: types.Int32, *, temperature: float
    ) -> types.Float32:
        """Implements the port's `Scorer`, under the weights that are served when the turn of a row
        comes. Waits for the decode thread.

        Between two steps the decode thread scores some rows: at most `max_batch_tokens` tokens, or
        one row. Generation waits for that time.
        """
        c = self._capabilities
        check_rows(
            token_ids,
            row_offsets,
            temperature=temperature,
            vocab_size=c.vocab_size,
            max_context=c.max_context,
        )
        found = np.zeros(len(token_ids), dtype=np.float32)
        rows = np.split(token_ids, row_offsets[1:-1])
        places = np.split(np.arange(len(token_ids)), row_offsets[1:-1])
        for portion in portions(np.diff(row_offsets), max_tokens=self._max_batch_tokens):
            scoring = partial(
                token_logprobs,
                self._model,
                [rows[row] for row in portion],
                temperature=temperature,
                resumes=self._manner.resumes,
            )
            try:
                scores = await asyncio.wrap_future(self._thread.call(scoring))
            except RuntimeError as error:
                raise EngineError(
                    f"scoring {len(token_ids)} tokens: {error}. Lower engine.max_batch_tokens if "
                    "memory ran out."
                ) from error
            found[np.concatenate([places[row] for row in portion])] = np.concatenate(scores)
        return found

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, top: int
    ) -> Sequence[types.Likely]:
        """Implements the port's `PromptScorer`. Waits for the decode thread, which generates
        nothing meanwhile.
        """
        row = np.asarray(token_ids, dtype=np.int32)
        c = self._capabilities
        check_rows(
            row,
            np.array([0, len(row)], dtype=np.int32),
            temperature=1.0,
            vocab_size=c.vocab_size,
            max_context=c.max_context,
        )
        scoring = partial(
            likely_tokens, self._model, token_ids, top=top, resumes=self._manner.resumes
        )
        try:
            return await asyncio.wrap_future(self._thread.call(scoring))
        except RuntimeError as error:
            raise EngineError(
                f"scoring a prompt of {len(row)} tokens: {error}. Send a shorter one if memory ran "
                "out."
            ) from error

    # --- Pauses and weights -----------------------------------------------------------------------

    async def pause(self, mode: types.PauseMode) -> None:
        """Returns once no token will be produced. Waits for the step in progress, and in the mode
        `drain` for the requests to finish.

        The lease starts anew with each call: an engine whose controller died resumes by itself.
        """
        self._pausing += 1
        try:
            await asyncio.wrap_future(self._thread.call(lambda: self._scheduler.pause(mode)))
            self._start_lease()
            await asyncio.wrap_future(self._thread.until_quiet())
        finally:
            self._pausing -= 1
        self._start_lease()

    async def resume(self) -> None:
        """Raises `EngineError` while the engine sleeps."""
        self._check_awake("resuming")
        self._end_lease()
        await asyncio.wrap_future(self._thread.call(self._scheduler.resume))

    async def sleep(self) -> None:
        """Implements the port's `Sleeper`. Waits for the step in progress, and for the copy of the
        weights.
        """
        await asyncio.wrap_future(self._thread.call(self._fall_asleep))

    async def wake(self, part: types.MemoryPart) -> None:
        """Implements the port's `Sleeper`. Room for keys is made when requests come."""
        if part is types.MemoryPart.WEIGHTS and part in self._asleep:
            await asyncio.wrap_future(self._thread.call(self._weights.take_device))
        self._asleep.discard(part)

    async def stage(self, manifest: types.WeightManifest) -> None:
        """Waits for a worker thread, which the transport feeds. Decoding goes on meanwhile."""
        self._check_has_weights(f"staging version {manifest.version}")
        await asyncio.to_thread(self._weights.stage, manifest)

    async def commit(self, version: types.Version) -> types.Attestation:
        """Waits for the step in progress. Without a pause, running requests go on over the keys
        they have, as in `keep`.
        """
        self._check_has_weights(f"committing version {version}")
        return await asyncio.wrap_future(self._thread.call(lambda: self._commit(version)))

    async def health(self) -> types.EngineHealth:
        """Raises `EngineUnavailable` after the decode loop has ended."""
        self._thread.check()
        return self.reading()

    def reading(self) -> types.EngineHealth:
        """The present numbers, also of an engine that has ended."""
        s = self._scheduler
        return types.EngineHealth(
            version=s.version,
            paused=s.paused is not None,
            num_tokens=s.num_tokens,
            num_running=s.num_running,
            num_waiting=s.num_waiting,
            num_computed=s.num_computed,
            num_reused=s.num_reused,
        )

    def _commit(self, version: types.Version) -> types.Attestation:
        """Runs on the decode thread, between two steps."""
        started = time.monotonic()
        attestation = self._weights.commit(version)
        if self._scheduler.version != version:
            self._scheduler.serve(version)
        return replace(attestation, still_seconds=time.monotonic() - started)

    def _fall_asleep(self) -> None:
        if self._scheduler.paused is None:
            raise EngineError(
                f"putting engine {self._name!r} to sleep: it generates; pause it first."
            )
        self._asleep |= _ALL_PARTS
        self._scheduler.forget_keys()
        self._weights.leave_device()
        give_back(self._model.device)

    def _check_awake(self, deed: str) -> None:
        if self._asleep:
            raise EngineError(
                f"{deed} engine {self._name!r}: it sleeps without its "
                f"{' and '.join(sorted(self._asleep))}; wake it first."
            )

    def _check_has_weights(self, deed: str) -> None:
        if types.MemoryPart.WEIGHTS in self._asleep:
            raise EngineError(
                f"{deed} on engine {self._name!r}: it sleeps without its weights; wake it first."
            )

    def _start_lease(self) -> None:
        self._end_lease()
        if self._scheduler.paused is not None:
            self._lease = asyncio.get_running_loop().call_later(
                self._lease_seconds, self._lease_ended
            )

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    def _lease_ended(self) -> None:
        """Resumes, unless a caller still waits for a pause, because a drain may take longer than a
        lease. An engine that sleeps waits to be woken, because its device is another's.
        """
        if self._pausing or self._asleep:
            self._start_lease()
            return
        _log.warning(
            "engine %s: paused for %g s without renewal; resuming by itself",
            self._name,
            self._lease_seconds,
        )
        with contextlib.suppress(EngineUnavailable):
            self._thread.post(self._scheduler.resume)

    # --- Between the threads ----------------------------------------------------------------------

    async def _compiled(self, request: types.GenerateRequest, outlet: int) -> Submission:
        """Waits for a grammar's turn and its compilation. The submission says whether the request
        was aborted meanwhile.
        """
        ticket = next(self._counter)
        self._compiling[ticket] = request.request_id
        try:
            async with self._one_compilation:
                constraint = await asyncio.to_thread(self._constraint, request)
            aborted = ticket not in self._compiling
            return self._submission(request, outlet, constraint, aborted=aborted)
        finally:
            self._compiling.pop(ticket, None)

    def _check(self, request: types.GenerateRequest) -> None:
        check_request(
            request,
            vocab_size=self._capabilities.vocab_size,
            max_context=self._capabilities.max_context,
        )

    def _constraint(self, request: types.GenerateRequest) -> Constraint | None:
        """Blocking, for as long as the grammar takes to compile."""
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        output_ids = request.input_ids[request.num_prompt_tokens :]
        return self._grammars.constraint(grammar, output_ids)

    def _submission(
        self,
        request: types.GenerateRequest,
        outlet: int,
        constraint: Constraint | None = None,
        *,
        aborted: bool = False,
    ) -> Submission:
        sampling = request.sampling
        matcher = None
        if any(sampling.stop):
            matcher = StopMatcher(self._tokenizer, sampling.stop, min_tokens=sampling.min_tokens)
        ends = () if sampling.ignore_eos else tuple(sorted(self._tokenizer.eos_token_ids))
        return Submission(
            handle=next(self._counter),
            outlet=outlet,
            request=request,
            stop_ids=ends + tuple(sampling.stop_token_ids),
            matcher=matcher,
            constraint=constraint,
            aborted=aborted,
        )

    def _on_step(self, step: StepOutput) -> None:
        """Called on the event loop, once per step."""
        for handle, _, _ in step.finishes:
            self._live.pop(handle, None)
        for handle, _, _ in step.failures:
            self._live.pop(handle, None)
        for number in step.touched:
            outlet = self._outlets.get(number)
            if outlet is not None:
                outlet.put(step if len(step.touched) == 1 else step.for_outlet(number))
        if step.num_running:
            self._record(
                EngineStepped(
                    self._name, step.started, step.ended, len(step.token_ids), step.num_running
                )
            )


def _capabilities(
    model: PreTrainedModel, *, max_context: int, max_running: int
) -> types.Capabilities:
    return types.Capabilities(
        pause_modes=frozenset(types.PauseMode),
        logprob_kind=types.LogprobKind.SAMPLED,
        honours_seed=True,
        versions_per_token=True,
        stops_on_strings=True,
        aborts_single_requests=True,
        stages_weights=True,
        max_context=max_context,
        vocab_size=int(model.config.get_text_config().vocab_size),
        max_running=max_running,
        features=frozenset(types.Feature),
    )


@dataclass(slots=True, eq=False)
class _PartialAnswer:
    """The part of an answer that one request of `generate_all` has got so far."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[types.Version] = field(default_factory=list[types.Version])
    kv_versions: list[types.Version] = field(default_factory=list[types.Version])
    finish: types.Finish | None = None
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(
        default_factory=list[tuple[tuple[int, float], ...]]
    )
    kept: list[bytes] = field(default_factory=list[bytes])
    experts: bytes = b""
    key_runs: types.KeyRuns = ()

    def generated(self) -> Generated:
        assert self.finish is not None
        return Generated(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            kv_versions=tuple(self.kv_versions),
            finish=self.finish,
            top_logprobs=tuple(self.top_logprobs),
            kept=tuple(self.kept),
            experts=self.experts,
            key_runs=self.key_runs,
        )


def _deal(step: StepOutput, answers: Mapping[int, _PartialAnswer]) -> None:
    """Adds the tokens and ends of a step to the answers, which are keyed by handle."""
    for handle, token_id, logprob, kv_version in step.rows():
        answer = answers[handle]
        answer.token_ids.append(token_id)
        answer.logprobs.append(logprob)
        answer.versions.append(step.version)
        answer.kv_versions.append(kv_version)
    handles: list[int] = step.handles.tolist()
    for handle, top in zip(handles, step.tops(), strict=False):
        if top:
            answers[handle].top_logprobs.append(top)
    for handle, left in zip(handles, step.kept, strict=False):
        if left is not None:
            answers[handle].kept.append(left)
    for handle, _, finish in step.finishes:
        answers[handle].finish = finish
    for handle, experts in step.experts:
        answers[handle].experts = experts
    for handle, runs in step.key_runs:
        answers[handle].key_runs = runs
