"""What a step gives out, and its tokens as chunks of single requests for the callers inside the process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from midflight.errors import RequestRejected
from midflight.types import Chunk, Finish, GenerateRequest, Segment, Version

Ints = NDArray[np.int64]


def _no_ints() -> Ints:
    return np.empty(0, dtype=np.int64)


def _no_floats() -> NDArray[np.float64]:
    return np.empty(0)


def _no_columns() -> Ints:
    return np.empty((0, 0), dtype=np.int64)


def _no_float_columns() -> NDArray[np.float64]:
    return np.empty((0, 0))


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """At most one token for each request of a step, as arrays of equal length, and the requests that ended.

    All tokens were sampled under `version`. A request that ends with a token has it in the same output.
    """

    version: Version
    handles: Ints = field(default_factory=_no_ints)
    token_ids: Ints = field(default_factory=_no_ints)
    logprobs: NDArray[np.float64] = field(default_factory=_no_floats)
    kv_versions: Ints = field(default_factory=_no_ints)
    top_ids: Ints = field(default_factory=_no_columns)
    """[R, W] the likeliest ids at each token's place, likeliest first, filled up with -1; W is 0 where nobody asks."""
    top_logprobs: NDArray[np.float64] = field(default_factory=_no_float_columns)
    """[R, W]"""
    outlets: Ints = field(default_factory=_no_ints)
    finishes: tuple[tuple[int, int, Finish], ...] = ()
    """(handle, outlet, how it ended)"""
    failures: tuple[tuple[int, int, RequestRejected], ...] = ()
    """(handle, outlet, why it could not go on): these requests ended too."""
    touched: frozenset[int] = frozenset()
    """Outlets with a request in the step, also those whose request got no token yet."""
    started: float = 0.0
    ended: float = 0.0
    num_running: int = 0

    def for_outlet(self, outlet: int) -> StepOutput:
        """The part of one outlet."""
        if len(self.touched) == 1:
            return self
        rows = np.flatnonzero(self.outlets == outlet)
        top_ids = self.top_ids[rows] if self.top_ids.size else self.top_ids
        width = int((top_ids >= 0).sum(1).max(initial=0))
        return StepOutput(
            version=self.version,
            handles=self.handles[rows],
            token_ids=self.token_ids[rows],
            logprobs=self.logprobs[rows],
            kv_versions=self.kv_versions[rows],
            top_ids=top_ids[:, :width],
            top_logprobs=(self.top_logprobs[rows] if self.top_logprobs.size else self.top_logprobs)[:, :width],
            outlets=self.outlets[rows],
            finishes=tuple(f for f in self.finishes if f[1] == outlet),
            failures=tuple(f for f in self.failures if f[1] == outlet),
            touched=frozenset({outlet}),
            started=self.started,
            ended=self.ended,
            num_running=self.num_running,
        )


Top: TypeAlias = "tuple[tuple[int, float], ...] | None"
"""The likeliest (id, log-probability) at a token's position; `None` for a request that did not ask."""
TokenRow: TypeAlias = tuple[int, int, float, int, Top]
"""One token: the handle of its request, the id, its log-probability, the version of the oldest key, alternatives."""


class Outlet(Protocol):
    """Where the tokens of some requests go. Called on the event loop; never waits."""

    def put(self, step: StepOutput) -> None: ...
    def fail(self, error: Exception) -> None:
        """The engine died: nothing more will come."""
        ...


PATIENCE_SECONDS = 0.05
"""How long a caller that is not eager lets tokens gather. What an engine's death can cost it is no more than that."""


@dataclass(slots=True)
class _Part:
    """Tokens of one version that wait for the caller."""

    version: Version
    kv_version: Version
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list[tuple[tuple[int, float], ...]])
    finish: Finish | None = None
    attested: tuple[Segment, ...] = ()

    def chunk(self) -> Chunk:
        ids, logprobs, top = tuple(self.token_ids), tuple(self.logprobs), tuple(self.top_logprobs)
        return Chunk(ids, logprobs, self.version, self.kv_version, self.finish, top, self.attested)


class ChunkStream:
    """The chunks of one request. Bounded by the request's own `max_tokens`.

    Tokens that come while nobody reads become one chunk. An eager caller is woken by each, another by the first, the last, and
    in between when tokens have gathered for `PATIENCE_SECONDS`.
    """

    def __init__(self, *, eager: bool) -> None:
        self._parts: deque[_Part] = deque()
        self._error: Exception | None = None
        self._arrived = asyncio.Event()
        self._at_once = True
        self._eager = eager
        self._timer: asyncio.TimerHandle | None = None

    def add(self, token_id: int, logprob: float, *, version: Version, kv_version: Version, top: Top = None) -> None:
        part = self._parts[-1] if self._parts else None
        if part is None or part.version != version or part.kv_version != kv_version:
            part = _Part(version, kv_version)
            self._parts.append(part)
        part.token_ids.append(token_id)
        part.logprobs.append(logprob)
        if top is not None:
            part.top_logprobs.append(top)
        if self._at_once:
            self._at_once = self._eager
            self._arrived.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._arrived.set)

    def end(self, version: Version, finish: Finish, *, attested: tuple[Segment, ...] = ()) -> None:
        """The last word: it goes with the tokens before it."""
        if not self._parts:
            self._parts.append(_Part(version, version))
        self._parts[-1].finish, self._parts[-1].attested = finish, attested
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Comes after the tokens before it."""
        self._error = error
        self._arrived.set()

    async def next(self) -> Chunk:
        """Waits for a chunk, which the decode thread delivers, or for the engine's end, which raises `EngineUnavailable`."""
        while not self._parts or not self._arrived.is_set():
            if self._error is not None:
                raise self._error
            await self._arrived.wait()
            if not self._parts:
                self._arrived.clear()
        chunk = self._parts.popleft().chunk()
        if not self._parts:
            self.rest()
        return chunk

    def rest(self) -> None:
        """Nothing waits to be read, or nobody reads any more: no timer is left."""
        if self._error is None:
            self._arrived.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ChunkStreams:
    """An outlet that splits every step by request."""

    def __init__(self) -> None:
        self._streams: dict[int, ChunkStream] = {}

    def open(self, handle: int, request: GenerateRequest) -> ChunkStream:
        stream = self._streams[handle] = ChunkStream(eager=request.eager)
        return stream

    def close(self, handle: int, stream: ChunkStream) -> bool:
        """Whether the request had not ended."""
        stream.rest()
        return self._streams.pop(handle, None) is not None

    def put(self, step: StepOutput) -> None:
        self.take(step.version, _rows(step), finishes=[(h, f) for h, _, f in step.finishes])
        for handle, _, error in step.failures:
            self.reject(handle, error)

    def take(
        self,
        version: Version,
        rows: Iterable[TokenRow],
        *,
        finishes: Iterable[tuple[int, Finish]],
        attested: Iterable[tuple[int, tuple[Segment, ...]]] = (),
    ) -> None:
        """What a step did, by handle; of requests that were closed meanwhile nothing is kept."""
        streams = self._streams
        for handle, token, logprob, kv, top in rows:
            if (stream := streams.get(handle)) is not None:
                stream.add(token, logprob, version=version, kv_version=kv, top=top)
        spans = dict(attested)
        for handle, finish in finishes:
            if (stream := streams.pop(handle, None)) is not None:
                stream.end(version, finish, attested=spans.get(handle, ()))

    def reject(self, handle: int, error: Exception) -> None:
        """Ends one request with an error; an unknown one has been closed meanwhile."""
        stream = self._streams.pop(handle, None)
        if stream is not None:
            stream.fail(error)

    def fail(self, error: Exception) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)


def step_chunks(step: StepOutput, finishes: dict[int, Finish]) -> list[tuple[int, Chunk]]:
    """One chunk per token, and one without tokens per request that ended without one. `finishes` is used up."""
    chunks = [
        (h, Chunk((token,), (logprob,), step.version, kv, finishes.pop(h, None), (top,) if top else ()))
        for h, token, logprob, kv, top in _rows(step)
    ]
    return chunks + [(h, Chunk((), (), step.version, step.version, finish)) for h, finish in finishes.items()]


def _rows(step: StepOutput) -> Iterable[TokenRow]:
    columns = (step.handles, step.token_ids, step.logprobs, step.kv_versions)
    return zip(*(column.tolist() for column in columns), _likeliest(step), strict=True)


def _likeliest(step: StepOutput) -> list[Top]:
    """The alternatives of each row. One that asked has one at least, the sampled token."""
    if not step.top_ids.size:
        return [None] * len(step.handles)
    pairs = zip(step.top_ids.tolist(), step.top_logprobs.tolist(), strict=True)
    rows = [tuple((i, p) for i, p in zip(*row, strict=True) if i >= 0) for row in pairs]
    return [row or None for row in rows]
