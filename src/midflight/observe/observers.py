"""Observers that keep no numbers: one that ignores, one that copies to several, one that remembers, and one to extend."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from midflight.observe.events import AnyEvent, Event, Relay, deliver
from midflight.ports import Observer

_log = logging.getLogger(__name__)


class Silent(Relay):
    """Does nothing."""

    def __init__(self) -> None:
        super().__init__(_ignore)


def _ignore(event: Event) -> None:
    del event


class Recorder(Relay):
    """Remembers every fact, in order; for tests. `of(StepFinished)` gives those of one kind."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        super().__init__(self.events.append)

    def of(self, kind: type[AnyEvent]) -> list[AnyEvent]:
        return [event for event in self.events if isinstance(event, kind)]


class Fanout(Relay):
    """Tells every observer every fact, in order. An observer that fails is logged once and never hurts the run or the others."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        super().__init__(self._tell)
        self._observers = tuple(observers)
        self._reported: set[int] = set()

    def _tell(self, event: Event) -> None:
        for number, observer in enumerate(self._observers):
            try:
                deliver(event, observer)
            except Exception:
                if number not in self._reported:
                    self._reported.add(number)
                    _log.exception("an observer (%s) failed on %s; the run goes on, later failures of it are not logged", observer, event)
