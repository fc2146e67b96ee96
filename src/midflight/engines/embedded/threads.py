"""The number of threads of a step. It is measured while steps are made, because the cost of a
thread depends on what else uses its core.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch

_WORK_OF_A_THREAD = 4e7
"""Products (parameters times tokens) of a step above which one more thread usually saves more time
than waiting for it costs.
"""
_TRIAL = 4
"""Steps in a row that try another number of threads. The first of them also starts threads."""
_FIRST_PAUSE = 32
"""Steps from one trial to the next, at first and after a trial that paid."""
_LONGEST_PAUSE = 1024
"""Steps from one trial to the next, at most: they double with each trial that does not pay."""


class StepThreads:
    """Chooses the fastest number of threads for steps of each size, where a size is a power of two
    of products.

    A second thread halves the time of the products at best. On a core that other programs use too,
    every product waits for its turn, and a step can take ten times as long as with one thread. So
    now and then a few steps try twice or half as many threads. The trials become rarer while they
    do not pay.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    @contextmanager
    def of(self, work: float) -> Generator[None]:
        """Inside, torch computes with as many of its threads as are best for so many products."""
        most = torch.get_num_threads()
        if most == 1:
            yield
            return
        bits = int(work).bit_length()
        size = self._sizes.get(bits)
        if size is None:
            size = _Size(most, usual=int(work / _WORK_OF_A_THREAD))
            self._sizes[bits] = size
        torch.set_num_threads(size.number)
        began = time.monotonic()
        try:
            yield
        finally:
            torch.set_num_threads(most)
        size.took((time.monotonic() - began) / work)


class _Size:
    """The number of threads for steps of one size. `number` is that of the next step: the usual
    number, or in a trial its neighbour among 1, 2, 4, ... and all.
    """

    def __init__(self, most: int, *, usual: int) -> None:
        self._numbers = [1 << n for n in range(most.bit_length()) if 1 << n < most] + [most]
        self._usual = max(n for n in self._numbers if n <= max(1, usual))
        self._seconds = 0.0
        """Seconds that a product takes with the usual number. It is a moving mean."""
        self._tried: list[float] = []
        self._up = True
        self._pause = _FIRST_PAUSE
        self._left = _FIRST_PAUSE
        self.number = self._usual

    def took(self, seconds: float) -> None:
        """Takes note of the seconds of each product of the last step."""
        if self.number != self._usual:
            self._tried.append(seconds)
            if len(self._tried) == _TRIAL:
                self._judge(sum(self._tried) / _TRIAL)
            return
        weight = 4 if self._seconds else 1
        self._seconds += (seconds - self._seconds) / weight
        self._left -= 1
        if not self._left:
            self.number = self._neighbour()
            self._up = not self._up

    def _neighbour(self) -> int:
        at = self._numbers.index(self._usual)
        may_go_up = self._up and at + 1 < len(self._numbers)
        if at == 0 or may_go_up:
            return self._numbers[at + 1]
        return self._numbers[at - 1]

    def _judge(self, seconds: float) -> None:
        """Ends a trial, in which a product took so many seconds."""
        if seconds < self._seconds:
            self._pause = _FIRST_PAUSE
            self._usual = self.number
            self._seconds = seconds
        else:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._left = self._pause
        self.number = self._usual
        self._tried.clear()
