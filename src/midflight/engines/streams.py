"""What a step gives out, and its tokens as chunks of single requests for the callers inside the
process.

And what a request must satisfy before it enters the engine: a bad one is refused alone, and the
engine goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from midflight.errors import ContextExceeded, RequestRejected
from midflight.types import (
    Chunk,
    Feature,
    Finish,
    GenerateRequest,
    Int32,
    SamplingParams,
    Segment,
    Version,
)
from midflight.types.generation import MAX_BIASES, RANGED, ranged_values


def check_request(request: GenerateRequest, *, vocab_size: int, max_context: int) -> None:
    """Raises `RequestRejected` or `ContextExceeded`, naming the value and the remedy."""
    _check_ids("input_ids", request.input_ids, vocab_size)
    _check_ids("stop_token_ids", request.sampling.stop_token_ids, vocab_size)
    _check_ids("logit_bias", tuple(i for i, _ in request.sampling.logit_bias), vocab_size)
    check_sampling(request.sampling)
    length = len(request.input_ids)
    prompt = request.num_prompt_tokens
    if length == 0:
        raise RequestRejected(
            "generating: the prompt is empty. Send at least one token.", param="input_ids"
        )
    if not 1 <= prompt <= length:
        raise RequestRejected(
            (
                f"generating: num_prompt_tokens is {prompt} but input_ids has {length} tokens. "
                f"Send a number from 1 to {length}."
            ),
            param="num_prompt_tokens",
        )
    if length > max_context or prompt >= max_context:
        raise ContextExceeded(
            (
                f"generating: {length} input tokens leave no room in a context of {max_context}. "
                f"Send at most {max_context - 1} tokens."
            ),
            param="input_ids",
        )


def check_rows(
    token_ids: Int32, row_offsets: Int32, *, temperature: float, vocab_size: int, max_context: int
) -> None:
    """Checks rows to score. Raises `RequestRejected` or `ContextExceeded`, naming the value and the
    remedy.
    """
    _require(
        math.isfinite(temperature) and temperature > 0,
        "temperature",
        temperature,
        "a finite number above 0",
    )
    spans = len(row_offsets) > 1 and row_offsets[0] == 0 and row_offsets[-1] == len(token_ids)
    lengths = np.diff(row_offsets)
    if not spans or lengths.min() < 1:
        raise RequestRejected(
            (
                "scoring: the rows are empty, or do not span the tokens. Send at least one row, "
                "each with a token."
            ),
            param="rows",
        )
    if (longest := int(lengths.max())) > max_context:
        raise ContextExceeded(
            f"scoring: a row has {longest} tokens, the context {max_context}. Send shorter rows.",
            param="rows",
        )
    bad = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(bad):
        raise RequestRejected(
            (
                f"scoring: token id {bad[0]} is outside the vocabulary. Send ids from 0 to "
                f"{vocab_size - 1}."
            ),
            param="rows",
        )


def check_features(sampling: SamplingParams, features: frozenset[Feature], *, engine: str) -> None:
    """`RequestRejected` names a way of sampling that the engine has not: to ignore it would sample
    from another distribution.
    """
    if lacking := sorted(sampling.features - features):
        raise RequestRejected(
            f"generating on {engine}: it has no {lacking[0]}. Leave that out.", param=lacking[0]
        )


def check_sampling(sampling: SamplingParams) -> None:
    """Every limit is checked here once, so that the sampler may trust its numbers."""
    for (p, bounds), value in zip(RANGED, ranged_values(sampling), strict=True):
        if value != p.default and (value is None or not bounds.holds(value)):
            raise _refused(p.name, value, f"a number {bounds}")
    s = sampling
    _require(
        s.min_tokens <= s.max_tokens,
        "min_tokens",
        s.min_tokens,
        f"an integer from 0 to max_tokens ({s.max_tokens})",
    )
    _require(
        len(s.logit_bias) <= MAX_BIASES,
        "logit_bias",
        f"{len(s.logit_bias)} ids",
        f"at most {MAX_BIASES} ids",
    )
    for token_id, bias in s.logit_bias:
        _require(
            -100 <= bias <= 100,
            "logit_bias",
            f"{bias} for token {token_id}",
            "numbers from -100 to 100",
        )


def _require(holds: bool, param: str, value: object, expected: str) -> None:
    if not holds:
        raise _refused(param, value, expected)


def _refused(param: str, value: object, expected: str) -> RequestRejected:
    return RequestRejected(f"sampling: {param} is {value!r}. Send {expected}.", param=param)


def _check_ids(param: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestRejected(
            (
                f"generating: token id {bad} in {param} is outside the vocabulary. Send ids from 0 "
                f"to {vocab_size - 1}."
            ),
            param=param,
        )


Ints = NDArray[np.int64]
PATIENCE_SECONDS = 0.05
"""How long tokens may gather for a caller that is not eager. If the engine dies, the caller loses
no more than that.
"""


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """The tokens of a step, as arrays of equal length, those of one request in their order, and the
    requests that ended.

    All tokens were sampled under `version`. A request that ends with a token has it in the same
    output.
    """

    version: Version
    handles: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    token_ids: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    logprobs: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    kv_versions: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    top_ids: Ints = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    """[R, W] the likeliest ids at each token's place, likeliest first, filled up with -1; W is 0
    where nobody asks.
    """
    top_logprobs: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    """[R, W]"""
    kept: tuple[bytes | None, ...] = ()
    """[R] what truncation kept for each token, `None` for a request that did not ask; empty where
    nobody asks.
    """
    outlets: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    finishes: tuple[tuple[int, int, Finish], ...] = ()
    """(handle, outlet, how it ended)"""
    failures: tuple[tuple[int, int, RequestRejected], ...] = ()
    """(handle, outlet, why it could not go on): these requests ended too."""
    experts: tuple[tuple[int, bytes], ...] = ()
    """Of requests among `finishes`: handle, and `Chunk.experts` where the engine records them"""
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
            top_logprobs=(self.top_logprobs[rows] if self.top_logprobs.size else self.top_logprobs)[
                :, :width
            ],
            kept=tuple([self.kept[row] for row in rows.tolist()]) if self.kept else (),
            outlets=self.outlets[rows],
            finishes=tuple(f for f in self.finishes if f[1] == outlet),
            experts=tuple(
                e
                for e in self.experts
                if e[0] in {handle for handle, of, _ in self.finishes if of == outlet}
            ),
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
        """The alternatives of each row; empty where nobody asks. A row that asked has one at least,
        the sampled token.
        """
        if not self.top_ids.size:
            return []
        pairs = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        rows = [tuple((i, p) for i, p in zip(*row, strict=True) if i >= 0) for row in pairs]
        return [row or None for row in rows]


Top: TypeAlias = "tuple[tuple[int, float], ...] | None"
"""The likeliest (id, log-probability) at a token's position; `None` for a request that did not
ask.
"""
TokenRow: TypeAlias = tuple[int, int, float, int]
"""One token: the handle of its request, the id, its log-probability, the version of the oldest
key.
"""


class Outlet(Protocol):
    """Where the tokens of some requests go. Called on the event loop; never waits."""

    def put(self, step: StepOutput) -> None: ...
    def fail(self, error: Exception) -> None:
        """The engine died: nothing more will come."""


class _Gathered(msgspec.Struct):
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


class ChunkStream:
    """The chunks of one request, as an iterator that ends after a chunk with `finish`. Bounded by
    the request's own `max_tokens`.

    Tokens that come while the caller does not read become one chunk. An eager caller is woken by
    each, another by the first, the last, and in between when tokens have gathered for
    `PATIENCE_SECONDS`.
    """

    def __init__(
        self,
        *,
        eager: bool,
        on_open: Callable[[ChunkStream], None] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """`on_open` is called when the stream is first read; `on_close` once, when it is read no
        more.
        """
        self._gathered: deque[_Gathered] = deque()
        self._error: Exception | None = None
        self._is_ready = False
        """Only while tokens or an error wait for the caller."""
        self._waiter: asyncio.Future[bool] | None = None
        """Of the caller, who waits alone: one future a token costs half of what an `asyncio.Event`
        does. True: it has had enough.
        """
        self._take: Callable[[Chunk], bool] | None = None
        """Of a caller who has the chunks brought."""
        self._eager = eager
        self._at_once = True
        self._timer: asyncio.TimerHandle | None = None
        self._on_open = on_open
        self._on_close = on_close
        self.is_closed = False
        """Whether it is read no more, and the engine has been told."""

    # --- For the side that brings the tokens ------------------------------------------------------

    def add(
        self,
        token_id: int,
        logprob: float,
        *,
        version: Version,
        kv_version: Version,
        top: Top = None,
        kept: bytes | None = None,
    ) -> _Gathered:
        """What it is gathered in: further tokens of the same message may be put there."""
        part = self._gathered[-1] if self._gathered else None
        if part is None or part.version != version or part.kv_version != kv_version:
            part = _Gathered(version, kv_version)
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
        """Marks the request as finished; the finish goes with the last tokens that still wait."""
        if not self._gathered:
            self._gathered.append(_Gathered(version, version))
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
        """Gives the caller what has gathered; with the end of it, or with what `take` raises, the
        wait in `each` ends.
        """
        take = self._take
        waiter = self._waiter
        if take is None or waiter is None or waiter.done():
            return
        self._is_ready = enough = False
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
        """Waits for a chunk, which the engine delivers, or for `fail`, whose error it raises."""
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
        """As the iteration, but `take` is called with each chunk as it comes, without a switch of
        tasks, until it says that it is enough or a chunk has `finish`. Waits for that, or for
        `fail`, whose error it raises, as it does what `take` raises."""
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
        """What has gathered of one version."""
        part = self._gathered.popleft()
        if part.finish is not None:
            self.close()
        elif self._timer is not None and not self._gathered:
            self._timer.cancel()
            self._timer = None
        ids = tuple(part.token_ids)
        logprobs = tuple(part.logprobs)
        tops = tuple(part.top_logprobs)
        kept = tuple(part.kept)
        return Chunk(
            ids,
            logprobs,
            part.version,
            part.kv_version,
            part.finish,
            tops,
            part.attested,
            kept,
            part.experts,
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
        """From here on `stream` gets what the request of this handle gets."""
        self._streams[handle] = stream

    def close(self, handle: int) -> bool:
        """Whether the request had not ended."""
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
    ) -> None:
        """Gives each request what a step did for it, `tops` and `kept` for each row or for none.
        What is for requests that were closed meanwhile is dropped."""
        streams = self._streams
        each = zip(
            rows, tops or itertools.repeat(None), kept or itertools.repeat(None), strict=False
        )
        last = -1
        part = None
        for (handle, token, logprob, kv), top, left in each:
            if (
                handle == last
                and part is not None
                and part.kv_version == kv
                and top is None
                and left is None
            ):
                part.token_ids.append(token)
                part.logprobs.append(logprob)
            elif (stream := streams.get(handle)) is not None:
                last = handle
                part = stream.add(
                    token, logprob, version=version, kv_version=kv, top=top, kept=left
                )
        for handle, finish in finishes:
            if (stream := streams.pop(handle, None)) is not None:
                stream.end(
                    version,
                    finish,
                    attested=dict(attested).get(handle, ()),
                    experts=dict(experts).get(handle, b""),
                )

    def reject(self, handle: int, error: Exception) -> None:
        """Ends one request with an error; an unknown one has been closed meanwhile."""
        if (stream := self._streams.pop(handle, None)) is not None:
            stream.fail(error)

    def fail(self, error: Exception) -> None:
        streams = self._streams
        self._streams = {}
        for stream in streams.values():
            stream.fail(error)
