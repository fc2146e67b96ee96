"""Step outputs as chunks of single requests, for the callers inside the process."""

from __future__ import annotations

import asyncio
from collections import deque

from midflight.engines.output import StepOutput
from midflight.types import Chunk, Finish, Version


class ChunkStream:
    """The chunks of one request. Bounded by the request's own `max_tokens`."""

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._arrived.set()

    async def next(self) -> Chunk:
        """Waits for a chunk, which the decode thread delivers, or for the engine's end, which raises `EngineUnavailable`."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        return self._chunks.popleft()


class ChunkStreams:
    """An outlet that splits every step into one chunk per request."""

    def __init__(self) -> None:
        self._streams: dict[int, ChunkStream] = {}

    def open(self, handle: int) -> ChunkStream:
        stream = self._streams[handle] = ChunkStream()
        return stream

    def close(self, handle: int) -> bool:
        """Whether the request had not ended."""
        return self._streams.pop(handle, None) is not None

    def put(self, step: StepOutput) -> None:
        finishes = {handle: finish for handle, _, finish in step.finishes}
        for handle, chunk in step_chunks(step, finishes):
            stream = self._streams.get(handle) if chunk.finish is None else self._streams.pop(handle, None)
            if stream is not None:
                stream.put(chunk)
        for handle, _, error in step.failures:
            self.reject(handle, error)

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
    columns = (step.handles, step.token_ids, step.logprobs, step.kv_versions)
    rows = zip(*(column.tolist() for column in columns), _likeliest(step), strict=True)
    chunks = [(h, Chunk((token,), (logprob,), step.version, kv, finishes.pop(h, None), top)) for h, token, logprob, kv, top in rows]
    return chunks + [(h, empty_chunk(step.version, finish)) for h, finish in finishes.items()]


def _likeliest(step: StepOutput) -> list[tuple[tuple[tuple[int, float], ...], ...]]:
    """What `Chunk.top_logprobs` is for each row. A row that asked has one alternative at least, the sampled token."""
    if not step.top_ids.size:
        return [()] * len(step.handles)
    pairs = zip(step.top_ids.tolist(), step.top_logprobs.tolist(), strict=True)
    rows = [tuple((i, p) for i, p in zip(*row, strict=True) if i >= 0) for row in pairs]
    return [(row,) if row else () for row in rows]


def empty_chunk(version: Version, finish: Finish) -> Chunk:
    return Chunk(token_ids=(), logprobs=(), version=version, kv_version=version, finish=finish)
