"""The messages between the rollout process and its workers over one WebSocket, as JSON. The
requests of agents go by HTTP, like those of any agent.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import msgspec

from midflight.environments.result_checks import UnscoredRollout
from midflight.types import Result

PATH: Final = "/midflight/v1/worker"
BLOCKED_PATH: Final = PATH + "/blocked"
SPARED_PATH: Final = PATH + "/spared"


class RunAgent(msgspec.Struct, tag="run", frozen=True):
    """Tells a worker to run the agent of a rollout. `data` is the task's data as JSON, so that
    every rollout has a copy of it.
    """

    session_id: str
    base_url: str
    api_key: str
    task_id: str
    source: str
    data: str
    attempts: str | None = None
    """The attempts of a group that has ended, as JSON. They are to be scored, and no agent runs."""


class CancelAgent(msgspec.Struct, tag="cancel", frozen=True):
    """Tells a worker that the rollout has ended, and that its agent is to end too."""

    session_id: str


class Joined(msgspec.Struct, tag="joined", frozen=True):
    """The first message of a worker."""

    name: str


class LoopTurned(msgspec.Struct, tag="beat", frozen=True):
    """The worker's event loop turns."""


class ToolsRun(msgspec.Struct, tag="tools", frozen=True):
    """The agent runs tools that have limits of their own, for `limit` seconds at most. With None
    the tools have ended.
    """

    session_id: str
    limit: float | None


class ProgramsWait(msgspec.Struct, tag="programs", frozen=True):
    """Programs that the agent or its rewards have started wait for a processor, or none of them
    waits any more.
    """

    session_id: str
    waits: bool


class AgentEnded(msgspec.Struct, tag="ended", frozen=True):
    """An agent has ended, with a result, which is checked, or with an error, as its class and
    message.
    """

    session_id: str
    reward: float | None = None
    error: str | None = None
    trace: str | None = None
    ends_run: bool = False
    """True if the error is one of the configuration, which ends the run."""
    components: dict[str, float] = {}
    metrics: dict[str, float] = {}
    turns: tuple[float, ...] = ()
    fields: dict[str, Any] = {}
    roles: dict[str, float | None] = {}
    unscored: dict[str, Any] | None = None
    """The attempt, in place of a result: it is to be scored beside the others of its group."""
    group_results: list[dict[str, Any]] | None = None
    """The results of a group that was scored."""

    def result(self) -> Result | UnscoredRollout | list[Result]:
        if self.group_results is not None:
            return [Result(**_heard(each)) for each in self.group_results]
        if self.unscored is not None:
            return UnscoredRollout(**_heard(self.unscored))
        return Result(
            self.reward, self.components, self.metrics, self.turns, self.fields, self.roles
        )


def ended_with(session_id: str, result: Result | UnscoredRollout) -> AgentEnded:
    """The message for a result, which is checked."""
    if isinstance(result, UnscoredRollout):
        return AgentEnded(session_id, unscored=asdict(result))
    return AgentEnded(session_id, **_plain(result))


def group_ended_with(session_id: str, results: Sequence[Result]) -> AgentEnded:
    """The message for the results of a group, which are checked."""
    return AgentEnded(session_id, group_results=[_plain(result) for result in results])


def _plain(result: Result) -> dict[str, Any]:
    return {
        "reward": result.reward,
        "turns": tuple(result.turns),
        "components": dict(result.components),
        "metrics": dict(result.metrics),
        "fields": dict(result.fields),
        "roles": dict(result.roles),
    }


class LoopBlocked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The event loop of a worker has not turned for `seconds`; `where` names the call in which it
    is. A thread of the worker sends this by HTTP.
    """

    name: str
    session_id: str | None
    where: str
    seconds: float


class WorkerSpared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The launcher is about to end a worker for a reason that no agent caused. It sends this by
    HTTP.
    """

    name: str


encode = msgspec.json.Encoder().encode
decode_for_worker = msgspec.json.Decoder(RunAgent | CancelAgent).decode
decode_from_worker = msgspec.json.Decoder(
    Joined | LoopTurned | ToolsRun | ProgramsWait | AgentEnded
).decode


def _heard(said: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields with tuples in the place of JSON's lists."""
    return {**said, "turns": tuple(said["turns"])}
