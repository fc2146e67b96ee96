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
    """`num` answers under way. They are aborted at the end; one that ends before is asked again."""
    streams = Streams(num)
    async with asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(streams.read(engine, i, max_tokens=max_tokens)) for i in range(num)]
        yield streams
        for task in reading:
            task.cancel()


class Streams:
    """`answers[stream]` are the times of the tokens of its answers; between answers there is no gap."""

    def __init__(self, num: int) -> None:
        self._answers: list[list[list[float]]] = [[] for _ in range(num)]
        self._moved = asyncio.Event()

    async def read(self, engine: Engine, number: int, *, max_tokens: int) -> None:
        """One answer after the other, until cancelled."""
        prompt = tuple((7 * number + i) % 256 for i in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=max_tokens - PROMPT_TOKENS, ignore_eos=True, seed=number)
        while True:
            self._answers[number].append([])
            async with aclosing(engine.generate(GenerateRequest(str(number), prompt, PROMPT_TOKENS, sampling))) as chunks:  # pyright: ignore
                async for _ in chunks:
                    self._answers[number][-1].append(time.perf_counter())
                    self._moved.set()

    async def each_has(self, more: int) -> None:
        """Waits until each stream has moved so many times more; ended by that, or by an error of a stream, which raises."""
        goals = [count + more for count in self._counts()]
        while any(count < goal for count, goal in zip(self._counts(), goals, strict=True)):
            self._moved.clear()
            await self._moved.wait()

    def normal_gap(self, without: Window) -> float:
        """Median of the gaps that do not touch the window."""
        return statistics.median(b - a for gaps in self._gaps() for a, b in gaps if b < without[0] or a > without[1])

    def largest_gap(self, window: Window) -> float:
        """Of each stream the largest gap that touches the window; their median."""
        largest = (max((b - a for a, b in gaps if b >= window[0] and a <= window[1]), default=None) for gaps in self._gaps())
        return statistics.median(gap for gap in largest if gap is not None)

    def _counts(self) -> list[int]:
        return [sum(map(len, answers)) for answers in self._answers]

    def _gaps(self) -> list[list[Window]]:
        return [[gap for times in answers for gap in pairwise(times)] for answers in self._answers]
