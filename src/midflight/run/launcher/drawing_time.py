"""Measures how long it takes to draw the tasks of datasets. It draws some of them, and counts the
work that this takes, not the time that passes.
"""

import time
from collections.abc import Callable, Sequence
from typing import cast

from midflight.config.sources import DATASET_SIZE, SourceSection, num_draws

DRAWING_SECONDS = 20.0
"""Processor time for which tasks are drawn. The time of all is estimated from those. Nothing is
refused for it.
"""
SAY_SECONDS = 1.0
"""Processor time between two words to the user."""
FEW = 200
"""The number of tasks of a dataset that are drawn instead, if all would take longer."""


class TakesLonger(Exception):
    """Not all tasks were drawn."""


class DrawingTime:
    """Measures a drawing, entry by entry. It counts from the first entry on: imports and
    preparation before that take their time once, however many tasks there are.
    """

    def __init__(
        self,
        sections: Sequence[SourceSection],
        *,
        seconds: float | None = None,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """After `seconds` of the clock it raises `TakesLonger`. The default is
        `DRAWING_SECONDS`.
        """
        self._total = sum(num_draws(section) for section in sections if section.dataset is not None)
        self._seconds = DRAWING_SECONDS if seconds is None else seconds
        self._say = say
        self._clock = clock
        self._number = 0
        self._began = 0.0
        self._now = 0.0
        self._said = 0.0

    def drawn(self) -> None:
        """Counts one more entry."""
        self._now = self._clock()
        if self._number == 0:
            self._began = self._said = self._now
        self._number += 1
        if self._now - self._said >= SAY_SECONDS:
            self._said = self._now
            self._say(f"draws tasks, {self._number:,} of about {self._total:,}")
        if self._now - self._began > self._seconds:
            raise TakesLonger

    @property
    def whole_seconds(self) -> float:
        """About how much processor time all tasks take."""
        drawn = max(self._number - 1, 1)  # the first is not measured: the clock begins with it
        return (self._now - self._began) * max(self._total, self._number) / drawn


def with_few(source: SourceSection) -> SourceSection:
    """The same dataset with fewer tasks; rows stay as they are."""
    if source.dataset is None:
        return source
    few = {
        "size": min(source.size or DATASET_SIZE, FEW),
        "heldout": min(cast(int, source.num_heldout), FEW // 8),
    }
    return source.model_copy(update=few)
