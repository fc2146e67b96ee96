"""What happened, as values in the past tense: one frozen struct per fact, recorded after the deed.

Whoever does something tells it once, by `record(fact)`. Books, store, journal, metrics and status each apply the facts that they
know and pass over the others, so all of them tell the same story. Times are CLOCK_MONOTONIC seconds, comparable between the
processes of one machine; tokens and groups are counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

from midflight.types.names import Reason, Version
from midflight.types.rollouts import GroupKey, RolloutKey


class EngineStepped(msgspec.Struct, frozen=True, gc=False):
    """One decode step."""

    engine: str
    started: float
    ended: float
    num_tokens: int
    num_running: int


class TurnFinished(msgspec.Struct, frozen=True):
    """An answer was given to an agent."""

    session_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_versions: int
    num_resumes: int
    seconds: float


class SessionEnded(msgspec.Struct, frozen=True):
    """The counts are those of its `SessionRecord`."""

    num_turns: int
    num_branches: int
    num_rewritten: int
    num_mismatches: int


class RequestFailed(msgspec.Struct, frozen=True):
    """A request of an agent ended in an error at the agent's edge. Requests without a session have no id."""

    session_id: str | None
    status: int
    error: str


class RolloutEnded(msgspec.Struct, frozen=True):
    """One try of a rollout ended; one without a reward may be tried again. Rollouts of evaluations are told too."""

    key: RolloutKey
    source: str
    reward: float | None
    num_tokens: int
    num_versions: int
    seconds: float
    error: str | None


class GroupFinished(msgspec.Struct, frozen=True):
    key: GroupKey
    num_trajectories: int
    mean_reward: float


class GroupClosed(msgspec.Struct, frozen=True):
    """A group ended untrained."""

    key: GroupKey
    reason: Reason
    num_tokens: int


class Waited(msgspec.Struct, frozen=True):
    """`who` (trainer, admission, handover) was idle because of `for_whom`."""

    who: str
    for_whom: str
    seconds: float


class Leased(msgspec.Struct, frozen=True):
    """A batch was given to the trainer. `staleness` counts trainable tokens by age in versions."""

    train_version: Version
    num_groups: int
    num_tokens: int
    staleness: Mapping[int, int]


class Stepped(msgspec.Struct, frozen=True):
    """One step of the trainer, which made `version`."""

    version: Version
    started: float
    ended: float
    num_tokens: int
    metrics: Mapping[str, float]


class WeightsCommitted(msgspec.Struct, frozen=True):
    """An engine serves a version from now on."""

    engine: str
    version: Version
    stage_seconds: float
    pause_seconds: float


class Quarantined(msgspec.Struct, frozen=True):
    """An engine gets no requests from now on."""

    engine: str
    error: str


class Rejoined(msgspec.Struct, frozen=True):
    """An engine left quarantine."""

    engine: str
    version: Version


class Evaluated(msgspec.Struct, frozen=True):
    """One source of held-out tasks: `num_tasks` were scored, every token of theirs by `version`. `mean_reward` is None if none was.

    `error` is that of one of the `num_failed` others.
    """

    version: Version
    source: str
    num_tasks: int
    mean_reward: float | None
    num_failed: int = 0
    error: str | None = None


Fact: TypeAlias = (
    EngineStepped
    | TurnFinished
    | SessionEnded
    | RequestFailed
    | RolloutEnded
    | GroupFinished
    | GroupClosed
    | Waited
    | Leased
    | Stepped
    | WeightsCommitted
    | Quarantined
    | Rejoined
    | Evaluated
)

Record: TypeAlias = Callable[[Fact], None]
"""Applies a fact. Never waits, and never raises for reasons of its own."""


def unheard(fact: Fact) -> None:
    """Records nothing: for parts that run where nobody watches."""
    del fact
