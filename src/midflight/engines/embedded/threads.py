"""How many threads a step takes: measured while steps are made, because what a thread costs depends
on who else uses its core.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch

_WORK_OF_A_THREAD = 4e7
"""Products (parameters times tokens) of a step from which on one more thread usually saves more
than waiting for it costs.
"""
_TRIAL = 4
"""Steps in a row that try another number of threads: the first of them also starts threads."""
_PAUSES = 32, 1024
"""Steps from one trial to the next: after one that paid, and at most, where none does."""


class StepThreads:
    """Steps of each size, a power of two of products, take the number of threads that makes them
    fastest.

    A second thread halves the products at best. On a core that others use too, every product waits
    until it has its turn, and a step can take ten times as long as with one. So now and then a few
    steps take twice or half as many, less often the longer that does not pay.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    @contextmanager
    def of(self, work: float) -> Generator[None]:
        """Meanwhile as many threads compute as are best for so many products, of those that there
        are.
        """
        most = torch.get_num_threads()
        if most == 1:
            yield
            return
        bits = int(work).bit_length()
        if (size := self._sizes.get(bits)) is None:
            size = self._sizes[bits] = _Size(most, usual=int(work / _WORK_OF_A_THREAD))
        torch.set_num_threads(size.number)
        began = time.monotonic()
        try:
            yield
        finally:
            torch.set_num_threads(most)
        size.took((time.monotonic() - began) / work)


class _Size:
    """`number` is what the next step takes: as usual, or in a trial of its neighbour among 1, 2, 4,
    ... and all.
    """

    def __init__(self, most: int, *, usual: int) -> None:
        self._numbers = [1 << n for n in range(most.bit_length()) if 1 << n < most] + [most]
        self._usual = max(n for n in self._numbers if n <= max(1, usual))
        self._seconds = 0.0
        """That a product takes with the usual number: a mean that forgets."""
        self._tried: list[float] = []
        self._up = True
        self._pause = self._left = _PAUSES[0]
        self.number = self._usual

    def took(self, seconds: float) -> None:
        """Each product of the last step."""
        if self.number == self._usual:
            self._seconds += (seconds - self._seconds) / (4 if self._seconds else 1)
            self._left -= 1
            if not self._left:
                self.number = self._neighbour()
                self._up = not self._up
        else:
            self._tried.append(seconds)
            if len(self._tried) == _TRIAL:
                self._judge(sum(self._tried) / _TRIAL)

    def _neighbour(self) -> int:
        at = self._numbers.index(self._usual)
        return (
            self._numbers[at + 1]
            if at == 0 or (self._up and at + 1 < len(self._numbers))
            else self._numbers[at - 1]
        )

    def _judge(self, seconds: float) -> None:
        pays = seconds < self._seconds
        self._pause = self._left = _PAUSES[0] if pays else min(2 * self._pause, _PAUSES[1])
        if pays:
            self._usual = self.number
            self._seconds = seconds
        self.number = self._usual
        self._tried.clear()
