"""A teacher without a model: its scores follow from token and position alone, and it fails when it is told to."""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np

from midflight.types import Float32, Int32


class ScriptedScorer:
    """Implements `Scorer`. An answer takes `seconds`."""

    def __init__(self, *, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.num_asked = 0
        self._failures: deque[Exception] = deque()

    def fail_next(self, error: Exception, *, times: int = 1) -> None:
        """The next answers are this error."""
        self._failures.extend([error] * times)

    async def score(self, token_ids: Int32, row_offsets: Int32, *, temperature: float) -> Float32:
        """Waits for its seconds to pass."""
        self.num_asked += 1
        await asyncio.sleep(self.seconds)
        if self._failures:
            raise self._failures.popleft()
        return self.scores(token_ids, row_offsets, temperature=temperature)

    @staticmethod
    def scores(token_ids: Int32, row_offsets: Int32, *, temperature: float) -> Float32:
        positions = np.arange(len(token_ids)) - np.repeat(row_offsets[:-1], np.diff(row_offsets))
        return np.where(positions == 0, 0.0, -(1 + (token_ids + positions) % 7) / temperature).astype(np.float32)
