"""The scripted engine: it has every verb of the engine port and a model whose answers are known,
and it shows every fault on demand.

It ships with the library. Tests of agents, gateways and handovers run on it, on virtual time or on
the real clock.
"""

import asyncio
import bisect
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from midflight import types
from midflight.engines.requests import check_features, check_request
from midflight.errors import ContextExceeded, EngineError, EngineUnavailable, NotSupported
from midflight.testing.script import (
    Script,
    ScriptedAnswer,
    ScriptedPolicy,
    ScriptedRun,
    likeliest,
    play,
    scripted_tokenizer,
)
from midflight.text import Tokenizer

Call: TypeAlias = Literal[
    "generate",
    "abort",
    "pause",
    "resume",
    "sleep",
    "wake",
    "stage",
    "commit",
    "health",
    "prompt_logprobs",
]

CAPABLE = types.Capabilities(
    pause_modes=frozenset(types.PauseMode),
    logprob_kind=types.LogprobKind.SAMPLED,
    honours_seed=True,
    versions_per_token=True,
    stops_on_strings=True,
    aborts_single_requests=True,
    stages_weights=True,
    max_context=4096,
    vocab_size=262,
    max_running=64,
    features=frozenset({types.Feature.TOP_LOGPROBS}),
)
"""All capabilities except ways of sampling that a script cannot obey. Take a capability away with
`dataclasses.replace`.

An engine that is given features beyond these records the requests for them in
`ScriptedEngine.requests`, and gives the answer that it would have given without them.
"""

_MAX_RECORDED = 100_000
"""The number of requests and calls that are kept for tests: a long simulation must not grow without
end.
"""


class _ScriptedRequest:
    """A request inside the engine: waiting for a slot, or in one."""

    def __init__(
        self, request: types.GenerateRequest, run: ScriptedRun[Any], version: types.Version
    ) -> None:
        self.request = request
        self.run = run
        self.first_version = version
        self.kv_version = version
        self.changed = asyncio.Event()
        self.ending: EngineUnavailable | types.FinishReason | None = None
        self.decoding: tuple[float, int] | None = None
        """The time at which the present tokens began to be decoded, and their number."""

    def end(self, ending: EngineUnavailable | types.FinishReason) -> None:
        self.ending = ending
        self.changed.set()


def _prompt_logprob(token_id: int) -> float:
    return -(1 + token_id % 8) / 8


class ScriptedEngine:
    """Implements `ports.Engine`. Each token takes `step_seconds` of the loop's time; chunks hold up
    to `chunk_tokens`.
    """

    def __init__(
        self,
        name: str = "scripted",
        *,
        script: ScriptedPolicy[Any] | None = None,
        capabilities: types.Capabilities = CAPABLE,
        step_seconds: float = 0.01,
        chunk_tokens: int = 1,
        stage_seconds: float = 0.0,
        commit_seconds: float = 0.0,
        version: types.Version = 0,
        fingerprint: str = "initial",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.name = name
        self.capabilities = capabilities
        self.script: ScriptedPolicy[Any] = script or Script()
        self.step_seconds = step_seconds
        self.chunk_tokens = chunk_tokens
        self.stage_seconds = stage_seconds
        self.commit_seconds = commit_seconds
        self.ignores_pause = False
        """True if the engine reports that it paused, and goes on."""
        self.mangle: Callable[[types.Chunk], Iterable[types.Chunk]] | None = None
        """Applied to every chunk before it is sent: makes malformed answers."""
        self.requests: deque[types.GenerateRequest] = deque(maxlen=_MAX_RECORDED)
        """Every request taken, in order of dispatch."""
        self.calls: deque[Call] = deque(maxlen=_MAX_RECORDED)
        self.max_concurrent = 0
        self._tokenizer = tokenizer or scripted_tokenizer()
        self._initial = types.Attestation(version, fingerprint)
        self._served = self._initial
        self._staged: types.WeightManifest | None = None
        self._paused: types.PauseMode | None = None
        self.asleep = set[types.MemoryPart]()
        """The parts of its memory that it has given away."""
        self._stalled = False
        self._dead = False
        self._exhausted = False
        self._frozen: asyncio.Event | None = None
        self._waiting: list[_ScriptedRequest] = []
        self._running: list[_ScriptedRequest] = []
        self._empty = asyncio.Event()
        self._num_tokens = 0
        self._num_unseeded = 0
        self._corrupt_commits = 0
        self._interruptions: list[tuple[int, Literal["abort", "die"]]] = []
        self._failures: defaultdict[Call, deque[BaseException]] = defaultdict(deque)
        self._hangs: Counter[Call] = Counter()

    # --- What tests ask and order -----------------------------------------------------------------

    def answer(
        self, request: types.GenerateRequest, *, version: types.Version = 0
    ) -> tuple[int, ...]:
        """The output ids of an uninterrupted run under one version."""
        return self.whole_answer(request, version=version).token_ids

    def whole_answer(
        self, request: types.GenerateRequest, *, version: types.Version = 0
    ) -> ScriptedAnswer:
        return play(self.script, request, self._tokenizer, version=version)

    @property
    def served(self) -> types.Attestation:
        return self._served

    @property
    def paused(self) -> types.PauseMode | None:
        return self._paused

    def fail_next(self, call: Call, error: BaseException) -> None:
        """The next such call raises; several failures queue up."""
        self._failures[call].append(error)

    def hang_next(self, call: Call) -> None:
        """The next such call never returns: only cancelling it ends it."""
        self._hangs[call] += 1

    def interrupt(self, at: int, how: Literal["abort", "die"] = "abort") -> None:
        """When a request has `at` output tokens (0: before its first), it is aborted or the engine
        dies. This happens once.
        """
        bisect.insort(self._interruptions, (at, how))

    def corrupt_next_commit(self) -> None:
        """The next commit attests a fingerprint that is not the manifest's."""
        self._corrupt_commits += 1

    def stall(self) -> None:
        """Keeps all work and makes no progress, without an error, until `unstall`."""
        self._stalled = True
        self._poke()

    def unstall(self) -> None:
        self._stalled = False
        self._poke()

    def freeze(self) -> None:
        """Behaves as a stopped process: it keeps its connections, makes no progress and answers
        nothing, until `thaw` or `revive`.
        """
        self._frozen = self._frozen or asyncio.Event()
        self.stall()

    def thaw(self) -> None:
        if self._frozen is not None:
            self._frozen.set()
        self._frozen = None
        self.unstall()

    def exhaust(self) -> None:
        """Behaves as if memory were full: it goes on with its present requests and weights, and
        takes no new weights until `revive`.
        """
        self._exhausted = True

    def die(self) -> None:
        """Ends all requests with `EngineUnavailable`, and every call until `revive`."""
        self._dead = True
        for running in (*self._waiting, *self._running):
            running.end(self._gone())

    def revive(self) -> None:
        """Behaves as a new process: initial weights, nothing staged, not paused, no requests."""
        self.thaw()
        self._dead = False
        self._exhausted = False
        self._served = self._initial
        self._staged = None
        self._paused = None
        self.asleep.clear()
        self._num_tokens = 0

    # --- The port ---------------------------------------------------------------------------------

    async def generate(self, request: types.GenerateRequest) -> AsyncIterator[types.Chunk]:
        """Waits for a slot, for the end of a pause and for the tokens' time. It is ended by finish,
        abort, death or its caller.
        """
        await self._enter("generate")
        self._check(request)
        if request.remaining <= 0:
            version = self._served.version
            finish = types.Finish(types.FinishReason.LENGTH)
            yield types.Chunk((), (), version, version, finish)
            return
        self.requests.append(request)
        running = _ScriptedRequest(request, self._begin(request), self._served.version)
        self._waiting.append(running)
        self._schedule()
        try:
            finish = None
            while finish is None:
                chunk = await self._advance(running)
                finish = chunk.finish
                if self.mangle is None:
                    yield chunk
                else:
                    for mangled in self.mangle(chunk):
                        yield mangled
        finally:
            self._leave(running)

    async def abort(self, request_id: str | None) -> None:
        await self._enter("abort")
        if request_id is not None and not self.capabilities.aborts_single_requests:
            raise NotSupported(
                f"aborting {request_id} on {self.name}: it can only abort all requests. Close the "
                "stream instead."
            )
        for running in (*self._waiting, *self._running):
            if request_id in (None, running.request.request_id):
                running.end(types.FinishReason.ABORT)

    async def pause(self, mode: types.PauseMode) -> None:
        """`drain` waits until running requests have finished or were aborted."""
        await self._enter("pause")
        if mode not in self.capabilities.pause_modes:
            modes = ", ".join(sorted(self.capabilities.pause_modes))
            raise NotSupported(f"pausing {self.name} by {mode}: it can {modes}.")
        if self._paused is None:
            self._paused = mode
        if mode is types.PauseMode.ABORT and not self.ignores_pause:
            for running in (*self._waiting, *self._running):
                running.end(types.FinishReason.ABORT)
        self._poke()
        while self._paused is types.PauseMode.DRAIN and self._running and not self.ignores_pause:
            self._empty.clear()
            await self._empty.wait()

    async def resume(self) -> None:
        await self._enter("resume")
        self._check_awake("resuming", types.MemoryPart)
        if self._paused is types.PauseMode.RECOMPUTE:
            for running in self._running:
                running.kv_version = self._served.version
        self._paused = None
        self._empty.set()
        self._schedule()
        self._poke()

    async def sleep(self) -> None:
        """Implements `ports.Sleeper`."""
        await self._enter("sleep")
        if self._paused is None:
            raise EngineError(f"putting {self.name} to sleep: it generates. Pause it first.")
        for running in (*self._waiting, *self._running):
            running.end(types.FinishReason.ABORT)
        self.asleep.update(types.MemoryPart)

    async def wake(self, part: types.MemoryPart) -> None:
        await self._enter("wake")
        self.asleep.discard(part)

    async def stage(self, manifest: types.WeightManifest) -> None:
        await self._enter("stage")
        self._check_awake("staging on", (types.MemoryPart.WEIGHTS,))
        if not self.capabilities.stages_weights:
            raise NotSupported(
                f"staging version {manifest.version} on {self.name}: it cannot stage. Load weights "
                "while it is paused."
            )
        await asyncio.sleep(self.stage_seconds)
        self._staged = manifest

    async def commit(self, version: types.Version) -> types.Attestation:
        await self._enter("commit")
        self._check_awake("committing on", (types.MemoryPart.WEIGHTS,))
        mended = (
            self._staged is not None
            and self._staged.version == version
            and self._staged.fingerprint != self._served.fingerprint
        )
        if self._served.version == version and not mended:
            return self._served
        if self._staged is None or self._staged.version != version:
            staged = "nothing" if self._staged is None else f"version {self._staged.version}"
            raise EngineError(
                f"committing version {version} on {self.name}: {staged} is staged. Stage it first."
            )
        await asyncio.sleep(self.commit_seconds)
        self._poke()
        self._served = types.Attestation(version, self._staged.fingerprint)
        if self._corrupt_commits:
            self._corrupt_commits -= 1
            self._served = types.Attestation(version, "corrupt")
        self._staged = None
        return self._served

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, top: int
    ) -> Sequence[types.Likely]:
        """Each token has the log-probability -1/8, -2/8, ... by its id modulo 8. The alternatives
        are the ids from 0 on.
        """
        await self._enter("prompt_logprobs")
        alternatives = tuple((i, _prompt_logprob(i)) for i in range(top))
        return [((token, _prompt_logprob(token)), *alternatives) for token in token_ids[1:]]

    async def health(self) -> types.EngineHealth:
        await self._enter("health")
        return types.EngineHealth(
            version=self._served.version,
            paused=self._paused is not None,
            num_tokens=self._num_tokens + sum(self._decoded(r) for r in self._running),
            num_running=len(self._running),
            num_waiting=len(self._waiting),
        )

    # --- How it works -----------------------------------------------------------------------------

    def _check_awake(self, deed: str, parts: Iterable[types.MemoryPart]) -> None:
        missing = self.asleep.intersection(parts)
        if missing:
            raise EngineError(f"{deed} {self.name}: it sleeps without its {min(missing)}. Wake it.")

    def _gone(self) -> EngineUnavailable:
        return EngineUnavailable(f"calling {self.name}: it is dead. Restart the engine.")

    async def _enter(self, call: Call) -> None:
        """Shows the faults that were ordered for a call. A hang waits for ever, until it is
        cancelled.
        """
        self.calls.append(call)
        if self._frozen is not None:
            await self._frozen.wait()
        if self._exhausted and call in ("stage", "commit"):
            raise EngineError(f"{call} on {self.name}: out of memory.")
        if self._hangs[call]:
            self._hangs[call] -= 1
            await asyncio.get_running_loop().create_future()
        if self._failures[call]:
            raise self._failures[call].popleft()
        if self._dead:
            raise self._gone()

    def _check(self, request: types.GenerateRequest) -> None:
        most = self.capabilities.max_context
        check_request(request, vocab_size=self.capabilities.vocab_size, max_context=most)
        if request.num_prompt_tokens + request.sampling.max_tokens > most:
            raise ContextExceeded(
                f"generating on {self.name}: prompt and max_tokens exceed its context of {most}. "
                "Shorten either."
            )
        check_features(request.sampling, self.capabilities.features, engine=self.name)

    def _begin(self, request: types.GenerateRequest) -> ScriptedRun[Any]:
        if not self.capabilities.honours_seed:
            self._num_unseeded += 1
            request = replace(request, sampling=request.sampling.changed(seed=self._num_unseeded))
        return ScriptedRun(
            self.script,
            request,
            self._tokenizer,
            stops_on_strings=self.capabilities.stops_on_strings,
        )

    def _holds_still(self) -> bool:
        if self._stalled:
            return True
        if self.ignores_pause:
            return False
        return self._paused in (types.PauseMode.KEEP, types.PauseMode.RECOMPUTE)

    def _schedule(self) -> None:
        """Gives free slots to the requests that wait longest, unless a pause holds them back."""
        if self._paused is not None and not self.ignores_pause:
            return
        while self._waiting and len(self._running) < self.capabilities.max_running:
            running = self._waiting.pop(0)
            running.kv_version = self._served.version
            running.first_version = self._served.version
            self._running.append(running)
            running.changed.set()
        self.max_concurrent = max(self.max_concurrent, len(self._running))

    def _leave(self, running: _ScriptedRequest) -> None:
        for queue in (self._waiting, self._running):
            if running in queue:
                queue.remove(running)
        if not self._running:
            self._empty.set()
        self._schedule()

    def _poke(self) -> None:
        """Tells the requests that something changed: running steps end at the last whole token."""
        for running in (*self._waiting, *self._running):
            running.changed.set()

    async def _advance(self, running: _ScriptedRequest) -> types.Chunk:
        """Returns the next chunk of a request. Waits as `generate` does."""
        while True:
            self._interrupt(running)
            if isinstance(running.ending, EngineUnavailable):
                raise running.ending
            if running.ending is not None:
                return self._chunk(running, [], types.Finish(running.ending), self._served.version)
            running.changed.clear()
            if running not in self._running or self._holds_still():
                await running.changed.wait()
                continue
            chunk = await self._decode(running)
            if chunk.token_ids:
                return chunk

    async def _decode(self, running: _ScriptedRequest) -> types.Chunk:
        """Decodes tokens of one version. An event that wakes the engine cuts them at the last token
        whose time is over.
        """
        loop = asyncio.get_running_loop()
        version = self._served.version
        tokens = running.run.peek(self._until_interruption(running), version)
        running.decoding = (loop.time(), len(tokens))
        num_done = 0
        try:
            async with asyncio.timeout(len(tokens) * self.step_seconds):
                await running.changed.wait()
        except TimeoutError:
            num_done = len(tokens)
        finally:
            num_done = num_done or self._decoded(running)
            # Tokens of a request without a reader count too: the count never falls.
            self._num_tokens += num_done
            running.decoding = None
        kept = running.run.accept(tokens[:num_done])
        return self._chunk(running, kept, running.run.finish, version)

    def _decoded(self, running: _ScriptedRequest) -> int:
        """Returns the number of finished tokens of those being decoded."""
        if running.decoding is None or not self.step_seconds:
            return 0
        since, most = running.decoding
        elapsed = asyncio.get_running_loop().time() - since
        return min(most, int(elapsed / self.step_seconds + 1e-9))

    def _until_interruption(self, running: _ScriptedRequest) -> int:
        num_output = running.run.num_output
        for at, _ in self._interruptions:
            if at > num_output:
                return min(self.chunk_tokens, at - num_output)
        return self.chunk_tokens

    def _interrupt(self, running: _ScriptedRequest) -> None:
        due = next((i for i in self._interruptions if i[0] == running.run.num_output), None)
        if due is not None and running in self._running and running.ending is None:
            self._interruptions.remove(due)
            if due[1] == "die":
                self.die()
            else:
                running.end(types.FinishReason.ABORT)

    def _chunk(
        self,
        running: _ScriptedRequest,
        tokens: list[tuple[int, float]],
        finish: types.Finish | None,
        version: types.Version,
    ) -> types.Chunk:
        if not self.capabilities.versions_per_token:
            version = running.first_version
        ids = tuple(t for t, _ in tokens)
        logprobs = tuple(p for _, p in tokens)
        num_top = running.request.sampling.top_logprobs
        top: tuple[tuple[tuple[int, float], ...], ...] = ()
        if num_top:
            top = tuple(likeliest(t, p, num_top) for t, p in tokens)
        return types.Chunk(ids, logprobs, version, min(version, running.kv_version), finish, top)
