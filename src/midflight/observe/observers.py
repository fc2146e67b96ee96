"""Gives every fact of a run to those that observe it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from midflight.errors import disk_full
from midflight.types import facts

_log = logging.getLogger(__name__)

_FAILED = "an observer (%s) failed on %s; the run goes on, later failures of it are not logged"


class Observers:
    """Gives every fact to each observer, in order. An observer that fails is logged once, and
    affects neither the run nor the others. A full disk is said too, because the log may be on it.
    """

    def __init__(
        self,
        observers: Sequence[facts.Record],
        *,
        of: Mapping[type, Sequence[facts.Record]] = {},
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`of` names the observers that apply the facts of a type. It is for types that most
        observers pass over: to ask all of them about each fact costs more than the work of the one
        that applies it. `say` gets a sentence about a full disk.
        """
        self._say = say
        self._reported = set[facts.Record]()
        self._observers = observers
        self._of = of

    def apply(self, fact: facts.Fact) -> None:
        for observe in self._of.get(type(fact), self._observers):
            try:
                observe(fact)
            except Exception as error:
                if observe not in self._reported:
                    self._reported.add(observe)
                    self._report(error, observe, fact)

    def _report(self, error: Exception, observe: facts.Record, fact: facts.Fact) -> None:
        if isinstance(error, OSError) and disk_full(error) is not None:
            self._say(
                f"Writing {error.filename}: {error.strerror}; the run goes on, and lines are "
                "missing there until you free some space."
            )
        with suppress(OSError):
            _log.exception(_FAILED, observe, fact)
