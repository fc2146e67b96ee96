"""Facts with few words, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from midflight.types import Batch, Group, GroupKey, RolloutKey
from midflight.types.facts import EngineStepped, Fact, Leased, RolloutEnded, Stepped, WeightsCommitted


class Observer(Protocol):
    def apply(self, fact: Fact) -> None: ...


KEY = RolloutKey(GroupKey(0, 1), 2)


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def rollout(
    observer: Observer,
    reward: float | None,
    *,
    source: str = "spell_backward",
    num_versions: int = 1,
    key: RolloutKey = KEY,
    num_tokens: int = 5,
    num_turns: int = 1,
    truncated: bool = False,
    error: str | None = None,
    components: Mapping[str, float] = {},
    metrics: Mapping[str, float] = {},
) -> None:
    observer.apply(
        RolloutEnded(
            key,
            source,
            reward,
            num_tokens,
            num_versions,
            seconds=0.5,
            error=error,
            num_turns=num_turns,
            truncated=truncated,
            components=components,
            metrics=metrics,
        )
    )


def batch(observer: Observer, train_version: int, staleness: Mapping[int, int]) -> None:
    groups = tuple(Group(GroupKey(0, index), "task", "spell_backward", ()) for index in range(16))
    observer.apply(Leased(Batch(1, train_version, groups), staleness, {}, {}))


def step(observer: Observer, version: int, started: float = 1000.0, ended: float = 1000.5, num_tokens: int = 100, **metrics: float) -> None:
    observer.apply(Stepped(1, version, started, ended, num_tokens, metrics))


def decode(
    observer: Observer, started: float, ended: float, num_tokens: int = 10, *, engine: str = "engine0", num_running: int = 8
) -> None:
    observer.apply(EngineStepped(engine, started, ended, num_tokens, num_running))


def commit(observer: Observer, version: int, *, engine: str = "engine0", pause_seconds: float = 0.002) -> None:
    observer.apply(WeightsCommitted(engine, version, stage_seconds=0.1, pause_seconds=pause_seconds))
