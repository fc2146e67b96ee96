"""Step outputs as chunks of single requests, for the callers inside the process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from midflight.engines.output import StepOutput, TokenRow, Top
from midflight.types import Chunk, Finish, GenerateRequest, Segment, Version

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
