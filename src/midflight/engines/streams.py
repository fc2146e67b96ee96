"""The tokens of an engine's steps, as streams of chunks.

`StepOutput` is what a step of an engine gives out, before the wire. `ChunkStreams` parts it into a
stream for each request, in the process of the caller; behind the wire that is the gateway's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from midflight.errors import RequestRejected
from midflight.types import Chunk, Finish, KeyRuns, Segment, Version

Ints = NDArray[np.int64]
PATIENCE_SECONDS = 0.05
"""The time that tokens may gather for a caller that is not eager. If the engine dies, the caller
loses no more than that.
"""


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """The output of an engine after a step: its tokens, as arrays of equal length, and the ends of
    requests.

    All tokens were sampled under `version`, and those of one request are in their order. If a
    request ends with a token, its end is in the same output as the token.
    """

    version: Version
    handles: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    token_ids: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    logprobs: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    kv_versions: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    top_ids: Ints = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    """[R, W] the likeliest ids at each token's place, likeliest first, filled up with -1. W is 0 if
    no request asks.
    """
    top_logprobs: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    """[R, W]"""
    kept: tuple[bytes | None, ...] = ()
    """[R] the ids that truncation kept for each token, `None` for a request that did not ask. Empty
    if no request asks.
    """
    outlets: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    finishes: tuple[tuple[int, int, Finish], ...] = ()
    """(handle, outlet, how it ended)"""
    failures: tuple[tuple[int, int, RequestRejected], ...] = ()
    """(handle, outlet, reason of the failure). These requests ended too."""
    experts: tuple[tuple[int, bytes], ...] = ()
    """(handle, `Chunk.experts`) of requests among `finishes`, if the engine records them."""
    key_runs: tuple[tuple[int, KeyRuns], ...] = ()
    """(handle, `Chunk.key_runs`) of requests that have them. Their first token here is that of the
    chunk.
    """
    touched: frozenset[int] = frozenset()
    """Outlets with a request in the step, even if the request got no token yet."""
    started: float = 0.0
    ended: float = 0.0
    num_running: int = 0

    def for_outlet(self, outlet: int) -> StepOutput:
        """The part of one outlet of several."""
        rows = np.flatnonzero(self.outlets == outlet)
        top_ids = self.top_ids[rows] if self.top_ids.size else self.top_ids
        top_logprobs = self.top_logprobs[rows] if self.top_logprobs.size else self.top_logprobs
        width = int((top_ids >= 0).sum(1).max(initial=0))
        kept: tuple[bytes | None, ...] = ()
        if self.kept:
            kept = tuple([self.kept[row] for row in rows.tolist()])
        finishes = tuple([finish for finish in self.finishes if finish[1] == outlet])
        finished = {handle for handle, _, _ in finishes}
        handles = self.handles[rows]
        return StepOutput(
            version=self.version,
            handles=handles,
            token_ids=self.token_ids[rows],
            logprobs=self.logprobs[rows],
            kv_versions=self.kv_versions[rows],
            top_ids=top_ids[:, :width],
            top_logprobs=top_logprobs[:, :width],
            kept=kept,
            outlets=self.outlets[rows],
            finishes=finishes,
            experts=tuple([record for record in self.experts if record[0] in finished]),
            key_runs=tuple([known for known in self.key_runs if known[0] in handles]),
            failures=tuple([failure for failure in self.failures if failure[1] == outlet]),
            touched=frozenset({outlet}),
            started=self.started,
            ended=self.ended,
            num_running=self.num_running,
        )

    def rows(self) -> list[TokenRow]:
        """The tokens, one row for each."""
        columns = zip(
            self.handles.tolist(),
            self.token_ids.tolist(),
            self.logprobs.tolist(),
            self.kv_versions.tolist(),
            strict=True,
        )
        return list(columns)

    def tops(self) -> list[Top]:
        """The alternatives of each row. Empty if no request asks. A row that asked has at least
        one, the sampled token.
        """
        if not self.top_ids.size:
            return []
        found: list[Top] = []
        for ids, logprobs in zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True):
            pairs = zip(ids, logprobs, strict=True)
            known = tuple([pair for pair in pairs if pair[0] >= 0])
            found.append(known or None)
        return found


Top: TypeAlias = "tuple[tuple[int, float], ...] | None"
"""The likeliest (id, log-probability) at a token's position; `None` for a request that did not
ask.
"""
TokenRow: TypeAlias = tuple[int, int, float, int]
"""One token: the handle of its request, the id, its log-probability, the version of the oldest
key.
"""


class Outlet(Protocol):
    """The receiver of the tokens of some requests. It is called on the event loop and never waits."""

    def put(self, step: StepOutput) -> None: ...
    def fail(self, error: Exception) -> None:
        """Says that the engine died, so that nothing more will come."""


class _PendingTokens(msgspec.Struct):
    """Tokens of one version that wait for the caller."""

    version: Version
    kv_version: Version
    token_ids: list[int] = []
    logprobs: list[float] = []
    top_logprobs: list[tuple[tuple[int, float], ...]] = []
    kept: list[bytes] = []
    finish: Finish | None = None
    attested: tuple[Segment, ...] = ()
    experts: bytes = b""
    key_runs: KeyRuns = ()


class ChunkStream:
    """The chunks of one request, as an iterator that ends after a chunk with `finish`. It is
    bounded by the request's own `max_tokens`.

    Tokens that come while the caller does not read become one chunk. An eager caller is woken by
    each token. Any other caller is woken by the first token, by the last, and in between when
    tokens have gathered for `PATIENCE_SECONDS`.
    """

    def __init__(
        self,
        *,
        eager: bool,
        on_open: Callable[[ChunkStream], None] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """`on_open` is called when the stream is first read, `on_close` once, when it is read no
        more.
        """
        self._gathered: deque[_PendingTokens] = deque()
        self._error: Exception | None = None
        self._is_ready = False
        """True if tokens or an error wait for the caller."""
        self._waiter: asyncio.Future[bool] | None = None
        """The future that the caller waits for. There is only one caller, and one future a token
        costs half as much as an `asyncio.Event`. Its result is true if the caller has had enough.
        """
        self._take: Callable[[Chunk], bool] | None = None
        """The function of a caller that has the chunks brought to it."""
        self._eager = eager
        self._at_once = True
        self._timer: asyncio.TimerHandle | None = None
        self._on_open = on_open
        self._on_close = on_close
        self.is_closed = False
        """True if it is read no more, and the engine has been told."""

    # --- For the side that brings the tokens ------------------------------------------------------

    def begin(self, version: Version, key_runs: KeyRuns) -> None:
        """Begins a chunk that says which keys its first token attended to. The token follows."""
        oldest = min(made_by for made_by, _ in key_runs)
        self._gathered.append(_PendingTokens(version, oldest, key_runs=key_runs))

    def add(
        self,
        token_id: int,
        logprob: float,
        *,
        version: Version,
        kv_version: Version,
        top: Top = None,
        kept: bytes | None = None,
    ) -> _PendingTokens:
        """Gathers a token and returns the chunk-to-be that it is in, to which further tokens of the
        same message may be added.
        """
        part = self._gathered[-1] if self._gathered else None
        if part is None or part.version != version or part.kv_version != kv_version:
            part = _PendingTokens(version, kv_version)
            self._gathered.append(part)
        part.token_ids.append(token_id)
        part.logprobs.append(logprob)
        if top is not None:
            part.top_logprobs.append(top)
        if kept is not None:
            part.kept.append(kept)
        if self._at_once:
            self._at_once = self._eager
            self._wake()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._wake)
        return part

    def end(
        self,
        version: Version,
        finish: Finish,
        *,
        attested: tuple[Segment, ...] = (),
        experts: bytes = b"",
    ) -> None:
        """Marks the request as finished. The finish goes with the last tokens that still wait."""
        if not self._gathered:
            self._gathered.append(_PendingTokens(version, version))
        last = self._gathered[-1]
        last.finish = finish
        last.attested = attested
        last.experts = experts
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raises `error` to the caller after the tokens before it."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        was_ready = self._is_ready
        self._is_ready = True
        if self._take is not None:
            if not was_ready:  # once for all that one message brings
                asyncio.get_running_loop().call_soon(self._bring)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(False)

    def _bring(self) -> None:
        """Gives the caller the tokens that have gathered. The wait in `each` ends with the last
        chunk, or with an error that `take` raises.
        """
        take = self._take
        waiter = self._waiter
        if take is None or waiter is None or waiter.done():
            return
        self._is_ready = False
        enough = False
        try:
            while self._gathered and not enough:
                chunk = self._next()
                enough = take(chunk) or chunk.finish is not None
        except Exception as error:
            self._error = error
        if enough or self._error is not None:
            waiter.set_result(enough)

    # --- For the caller ---------------------------------------------------------------------------

    def __aiter__(self) -> ChunkStream:
        return self

    async def __anext__(self) -> Chunk:
        """Waits for a chunk, which the engine delivers, or for `fail`, and raises its error."""
        if self.is_closed:
            raise self._error or StopAsyncIteration
        try:
            if self._on_open is not None:
                opened = self._on_open
                self._on_open = None
                opened(self)
            if not self._is_ready:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if not self._gathered and self._error is not None:
                raise self._error
        except BaseException:
            self.close()
            raise
        self._is_ready = len(self._gathered) > 1 or self._error is not None
        return self._next()

    async def each(self, take: Callable[[Chunk], bool]) -> None:
        """Calls `take` with each chunk as it comes, without a switch of tasks, until `take` returns
        true or a chunk has `finish`. The chunks are those of the iteration. Waits for that end, or
        for `fail`, and raises its error. An error that `take` raises is raised too.
        """
        try:
            self._waiter = asyncio.get_running_loop().create_future()
            self._take = take
            if self._on_open is not None:
                self._on_open(self)
            self._bring()
            if not await self._waiter and self._error is not None:
                raise self._error
        finally:
            self._take = None
            self.close()

    def _next(self) -> Chunk:
        """Returns a chunk of the oldest gathered tokens, which are all of one version."""
        part = self._gathered.popleft()
        if part.finish is not None:
            self.close()
        elif self._timer is not None and not self._gathered:
            self._timer.cancel()
            self._timer = None
        # Positional, because this runs for every token of an eager caller.
        return Chunk(
            tuple(part.token_ids),
            tuple(part.logprobs),
            part.version,
            part.kv_version,
            part.finish,
            tuple(part.top_logprobs),
            part.attested,
            tuple(part.kept),
            part.experts,
            part.key_runs,
        )

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Ends the iteration; leaves no timer behind."""
        if self.is_closed:
            return
        self.is_closed = True
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
        """Gives `stream` everything that the request of this handle gets from here on."""
        self._streams[handle] = stream

    def close(self, handle: int) -> bool:
        """Forgets the stream. Returns whether the request had not ended."""
        return self._streams.pop(handle, None) is not None

    def put(self, step: StepOutput) -> None:
        finishes = [(handle, finish) for handle, _, finish in step.finishes]
        self.take(
            step.version,
            step.rows(),
            step.tops(),
            step.kept,
            finishes=finishes,
            experts=step.experts,
            key_runs=step.key_runs,
        )
        for handle, _, error in step.failures:
            self.reject(handle, error)

    def take(
        self,
        version: Version,
        rows: Iterable[TokenRow],
        tops: Sequence[Top],
        kept: Sequence[bytes | None] = (),
        *,
        finishes: Iterable[tuple[int, Finish]],
        attested: Sequence[tuple[int, tuple[Segment, ...]]] = (),
        experts: Sequence[tuple[int, bytes]] = (),
        key_runs: Sequence[tuple[int, KeyRuns]] = (),
    ) -> None:
        """Gives each request its tokens and its end from one step. `tops` and `kept` have an entry
        for each row or none at all. Tokens for requests that were closed meanwhile are dropped.
        """
        streams = self._streams
        for handle, runs in key_runs:
            if handle in streams:
                streams[handle].begin(version, runs)
        nothing = itertools.repeat(None)
        last = -1
        part = None
        for (handle, token, logprob, kv), top, left in zip(
            rows, tops or nothing, kept or nothing, strict=False
        ):
            is_plain = top is None and left is None
            if is_plain and handle == last and part is not None and part.kv_version == kv:
                part.token_ids.append(token)
                part.logprobs.append(logprob)
                continue
            stream = streams.get(handle)
            if stream is None:
                continue
            last = handle
            part = stream.add(token, logprob, version=version, kv_version=kv, top=top, kept=left)
        attested_by = dict(attested)
        experts_by = dict(experts)
        for handle, finish in finishes:
            stream = streams.pop(handle, None)
            if stream is not None:
                stream.end(
                    version,
                    finish,
                    attested=attested_by.get(handle, ()),
                    experts=experts_by.get(handle, b""),
                )

    def reject(self, handle: int, error: Exception) -> None:
        """Ends one request with an error. An unknown one has been closed meanwhile."""
        stream = self._streams.pop(handle, None)
        if stream is not None:
            stream.fail(error)

    def fail(self, error: Exception) -> None:
        streams = self._streams
        self._streams = {}
        for stream in streams.values():
            stream.fail(error)
