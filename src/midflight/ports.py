"""The interfaces between stations, as Protocols. Implementations never import each other; `run/`
connects them.

`pause_mode` and `verified_pause` pause an engine through its interface, for the operator and for a
commit.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from midflight import types
from midflight.errors import NotSupported, PauseIgnored


class Engine(Protocol):
    """An inference server, as the rollout process sees it.

    `generate` streams until a chunk with `finish`. An interruption is either a last chunk with
    `FinishReason.ABORT` or an `EngineUnavailable`. In both cases the tokens received so far are
    valid and the caller may resume elsewhere. `RequestRejected` blames the request and is never
    retried. Closing the iterator aborts the request.
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
        """Pauses; returns when no token will be produced until `resume`. Idempotent. In the mode
        `drain` it returns when all requests have finished.
        """
        ...

    async def resume(self) -> None:
        """Ends the pause. Idempotent."""
        ...

    async def stage(self, manifest: types.WeightManifest) -> None:
        """Loads a version into a second buffer while decoding goes on, and verifies its
        fingerprint. May be repeated.
        """
        ...

    async def commit(self, version: types.Version) -> types.Attestation:
        """Makes the staged version live between two decode steps. The attested version is the one
        that is served.
        """
        ...

    async def health(self) -> types.EngineHealth: ...


class Sleeper(Protocol):
    """An engine that can give the memory of its device to others for a time."""

    async def sleep(self) -> None:
        """Ends all requests with `ABORT`, keeps the weights in host memory and drops all keys.
        Returns when the device's memory is free. Called in a pause. Idempotent. Until it is wholly
        awake the engine refuses to resume.
        """
        ...

    async def wake(self, part: types.MemoryPart) -> None:
        """Takes memory of the device again, for the weights, which are those from before, or for
        keys. Idempotent. With its weights it can stage and commit. The pause goes on.
        """
        ...


class Scorer(Protocol):
    """A teacher: a model that scores how likely given tokens are."""

    async def score(
        self, token_ids: types.Int32, row_offsets: types.Int32, *, temperature: float
    ) -> types.Float32:
        """The natural log of softmax(logits / temperature) of each token after those before it in
        its row: [N], 0 for the first token of a row.

        Row r has the tokens [row_offsets[r], row_offsets[r + 1]), at least one. `RequestRejected`
        blames the rows; `EngineUnavailable` means that trying again may help.
        """
        ...


class PromptScorer(Protocol):
    """An engine with `Feature.PROMPT_LOGPROBS`."""

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, top: int
    ) -> Sequence[types.Likely]:
        """The scores of each token but the first, at temperature 1 under the served weights: the
        token itself, then the `top` likeliest tokens at its place. Waits for the engine.
        `RequestRejected` blames the tokens; `EngineUnavailable` means that trying again may help.
        """
        ...


class WeightReceiver(Protocol):
    """The engine process's end of a transport. It reads a manifest's bytes. It blocks; called from
    a worker thread.
    """

    def fetch(self, manifest: types.WeightManifest) -> Mapping[str, memoryview]:
        """The bytes of each tensor by name. They match the manifest's fingerprint; otherwise
        `WeightsCorrupt` is raised.

        The bytes belong to the caller alone, and are aligned and writable, so it serves from them
        without copying or checking again.
        """
        ...


class ServerWorkers(Protocol):
    """The workers of one server, which receive versions directly. Each call waits for the server's
    answer.
    """

    @property
    def meets(self) -> types.Meeting:
        """How they come to the group. Our plugin takes slices of the version; a server's own engine
        takes buckets of whole tensors.
        """
        ...

    async def states(self) -> Sequence[types.WorkerState]:
        """The state of each worker of the server, in order."""
        ...

    async def receive(self, order: types.TransferOrder) -> None:
        """Sends an order; returns when the workers have begun. Raises `EngineError` if they
        refuse.
        """
        ...


class WorkerFeed(Protocol):
    """The connection from a publisher to a server's workers."""

    async def bring(self, manifest: types.WeightManifest, workers: ServerWorkers) -> None:
        """Sends a version; returns when each worker holds exactly the bytes that were sent. Raises
        `EngineUnavailable` if the publisher or the connection to it is lost.
        """
        ...


class SessionHandle(Protocol):
    """An open session, as an environment's runner sees it. The agent gets `base_url` and `api_key`."""

    @property
    def session_id(self) -> str: ...
    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...


class RequestWatch(Protocol):
    """The requests of one rollout, as its time limit sees them."""

    on_change: Callable[[], None] | None
    """Called whenever `waits` has changed, and when the agent starts over."""

    @property
    def waits(self) -> bool:
        """True if a request is under way, or the agent waits before another try as it was told
        to.
        """
        ...

    @property
    def num_restarts(self) -> int:
        """The number of times that the agent has started over. Requests and seconds before that do
        not count.
        """
        ...

    def read(self) -> types.RequestTime: ...


class Sessions(Protocol):
    """The gateway, as the environments station sees it."""

    def open(
        self, key: types.RolloutKey, *, sampling: types.SamplingParams, tracked: bool
    ) -> SessionHandle:
        """Opens a session. `sampling` gives the defaults of its requests. `tracked=False` is for
        evaluation, whose tokens have no fate but `evaluated`.
        """
        ...

    def close(self, session_id: str) -> types.SessionRecord:
        """Ends the session. Its running requests are cancelled, and its tokens are handed over.
        Idempotent.
        """
        ...

    def oldest_version(self, session_id: str) -> types.Version | None:
        """The oldest version among the session's generated tokens; `None` before the first."""
        ...

    def request_watch(self, session_id: str) -> RequestWatch:
        """The watch of an open session and all its parts. The first caller owns its `on_change`."""
        ...


class Chats(Protocol):
    """The gateway, for an environment in the same process."""

    async def reply(self, token: str, messages: Sequence[dict[str, types.Json]]) -> str:
        """The model's next message, in the session that `token` names. Waits for the whole reply.
        Raises the error that a client would get.
        """
        ...


class EngineFleet(Protocol):
    """The engines behind the gateway, as the handover sees them. It is synchronous."""

    def engines(self) -> tuple[Engine, ...]:
        """All attached engines, including those in quarantine."""
        ...

    def hold(self, engine: str, owner: str) -> None:
        """Dispatches no new request to the engine until `release`. Holds are named; the engine is
        free when no hold is left.
        """
        ...

    def release(self, engine: str, owner: str) -> None: ...
    def served(self, engine: str, version: types.Version) -> None:
        """The engine attested this version. It is routable (and out of quarantine) from now on."""
        ...

    def quarantine(self, engine: str, error: BaseException) -> None:
        """Routes no request to the engine. Its requests end there and are resumed elsewhere, or
        wait.
        """
        ...

    def served_version(self) -> types.Version:
        """v_served: the oldest version that a routable engine serves."""
        ...

    def reserved(self) -> str | None:
        """The engine that keeps its version for an evaluation. It must get no other version
        meanwhile.
        """
        ...


BY_COST = (
    types.PauseMode.KEEP,
    types.PauseMode.RECOMPUTE,
    types.PauseMode.ABORT,
    types.PauseMode.DRAIN,
)
"""All modes. The one that costs an engine least comes first."""


def pause_mode(
    engine: str,
    capabilities: types.Capabilities,
    wanted: types.PauseMode | None,
    *,
    otherwise: Iterable[types.PauseMode] = BY_COST,
    remedy: str,
) -> types.PauseMode:
    """The wanted mode, else the first of `otherwise` that the engine has. Raises `NotSupported`,
    which names the engine's modes and ends with `remedy`.
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
    """Pauses the engine and yields a reading of it. Raises `PauseIgnored` after the block if the
    engine made tokens during it.

    `pause` returns when no token is on its way any more, so the first count is final and the second
    must equal it. Waits for the engine; the caller sets the deadline. The caller also ends the
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
