"""The streams that `handover.py` watches: when each of their tokens came, and the gaps between them."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise

from midflight.ports import Engine
from midflight.types import GenerateRequest, SamplingParams

PROMPT_TOKENS = 16
Window = tuple[float, float]
"""Beginning and end, on the clock of `time.perf_counter`."""


@asynccontextmanager
async def streaming(engine: Engine, num: int, *, max_tokens: int) -> AsyncGenerator[Streams]:
    """`num` answers under way. They are aborted at the end; one that ends by itself before is an error."""
    streams = Streams(num)
    async with asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(streams.read(engine, i, max_tokens=max_tokens)) for i in range(num)]
        yield streams
        for task in reading:
            task.cancel()


class Streams:
    def __init__(self, num: int) -> None:
        self._times: list[list[float]] = [[] for _ in range(num)]
        self._moved = asyncio.Event()

    async def read(self, engine: Engine, number: int, *, max_tokens: int) -> None:
        """Until cancelled."""
        prompt = tuple((7 * number + i) % 256 for i in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=max_tokens - PROMPT_TOKENS, ignore_eos=True, seed=number)
        async with aclosing(engine.generate(GenerateRequest(str(number), prompt, PROMPT_TOKENS, sampling))) as chunks:  # pyright: ignore
            async for _ in chunks:
                self._times[number].append(time.perf_counter())
                self._moved.set()
        raise RuntimeError("a stream ended before the handover was over: raise --context")

    async def each_has(self, more: int) -> None:
        """Waits until each stream has moved so many times more; ended by that, or by the end of a stream, which raises."""
        goals = [len(times) + more for times in self._times]
        while any(len(times) < goal for times, goal in zip(self._times, goals, strict=True)):
            self._moved.clear()
            await self._moved.wait()

    def normal_gap(self, without: Window) -> float:
        """Median of the gaps that do not touch the window."""
        return statistics.median(b - a for times in self._times for a, b in pairwise(times) if b < without[0] or a > without[1])

    def largest_gap(self, window: Window) -> float:
        """Of each stream the largest gap that touches the window; their median."""
        return statistics.median(max(b - a for a, b in pairwise(times) if b >= window[0] and a <= window[1]) for times in self._times)
