"""What rollout process and workers say to each other over one WebSocket, as JSON. The agents' requests go by HTTP, like any others'."""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

from midflight.types import Result

PATH: Final = "/midflight/v1/worker"
BLOCKED_PATH: Final = PATH + "/blocked"
BEAT_SECONDS: Final = 1.0
"""Between two beats of a worker's event loop; without a word for three of them it counts as silent."""


class RunAgent(msgspec.Struct, tag="run", frozen=True):
    """To a worker: a rollout of its own. `data` is the task's as JSON, so that every rollout has a copy of it."""

    session_id: str
    base_url: str
    api_key: str
    task_id: str
    source: str
    data: str


class CancelAgent(msgspec.Struct, tag="cancel", frozen=True):
    """To a worker: the rollout has ended, and its agent is to end too."""

    session_id: str


class Joined(msgspec.Struct, tag="joined", frozen=True):
    """A worker's first word."""

    name: str


class BeatOfLoop(msgspec.Struct, tag="beat", frozen=True):
    """The worker's event loop turns."""


class AgentEnded(msgspec.Struct, tag="ended", frozen=True):
    """An agent has ended: with a result, which is checked; or with an error, as its class and message."""

    session_id: str
    reward: float | None = None
    error: str | None = None
    trace: str | None = None
    ends_run: bool = False
    """Whether the error is a configuration's."""
    components: dict[str, float] = {}
    metrics: dict[str, float] = {}
    turns: tuple[float, ...] = ()
    fields: dict[str, Any] = {}

    def result(self) -> Result:
        return Result(self.reward, self.components, self.metrics, self.turns, self.fields)


def ended_with(session_id: str, result: Result) -> AgentEnded:
    """`result` is checked."""
    components, reward = cast("dict[str, float]", result.components), cast("float | None", result.reward)
    said = {"components": components, "metrics": dict(result.metrics), "turns": tuple(result.turns), "fields": dict(result.fields)}
    return AgentEnded(session_id, reward, **cast(Any, said))


class LoopBlocked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By HTTP, from a thread of the worker: its event loop has not turned for `seconds`, and this is where it is."""

    name: str
    session_id: str | None
    where: str
    seconds: float


encode = msgspec.json.Encoder().encode
decode_for_worker = msgspec.json.Decoder(RunAgent | CancelAgent).decode
decode_from_worker = msgspec.json.Decoder(Joined | BeatOfLoop | AgentEnded).decode
