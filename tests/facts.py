"""What was recorded in a test."""

from __future__ import annotations

from typing import TypeVar

from midflight.types.facts import Fact

AnyFact = TypeVar("AnyFact")


class Facts(list[Fact]):
    """Remembers every fact, in order; `record=facts.apply`."""

    def apply(self, fact: Fact) -> None:
        self.append(fact)

    def of(self, kind: type[AnyFact]) -> list[AnyFact]:
        return [fact for fact in self if isinstance(fact, kind)]
