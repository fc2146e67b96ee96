"""What a step gives out, and its tokens as chunks of single requests for the callers inside the process."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from midflight.errors import RequestRejected
from midflight.types import Chunk, Finish, Segment, Version

Ints = NDArray[np.int64]
PATIENCE_SECONDS = 0.05
"""How long tokens may gather for a caller that is not eager. If the engine dies, the caller loses no more than that."""


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """At most one token for each request of a step, as arrays of equal length, and the requests that ended.

    All tokens were sampled under `version`. A request that ends with a token has it in the same output.
    """

    version: Version
    handles: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    token_ids: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    logprobs: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    kv_versions: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    top_ids: Ints = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    """[R, W] the likeliest ids at each token's place, likeliest first, filled up with -1; W is 0 where nobody asks."""
    top_logprobs: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    """[R, W]"""
    outlets: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
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
        """The part of one outlet of several."""
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

    def rows(self) -> list[TokenRow]:
        columns = (self.handles, self.token_ids, self.logprobs, self.kv_versions)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def tops(self) -> list[Top]:
        """The alternatives of each row; empty where nobody asks. A row that asked has one at least, the sampled token."""
        if not self.top_ids.size:
            return []
        pairs = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        rows = [tuple((i, p) for i, p in zip(*row, strict=True) if i >= 0) for row in pairs]
        return [row or None for row in rows]


Top: TypeAlias = "tuple[tuple[int, float], ...] | None"
"""The likeliest (id, log-probability) at a token's position; `None` for a request that did not ask."""
TokenRow: TypeAlias = tuple[int, int, float, int]
"""One token: the handle of its request, the id, its log-probability, the version of the oldest key."""


class Outlet(Protocol):
    """Where the tokens of some requests go. Called on the event loop; never waits."""

    def put(self, step: StepOutput) -> None: ...
    def fail(self, error: Exception) -> None:
        """The engine died: nothing more will come."""
        ...


@dataclass(slots=True)
class _Gathered:
    """Tokens of one version that wait for the caller."""

    version: Version
    kv_version: Version
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list[tuple[tuple[int, float], ...]])
    finish: Finish | None = None
    attested: tuple[Segment, ...] = ()


class ChunkStream:
    """The chunks of one request, as an iterator that ends after a chunk with `finish`. Bounded by the request's own `max_tokens`.

    Tokens that come while the caller does not read become one chunk. An eager caller is woken by each, another by the first, the last, and
    in between when tokens have gathered for `PATIENCE_SECONDS`.
    """

    def __init__(
        self, *, eager: bool, on_open: Callable[[ChunkStream], None] | None = None, on_close: Callable[[], None] | None = None
    ) -> None:
        """`on_open` is called when the stream is first read; `on_close` once, when it is read no more."""
        self._gathered: deque[_Gathered] = deque()
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        """Set only while tokens or an error wait for the caller."""
        self._eager, self._at_once = eager, True
        self._timer: asyncio.TimerHandle | None = None
        self._on_open, self._on_close = on_open, on_close
        self._closed = False

    # --- For the side that brings the tokens -------------------------------------------------------------------------

    def add(self, token_id: int, logprob: float, *, version: Version, kv_version: Version, top: Top = None) -> None:
        part = self._gathered[-1] if self._gathered else None
        if part is None or part.version != version or part.kv_version != kv_version:
            part = _Gathered(version, kv_version)
            self._gathered.append(part)
        part.token_ids.append(token_id)
        part.logprobs.append(logprob)
        if top is not None:
            part.top_logprobs.append(top)
        if self._at_once:
            self._at_once = self._eager
            self._ready.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._ready.set)

    def end(self, version: Version, finish: Finish, *, attested: tuple[Segment, ...] = ()) -> None:
        """Marks the request as finished; the finish goes with the last tokens that still wait."""
        if not self._gathered:
            self._gathered.append(_Gathered(version, version))
        self._gathered[-1].finish, self._gathered[-1].attested = finish, attested
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """Raises `error` to the caller after the tokens before it."""
        self._error = error
        self._ready.set()

    # --- For the caller ----------------------------------------------------------------------------------------------

    def __aiter__(self) -> ChunkStream:
        return self

    async def __anext__(self) -> Chunk:
        """Waits for a chunk, which the engine delivers, or for `fail`, whose error it raises."""
        if self._closed:
            raise self._error or StopAsyncIteration
        try:
            if self._on_open is not None:
                opened, self._on_open = self._on_open, None
                opened(self)
            await self._ready.wait()
            if not self._gathered and self._error is not None:
                raise self._error
        except BaseException:
            self.close()
            raise
        part = self._gathered.popleft()
        if part.finish is not None:
            self.close()
        elif not self._gathered:
            if self._error is None:
                self._ready.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        ids, logprobs, top = tuple(part.token_ids), tuple(part.logprobs), tuple(part.top_logprobs)
        return Chunk(ids, logprobs, part.version, part.kv_version, part.finish, top, part.attested)

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Ends the iteration; leaves no timer behind."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._on_close is not None:
            self._on_close()


class ChunkStreams:
    """An outlet that splits every step by request."""

    def __init__(self) -> None:
        self._streams: dict[int, ChunkStream] = {}

    def open(self, handle: int, stream: ChunkStream) -> None:
        """From here on `stream` gets what the request of this handle gets."""
        self._streams[handle] = stream

    def close(self, handle: int) -> bool:
        """Whether the request had not ended."""
        return self._streams.pop(handle, None) is not None

    def put(self, step: StepOutput) -> None:
        self.take(step.version, step.rows(), step.tops(), finishes=[(h, f) for h, _, f in step.finishes])
        for handle, _, error in step.failures:
            self.reject(handle, error)

    def take(
        self,
        version: Version,
        rows: Iterable[TokenRow],
        tops: Sequence[Top],
        *,
        finishes: Iterable[tuple[int, Finish]],
        attested: Sequence[tuple[int, tuple[Segment, ...]]] = (),
    ) -> None:
        """Gives each request what a step did for it. What is for requests that were closed meanwhile is dropped.

        `tops` has one entry for each row, or none where nobody asks for alternatives.
        """
        streams = self._streams
        for (handle, token, logprob, kv), top in zip(rows, tops or itertools.repeat(None), strict=False):
            if (stream := streams.get(handle)) is not None:
                stream.add(token, logprob, version=version, kv_version=kv, top=top)
        for handle, finish in finishes:
            if (stream := streams.pop(handle, None)) is not None:
                stream.end(version, finish, attested=dict(attested).get(handle, ()))

    def reject(self, handle: int, error: Exception) -> None:
        """Ends one request with an error; an unknown one has been closed meanwhile."""
        stream = self._streams.pop(handle, None)
        if stream is not None:
            stream.fail(error)

    def fail(self, error: Exception) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
