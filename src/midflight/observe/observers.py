"""Several observers as one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from midflight.types.facts import Fact, Record

_log = logging.getLogger(__name__)


class Observers:
    """Each applies every fact, in order. An observer that fails is logged once, and hurts neither the run nor the others."""

    def __init__(self, observers: Sequence[Record]) -> None:
        self._observers = tuple(observers)
        self._reported: set[int] = set()

    def apply(self, fact: Fact) -> None:
        for number, observe in enumerate(self._observers):
            try:
                observe(fact)
            except Exception:
                if number not in self._reported:
                    self._reported.add(number)
                    _log.exception("an observer (%s) failed on %s; the run goes on, later failures of it are not logged", observe, fact)
