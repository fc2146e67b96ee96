"""Named holds: an engine that is held gets no request."""

from __future__ import annotations

from collections import defaultdict


class Holds:
    """Named holds on all engines or on one. Synchronous. An engine is free when there is no hold on
    it and none on all engines.
    """

    def __init__(self) -> None:
        self._all: set[str] = set()
        self._one: defaultdict[str, set[str]] = defaultdict(set)

    def hold(self, owner: str, engine: str | None = None) -> None:
        """Holds one engine, or every engine (`None`), those attached later too. Idempotent per
        owner and engine.
        """
        owners = self._all if engine is None else self._one[engine]
        owners.add(owner)

    def release(self, owner: str, engine: str | None = None) -> None:
        """Lifts only this owner's hold. It is not an error if there is none."""
        if engine is None:
            self._all.discard(owner)
        elif engine in self._one:
            self._one[engine].discard(owner)
            self._drop_empty(engine)

    def forget(self, engine: str) -> None:
        """Drops the holds of an engine that is detached."""
        self._one.pop(engine, None)

    def owners(self, engine: str) -> tuple[str, ...]:
        """The names of the owners that hold the engine."""
        return tuple(sorted(self._all | self._one.get(engine, set())))

    def held(self, engine: str) -> bool:
        """True if any owner holds the engine."""
        return bool(self._all) or self.held_alone(engine)

    def held_alone(self, engine: str) -> bool:
        """True if any owner holds this engine by its name."""
        return engine in self._one

    @property
    def none(self) -> bool:
        """True if no engine is held."""
        return not (self._all or self._one)

    @property
    def shut(self) -> bool:
        """True if all engines are held."""
        return bool(self._all)

    def _drop_empty(self, engine: str) -> None:
        if not self._one[engine]:
            del self._one[engine]
