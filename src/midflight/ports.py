"""The verbs: what one station asks of another, as Protocols. Implementations never import each
other; `run/` connects them.

And how an engine is paused, for an operator or for a commit: in which mode, and with proof that it
really made no token.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from midflight import types
from midflight.errors import NotSupported, PauseIgnored


class Engine(Protocol):
    """An inference server, seen from the rollout process.

    `generate` streams until a chunk with `finish`. An interruption is either a last chunk with
    `FinishReason.ABORT` or an `EngineUnavailable`; in both cases the tokens received so far stand
    and the caller may resume elsewhere. `RequestRejected` blames the request and is never retried.
    Closing the iterator aborts the request.
    """

    @property
    def name(self) -> str: ...
    @property
    def capabilities(self) -> types.Capabilities: ...
    def generate(self, request: types.GenerateRequest) -> AsyncIterator[types.Chunk]: ...
    async def abort(self, request_id: str | None) -> None:
        """Ends one request, or all of them (`None`), with `FinishReason.ABORT`. Unknown ids are not
        an error.
        """
        ...

    async def pause(self, mode: types.PauseMode) -> None:
        """Returns when no token will be produced until `resume`. Idempotent; `drain` returns when
        all have finished.
        """
        ...

    async def resume(self) -> None:
        """Idempotent."""
        ...

    async def stage(self, manifest: types.WeightManifest) -> None:
        """Brings a version into a second buffer while decoding goes on and verifies its
        fingerprint. May be repeated.
        """
        ...

    async def commit(self, version: types.Version) -> types.Attestation:
        """Makes the staged version live between two decode steps. What is attested is what is
        served.
        """
        ...

    async def health(self) -> types.EngineHealth: ...


class Scorer(Protocol):
    """A model that is asked how likely given tokens are: a teacher."""

    async def score(
        self, token_ids: types.Int32, row_offsets: types.Int32, *, temperature: float
    ) -> types.Float32:
        """Natural log of softmax(logits / temperature) of each token after those before it in its
        row: [N], 0 at the first of a row.

        Row r has the tokens [row_offsets[r], row_offsets[r + 1]), at least one. `RequestRejected`
        blames the rows; `EngineUnavailable` says that trying again may help.
        """
        ...


class PromptScorer(Protocol):
    """An engine with `Feature.PROMPT_LOGPROBS`."""

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, top: int
    ) -> Sequence[types.Likely]:
        """Of each token but the first: it, then the `top` likeliest at its place, at temperature 1
        under the weights served. Waits for the engine. `RequestRejected` blames the tokens;
        `EngineUnavailable` says that trying again may help.
        """
        ...


class WeightReceiver(Protocol):
    """The engine process's end of a transport: reads a manifest's bytes. Blocking; called from a
    worker thread.
    """

    def fetch(self, manifest: types.WeightManifest) -> Mapping[str, memoryview]:
        """Bytes of each tensor by name, checked against the manifest's fingerprint, else
        `WeightsCorrupt`.

        They are the caller's alone, aligned and writable: it serves from them without copying or
        checking again.
        """
        ...


class ServerWorkers(Protocol):
    """The workers of one server, which receive a version by themselves. Each call waits for the
    server's answer.
    """

    async def states(self) -> Sequence[types.WorkerState]:
        """One for each worker, in order: so there are as many as the server has."""
        ...

    async def receive(self, order: types.TransferOrder) -> None:
        """Returns when they have begun. `EngineError` where they refuse."""
        ...


class WorkerFeed(Protocol):
    """The way from a publisher into a server's workers."""

    async def bring(self, manifest: types.WeightManifest, workers: ServerWorkers) -> None:
        """Returns when each worker holds just what was sent. `EngineUnavailable` when the publisher
        or the way to it is gone.
        """
        ...


class SessionHandle(Protocol):
    """An open session, as an environment's runner sees it. `base_url` and `api_key` are what the
    agent gets.
    """

    @property
    def session_id(self) -> str: ...
    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...


class RequestWatch(Protocol):
    """The requests of one rollout, as its limit of time looks at them."""

    on_change: Callable[[], None] | None
    """Called whenever `waits` has changed, and when its agent begins again."""

    @property
    def waits(self) -> bool:
        """Whether a request is under way, or its agent waits before another try as it was told."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often its agent has begun again; requests and seconds before that do not count."""
        ...

    def read(self) -> types.RequestTime: ...


class Sessions(Protocol):
    """The gateway, as the environments station sees it."""

    def open(
        self, key: types.RolloutKey, *, sampling: types.SamplingParams, tracked: bool
    ) -> SessionHandle:
        """`sampling` gives the defaults of the session's requests. `tracked=False` is evaluation:
        no fate but `evaluated`.
        """
        ...

    def close(self, session_id: str) -> types.SessionRecord:
        """Ends the session: requests still running in it are cancelled and its tokens handed over.
        Idempotent.
        """
        ...

    def oldest_version(self, session_id: str) -> types.Version | None:
        """The oldest version among the session's generated tokens, `None` before the first."""
        ...

    def request_watch(self, session_id: str) -> RequestWatch:
        """Of an open session and all its parts. Who asks first keeps its `on_change`."""
        ...


class Chats(Protocol):
    """The gateway, for an environment in its own process."""

    async def reply(self, token: str, messages: Sequence[dict[str, types.Json]]) -> str:
        """What the model says next, in the session that `token` names. Waits for the whole reply;
        raises what a client would be told.
        """
        ...


class EngineFleet(Protocol):
    """The engines behind the gateway, as the handover sees them. Synchronous but for `hold`."""

    def engines(self) -> tuple[Engine, ...]:
        """All attached engines, those in quarantine too."""
        ...

    def hold(self, engine: str, owner: str) -> None:
        """Dispatch no new request to the engine until `release`. Holds are named; the engine is
        free when none is left.
        """
        ...

    def release(self, engine: str, owner: str) -> None: ...
    def served(self, engine: str, version: types.Version) -> None:
        """The engine attested this version; it is routable (and out of quarantine) from now on."""
        ...

    def quarantine(self, engine: str, error: BaseException) -> None:
        """Route nothing to the engine; its requests end there and are resumed elsewhere, or
        wait.
        """
        ...

    def served_version(self) -> types.Version:
        """v_served: the oldest version a routable engine serves."""
        ...

    def reserved(self) -> str | None:
        """The engine that keeps its version for an evaluation: no version is brought to it
        meanwhile.
        """
        ...


BY_COST = (
    types.PauseMode.KEEP,
    types.PauseMode.RECOMPUTE,
    types.PauseMode.ABORT,
    types.PauseMode.DRAIN,
)
"""All modes, first the one that costs an engine least."""


def pause_mode(
    engine: str,
    capabilities: types.Capabilities,
    wanted: types.PauseMode | None,
    *,
    otherwise: Iterable[types.PauseMode] = BY_COST,
    remedy: str,
) -> types.PauseMode:
    """The mode wanted, else the first of `otherwise` that the engine has. `NotSupported` names what
    it has, and ends with `remedy`.
    """
    has = capabilities.pause_modes
    for mode in otherwise if wanted is None else (wanted,):
        if mode in has:
            return mode
    listed = ", ".join(sorted(has)) or "no pause at all"
    raise NotSupported(
        f"pausing engine {engine!r} by {'any mode' if wanted is None else wanted.value}: it can "
        f"{listed}; {remedy}."
    )


@asynccontextmanager
async def verified_pause(
    engine: Engine, mode: types.PauseMode
) -> AsyncGenerator[types.EngineHealth]:
    """Pauses the engine, and gives its reading; `PauseIgnored` after the block if it made tokens
    during it.

    `pause` returns when no token is on its way any more, so the first count is final and the second
    must equal it. Waits for the engine; the caller has the deadline. The caller also ends the
    pause, by `resume` or by quarantine (I7, I9).
    """
    await engine.pause(mode)
    first = await engine.health()
    loop = asyncio.get_running_loop()
    began = loop.time()
    yield first
    made = (await engine.health()).num_tokens - first.num_tokens
    if made > 0:
        raise PauseIgnored(
            f"pausing engine {engine.name!r}: it made {made} tokens while paused, in "
            f"{loop.time() - began:.3g} s. Restart it, or pause it in another mode."
        )
