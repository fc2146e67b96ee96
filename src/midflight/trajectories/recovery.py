"""What a store gives back after a crash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from midflight.types import Batch, Group, GroupKey, RolloutKey, Task, Trajectory, Turn, Version


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A group that was running. Its rollouts go on: those in `finished` need not run again, the others are replayed."""

    key: GroupKey
    task: Task
    finished: tuple[Trajectory, ...]
    turns: Mapping[RolloutKey, tuple[Turn, ...]]
    """Completed turns, in order, of rollouts that had not ended."""


@dataclass(frozen=True, slots=True)
class Recovered:
    waiting: tuple[Group, ...]
    """In the order they finished."""
    unfinished: tuple[Unfinished, ...]
    """In the order of their keys, which is the order they were drawn in."""
    leases: tuple[Batch, ...]
    """Open ones of a trainer that lives; empty after its death."""
    tasks: Mapping[GroupKey, Task]
    """Of all groups above: a group that is requeued needs its task again."""
    next_position: tuple[int, int]
    """(epoch, index) of the next task to draw. An index past the end of its epoch means the start of the next."""
    highest_version: Version | None
    """The highest version a lease was meant to make, survived or not: new numbers must lie above it. `None` before the first."""
    next_lease: int
