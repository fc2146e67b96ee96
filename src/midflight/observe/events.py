"""The facts of `ports.Observer` as values, and the observers that only pass them on.

An observer that cares for some facts extends `Silent`; one that cares for all of them alike extends `Relay`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from midflight.ports import Observer
from midflight.types import GroupKey, Reason, RolloutKey, Version


class EngineStepped(msgspec.Struct, frozen=True, tag="engine_stepped"):
    engine: str
    started: float
    ended: float
    num_tokens: int
    num_running: int


class TurnFinished(msgspec.Struct, frozen=True, tag="turn_finished"):
    session_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_versions: int
    num_resumes: int
    seconds: float


class SessionClosed(msgspec.Struct, frozen=True, tag="session_closed"):
    num_turns: int
    num_branches: int
    num_rewritten: int
    num_mismatches: int


class RequestFailed(msgspec.Struct, frozen=True, tag="request_failed"):
    session_id: str | None
    status: int
    error: str


class RolloutFinished(msgspec.Struct, frozen=True, tag="rollout_finished"):
    key: RolloutKey
    source: str
    reward: float | None
    num_tokens: int
    num_versions: int
    seconds: float
    error: str | None


class GroupFinished(msgspec.Struct, frozen=True, tag="group_finished"):
    key: GroupKey
    num_trajectories: int
    mean_reward: float


class GroupDropped(msgspec.Struct, frozen=True, tag="group_dropped"):
    key: GroupKey
    reason: Reason
    num_tokens: int


class Waited(msgspec.Struct, frozen=True, tag="waited"):
    who: str
    for_whom: str
    seconds: float


class BatchTaken(msgspec.Struct, frozen=True, tag="batch_taken"):
    train_version: Version
    num_groups: int
    num_tokens: int
    staleness: dict[int, int]


class StepFinished(msgspec.Struct, frozen=True, tag="step_finished"):
    version: Version
    started: float
    ended: float
    num_tokens: int
    metrics: dict[str, float]


class WeightsCommitted(msgspec.Struct, frozen=True, tag="weights_committed"):
    engine: str
    version: Version
    stage_seconds: float
    pause_seconds: float


class EngineQuarantined(msgspec.Struct, frozen=True, tag="engine_quarantined"):
    engine: str
    error: str


class EngineRejoined(msgspec.Struct, frozen=True, tag="engine_rejoined"):
    engine: str
    version: Version


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated"):
    version: Version
    source: str
    num_tasks: int
    mean_reward: float | None
    num_failed: int = 0
    error: str | None = None


Event = (
    EngineStepped
    | TurnFinished
    | SessionClosed
    | RequestFailed
    | RolloutFinished
    | GroupFinished
    | GroupDropped
    | Waited
    | BatchTaken
    | StepFinished
    | WeightsCommitted
    | EngineQuarantined
    | EngineRejoined
    | Evaluated
)
"""Any fact. The tag of each class is the name of the observer's method, so that `deliver` needs no table."""

AnyEvent = TypeVar("AnyEvent", bound=msgspec.Struct)


def deliver(event: Event, observer: Observer) -> None:
    """Tells an observer a fact that was recorded earlier or came from another process."""
    getattr(observer, str(event.__struct_config__.tag))(**msgspec.structs.asdict(event))


class Relay:
    """Implements the observer's methods by making each fact an `Event` and handing it to `send`."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send

    def engine_stepped(self, *, engine: str, started: float, ended: float, num_tokens: int, num_running: int) -> None:
        self._send(EngineStepped(engine, started, ended, num_tokens, num_running))

    def turn_finished(
        self, *, session_id: str, num_prompt_tokens: int, num_output_tokens: int, num_versions: int, num_resumes: int, seconds: float
    ) -> None:
        self._send(TurnFinished(session_id, num_prompt_tokens, num_output_tokens, num_versions, num_resumes, seconds))

    def session_closed(self, *, num_turns: int, num_branches: int, num_rewritten: int, num_mismatches: int) -> None:
        self._send(SessionClosed(num_turns, num_branches, num_rewritten, num_mismatches))

    def request_failed(self, *, session_id: str | None, status: int, error: str) -> None:
        self._send(RequestFailed(session_id, status, error))

    def rollout_finished(
        self, *, key: RolloutKey, source: str, reward: float | None, num_tokens: int, num_versions: int, seconds: float, error: str | None
    ) -> None:
        self._send(RolloutFinished(key, source, reward, num_tokens, num_versions, seconds, error))

    def group_finished(self, *, key: GroupKey, num_trajectories: int, mean_reward: float) -> None:
        self._send(GroupFinished(key, num_trajectories, mean_reward))

    def group_dropped(self, *, key: GroupKey, reason: Reason, num_tokens: int) -> None:
        self._send(GroupDropped(key, reason, num_tokens))

    def waited(self, *, who: str, for_whom: str, seconds: float) -> None:
        self._send(Waited(who, for_whom, seconds))

    def batch_taken(self, *, train_version: Version, num_groups: int, num_tokens: int, staleness: Mapping[int, int]) -> None:
        self._send(BatchTaken(train_version, num_groups, num_tokens, dict(staleness)))

    def step_finished(self, *, version: Version, started: float, ended: float, num_tokens: int, metrics: Mapping[str, float]) -> None:
        self._send(StepFinished(version, started, ended, num_tokens, dict(metrics)))

    def weights_committed(self, *, engine: str, version: Version, stage_seconds: float, pause_seconds: float) -> None:
        self._send(WeightsCommitted(engine, version, stage_seconds, pause_seconds))

    def engine_quarantined(self, *, engine: str, error: str) -> None:
        self._send(EngineQuarantined(engine, error))

    def engine_rejoined(self, *, engine: str, version: Version) -> None:
        self._send(EngineRejoined(engine, version))

    def evaluated(
        self, *, version: Version, source: str, num_tasks: int, mean_reward: float | None, num_failed: int = 0, error: str | None = None
    ) -> None:
        self._send(Evaluated(version, source, num_tasks, mean_reward, num_failed, error))
