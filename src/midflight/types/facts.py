"""The facts of a run, as values in the past tense: one frozen struct for each fact, recorded after
it has happened.

The part that does something records it once, by `record(fact)`. Books, store, journal, metrics and
status each apply the facts that they know and ignore the others, so all of them agree. Times are
CLOCK_MONOTONIC seconds, which are comparable between the processes of one machine. Tokens and
groups are counts.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

from midflight.types.digests import StepDigests
from midflight.types.generation import Turn, TurnTimes
from midflight.types.names import Fate, Reason, Version
from midflight.types.rollouts import Accounts, Batch, Group, GroupKey, RolloutKey, Task, Trajectory


class EngineStepped(msgspec.Struct, frozen=True, gc=False):
    """An engine made one decode step."""

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
    """A session ended. The counts are those of its `SessionRecord`."""

    num_turns: int
    num_branches: int
    num_rewritten: int
    num_mismatches: int
    num_trainable: int = 0
    """This and the next three are given if tokens were masked or fields replaced in a session that
    trains.
    """
    masked: Mapping[Reason, int] = {}
    masked_by: Mapping[str, int] = {}
    replaced: Mapping[str, int] = {}


class RequestFailed(msgspec.Struct, frozen=True):
    """A request of an agent was answered with an error. Requests without a session have no id."""

    session_id: str | None
    status: int
    error: str


class FieldsIgnored(msgspec.Struct, frozen=True):
    """A request had fields that have no effect here. `path` is its route. Names that are in no
    table are `other`, so there are few names.
    """

    path: str
    fields: tuple[str, ...]


class RolloutEnded(msgspec.Struct, frozen=True):
    """One try of a rollout ended. A rollout without a reward may be tried again. Rollouts of
    evaluations are recorded too.
    """

    key: RolloutKey
    source: str
    reward: float | None
    num_tokens: int
    num_versions: int
    seconds: float
    error: str | None
    trace: str | None = None
    """The traceback of the exception that ended the try. Only its end, if it is very long."""
    num_turns: int = 0
    """The number of answers that the agent got. A try that was scored without an answer did not use
    the model.
    """
    truncated: bool = False
    """True if some turn ended by `length`."""
    started: float = 0.0
    """The time by the same clock as the times of its turns."""
    times: tuple[TurnTimes, ...] = ()
    components: Mapping[str, float] = {}
    metrics: Mapping[str, float] = {}


class Waited(msgspec.Struct, frozen=True):
    """The part `who` (trainer, admission, handover) was idle because of the part `for_whom`."""

    who: str
    for_whom: str
    seconds: float


# --- What moves groups and tokens: books and store apply these ------------------------------------


class AdmissionState(msgspec.Struct, frozen=True, array_like=True):
    """The numbers by which a group was admitted, apart from those that other facts give."""

    served_version: Version
    """The version that every routable engine served."""
    num_rollouts: int
    """The rollouts that held slots."""
    num_bytes: int
    """The size of the rows of ended rollouts in memory."""
    max_bytes: int
    """The size that these might have on that machine."""


class Admitted(msgspec.Struct, frozen=True):
    """A group started. It is the next of the stream, or one that was in line."""

    key: GroupKey
    task: Task
    by: AdmissionState | None = None
    """None for a fact that the store gives back."""


class TaskDrawn(msgspec.Struct, frozen=True):
    """A curriculum's task was begun. `pool` is its pool, and `sizes` are the sizes of the pools,
    over all sources. `pass_rate` covers the rollouts that pass rates look back on.
    """

    key: GroupKey
    pool: str
    sizes: Mapping[str, int]
    pass_rate: float | None


class SlotFreed(msgspec.Struct, frozen=True):
    """A rollout of a running group makes no more tokens. Slots belong to the process and are not
    stored.
    """

    key: GroupKey


class TurnKept(msgspec.Struct, frozen=True):
    """The `number`-th turn of a rollout that goes on was completed. Number 0 begins a new try."""

    key: RolloutKey
    number: int
    turn: Turn


class TrajectoryKept(msgspec.Struct, frozen=True):
    """A rollout ended and is not tried again. Every token that was generated for it is in one of
    the three fields.

    `masked` and `dropped` count tokens that are not trainable, including those of tries without a
    reward.
    """

    trajectory: Trajectory
    masked: Mapping[Reason, int]
    dropped: Mapping[Reason, int]


class GroupFinished(msgspec.Struct, frozen=True):
    """A running group waits for a step, as the `order`-th of the run."""

    group: Group
    order: int


class GroupClosed(msgspec.Struct, frozen=True):
    """A group ended untrained, with `num_tokens` that could have been trained on. A `successor`
    puts its task in line again.
    """

    key: GroupKey
    reason: Reason
    num_tokens: int
    successor: GroupKey | None = None
    alike: str | None = None
    """`passed` or `failed` if the group has no spread because all its rollouts did so."""


class Leased(msgspec.Struct, frozen=True):
    """Groups were given to the trainer. `staleness` counts trainable tokens by age in versions."""

    batch: Batch
    staleness: Mapping[int, int]
    masked: Mapping[RolloutKey, int]
    """Tokens that the stale policy masked and left in their row as context."""
    dropped: Mapping[RolloutKey, int]
    """Tokens that were dropped with their row."""


class Stepped(msgspec.Struct, frozen=True):
    """One step of the trainer, which made `version`. The groups left in its lease are trained. A
    checkpoint of the version makes that final.

    A skipped step left the weights as they were. Its groups were closed before.
    """

    lease: int
    version: Version
    started: float
    ended: float
    num_tokens: int
    metrics: Mapping[str, float]
    skipped: bool = False
    alarms: tuple[str, ...] = ()
    """One sentence for each value that the trainer found out of its bounds."""
    digests: StepDigests | None = None
    """None from a trainer that makes none."""


class TakenBack(msgspec.Struct, frozen=True):
    """The step of a lease will not be made. Its groups wait again, in their old places."""

    lease: int


class WentBack(msgspec.Struct, frozen=True):
    """A trainer went back to its checkpoint and goes on under a number that no other weights have
    had.

    Steps up to the checkpoint are final. Open leases are taken back, and `groups`, the groups of
    later steps, wait again.
    """

    checkpoint: Version
    version: Version
    groups: tuple[Group, ...]


class Checkpointed(msgspec.Struct, frozen=True):
    """A checkpoint of `version` was made. The steps up to it are final."""

    version: Version


class Interrupted(msgspec.Struct, frozen=True):
    """The process that ran the rollouts died. The running groups are in line again."""


class CarriedOver(msgspec.Struct, frozen=True):
    """Counts were carried over from a store: the groups that are trained or dropped for good, the
    groups in line, and the store's numbers.
    """

    trained: int
    dropped: Mapping[Reason, int]
    tokens: Mapping[tuple[Fate, Reason | None], int]
    in_line: tuple[GroupKey, ...]
    next_version: Version | None
    """The version that the next batch is for. None before the first."""
    highest_version: Version | None
    """The highest version that any lease was meant to make."""
    num_leases: int
    num_finished: int


class Resumed(msgspec.Struct, frozen=True):
    """A run was resumed from its store after its processes had died. Counts of rollouts are by
    source.
    """

    accounts: Accounts
    unfinished_tokens: int
    """The tokens of recorded turns of rollouts that had not ended. They are not generated again."""
    scored: Mapping[str, int]
    failed: Mapping[str, int]
    rewards: Mapping[str, float]
    """The sum of the rewards of the scored rollouts."""


class VersionServed(msgspec.Struct, frozen=True):
    """Every routable engine serves `version` or a newer one. It is not stored, because engines
    report it again after a crash.
    """

    version: Version


# --- What engines and evaluations did -------------------------------------------------------------


class WeightsCommitted(msgspec.Struct, frozen=True):
    """An engine serves a version from now on."""

    engine: str
    version: Version
    stage_seconds: float
    pause_seconds: float
    """How long it made no token, as it says itself, or else the time of the whole commit."""


class Quarantined(msgspec.Struct, frozen=True):
    """An engine gets no requests from now on."""

    engine: str
    error: str


class Rejoined(msgspec.Struct, frozen=True):
    """An engine left quarantine."""

    engine: str
    version: Version


class EngineJoined(msgspec.Struct, frozen=True):
    """An engine joined during the run. It is in quarantine until it has `Rejoined` with the current
    weights.
    """

    engine: str
    url: str


class EngineLeft(msgspec.Struct, frozen=True):
    """An engine is no longer a member. `why` completes the sentence "because it ..." (left, moved
    to ..., was out of reach). Its last `num_resumed` requests go on elsewhere.
    """

    engine: str
    why: str
    num_resumed: int


class Evaluated(msgspec.Struct, frozen=True):
    """One source of held-out tasks was evaluated. `num_tasks` tasks were scored, and every token of
    their answers was sampled by `version`. `mean_reward` is None if no task was scored.

    `error` is the error of one of the `num_failed` other tasks.
    """

    version: Version
    source: str
    num_tasks: int
    mean_reward: float | None
    num_failed: int = 0
    error: str | None = None
    at: dict[str, float] | None = None
    """`pass@k` and `best@k` of a suite's answers to each task, and how they were sampled
    (`samples`, `temperature`).
    """


class EvaluationKept(msgspec.Struct, frozen=True):
    """A rollout of an evaluation at `version` ended, and is kept for people to read. Its tokens are
    in no account.
    """

    version: Version
    task: Task
    trajectory: Trajectory


class Shown(msgspec.Struct, frozen=True):
    """A rollout that a step was made on, as text with the template's markers. A long one is cut in
    the middle.
    """

    source: str
    task_id: str
    reward: float | None
    prompt: str
    completion: str
    """Everything after the prompt, including the results of tools."""


class CompletionsShown(msgspec.Struct, frozen=True):
    """Some rollouts of the step that made `version` were shown to people."""

    version: Version
    rollouts: tuple[Shown, ...]


class Alarmed(msgspec.Struct, frozen=True):
    """An alarm was raised. People should look at it, though the run goes on."""

    name: str
    """The name of the alarm; the comment `#:` where it is raised says when."""
    text: str
    """A few lines with the observation and the remedy."""


Stored: TypeAlias = (
    Admitted
    | TurnKept
    | TrajectoryKept
    | GroupFinished
    | GroupClosed
    | Leased
    | Stepped
    | TakenBack
    | WentBack
    | Checkpointed
    | Interrupted
)
"""The facts that the store applies."""

Booked: TypeAlias = (
    Admitted
    | SlotFreed
    | TrajectoryKept
    | GroupFinished
    | GroupClosed
    | Leased
    | Stepped
    | TakenBack
    | WentBack
    | Checkpointed
    | Interrupted
    | CarriedOver
    | VersionServed
)
"""The facts that the books apply."""

Fact: TypeAlias = (
    Stored
    | Booked
    | EngineStepped
    | TurnFinished
    | SessionEnded
    | RequestFailed
    | FieldsIgnored
    | RolloutEnded
    | Waited
    | TaskDrawn
    | Resumed
    | WeightsCommitted
    | Quarantined
    | Rejoined
    | EngineJoined
    | EngineLeft
    | Evaluated
    | EvaluationKept
    | CompletionsShown
    | Alarmed
)

Record: TypeAlias = Callable[[Fact], None]
"""Applies a fact. Never waits, and never raises for reasons of its own."""


def record_nothing(fact: Fact) -> None:
    """Records nothing. It is for parts that run without observers."""
    del fact
