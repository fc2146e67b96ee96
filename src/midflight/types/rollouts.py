"""Tasks, rollouts, and what a step of the trainer eats.

Shapes: `T` is the number of tokens of a row. Times are seconds, on the clock of the running event
loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import cast

import msgspec
import numpy as np

from midflight.errors import TaskFieldMissing
from midflight.types.generation import TurnTimes
from midflight.types.names import Bool, Float32, Int32, Json, Kind, Reason, UInt8, Version


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `data` is whatever the environment and its reward need; `id` is unique within
    `source`.
    """

    id: str
    source: str
    data: Mapping[str, Json] = field(default_factory=dict[str, Json])
    place: int | None = field(default=None, compare=False)
    """Among the training tasks of its source, where `[curriculum]` chose it."""

    @property
    def prompt(self) -> str | list[dict[str, Json]]:
        """What its source asks: the conversation `data["messages"]`, else the text
        `data["question"]`. `TaskFieldMissing` without either.
        """
        messages = self.data.get("messages")
        if isinstance(messages, list):
            return [dict(cast("Mapping[str, Json]", message)) for message in messages]
        return self.text("question")

    @property
    def messages(self) -> list[dict[str, Json]]:
        """The conversation that a rollout begins with: `prompt`, or a user's message of it."""
        prompt = self.prompt
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    def text(self, name: str) -> str:
        """A field that must be there and hold text; `TaskFieldMissing` names the field, the task
        and what the task has.
        """
        value = self.data.get(name)
        if isinstance(value, str):
            return value
        has = ", ".join(sorted(self.data)) or "no field at all"
        what = (
            f"holds {value!r} in field {name!r}, which is not text"
            if name in self.data
            else f"has no field {name!r}"
        )
        raise TaskFieldMissing(
            f"task {self.id} of {self.source} {what} (it has: {has}); add the field to the task or "
            "use another environment."
        )


@dataclass(frozen=True, slots=True)
class Result:
    """What an environment may return in place of a number. Everything but `reward` may be left
    out.
    """

    reward: float | Awaitable[float | None] | None
    """Of the whole rollout: a finite number, or `None` if it cannot be scored (I10). A late one is
    an awaitable, which is waited for until the rollout's deadline."""
    components: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """What the reward is made of, by name, before weights. None says that a component does not
    apply here: it is left out.
    """
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers to be shown, which nothing is trained on."""
    turns: Sequence[float] = ()
    """How much of `reward` each answer of the model earned, in the order of the requests; what they
    leave of it, the whole rollout earned. At most as many as there were answers."""
    fields: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """What reward functions get by name, as if the task had it. Numbers among them are shown
    too.
    """
    roles: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """The reward of each role that asked the model (`client.role(name)`); `reward` is that of the
    client itself. None where a role cannot be scored: it is not trained."""


class GroupKey(msgspec.Struct, frozen=True, order=True):
    """A group is one attempt at one position of the task stream."""

    epoch: int
    index: int
    """Position in the epoch's order."""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class GroupScores:
    """A group of a run that goes on, and what became of those of its rollouts that have ended."""

    key: GroupKey
    task: Task
    is_over: bool
    """It neither runs nor stands in line."""
    num_scored: int
    num_failed: int
    num_passed: int
    """Those whose reward is one of a pass."""
    rewards: float
    """Their sum."""


class RolloutKey(msgspec.Struct, frozen=True, order=True):
    group: GroupKey
    sample: int
    kind: Kind = Kind.TRAINING
    """Keys of two kinds are never equal, so neither are their seeds."""

    def __str__(self) -> str:
        g = self.group
        place = f"{g.epoch}-{g.index}-{g.attempt}-{self.sample}"
        return place if self.kind is Kind.TRAINING else f"{self.kind}-{place}"


def spans(generated: Bool) -> list[tuple[int, int, bool]]:
    """[begin, end) of what the model read and what it wrote, in turn, and whether it wrote it."""
    edges = [
        0,
        *(at for at in range(1, len(generated)) if generated[at] != generated[at - 1]),
        len(generated),
    ]
    return [(begin, end, bool(generated[begin])) for begin, end in pairwise(edges) if begin < end]


@dataclass(frozen=True, eq=False)
class Row:
    """A packed-ready token record. Every array has shape [T]; entries where `loss_mask` is False
    are context.

    `logprobs`, `versions` and `kv_versions` are meaningful only where the token was generated
    (`generated`); `loss_mask` is True on the generated tokens that this row trains on: each
    generated token in exactly one row (I3).
    """

    token_ids: Int32
    generated: Bool
    loss_mask: Bool
    logprobs: Float32
    versions: Int32
    kv_versions: Int32
    turns: Int32 | None = None
    """The answer that the token is of, counted from 0 in the order of the session's requests."""
    kept: UInt8 | None = None
    """What truncation kept of the vocabulary for each token that this row trains on: records of
    `types.kept`, end to end; None where no token has one."""
    kept_lengths: Int32 | None = None
    """[T] bytes of each token's record in `kept`; 0 where nothing was cut off"""
    experts: UInt8 | None = None
    """[T, B], of each token the experts of a mixture that it was sent to, as an engine packs them;
    255 in all B bytes where none recorded it. None where no token has a record."""
    role: str = ""
    """Of its rollout's sessions the one that it is of, where that has several."""

    def __post_init__(self) -> None:
        lengths = {len(a) for a in self._arrays()}
        if self.kept is not None and self.kept_lengths is not None:
            assert self.kept_lengths.sum() == len(self.kept), (
                f"I6: records of {self.kept_lengths.sum()} bytes in {len(self.kept)}"
            )
        assert len(lengths) == 1, f"I6: per-token arrays of lengths {lengths}"

    @cached_property
    def num_trainable(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def num_bytes(self) -> int:
        """Of its arrays in memory."""
        return sum(a.nbytes for a in self._arrays()) + (
            0 if self.kept is None else self.kept.nbytes
        )

    def _arrays(self) -> Sequence[Int32 | Bool | Float32 | UInt8]:
        """Those per token."""
        arrays = (
            self.token_ids,
            self.generated,
            self.loss_mask,
            self.logprobs,
            self.versions,
            self.kv_versions,
        )
        return (
            *arrays,
            *(a for a in (self.turns, self.kept_lengths, self.experts) if a is not None),
        )

    @cached_property
    def oldest_version(self) -> Version | None:
        """The smallest version among trainable tokens, `None` if there is none. Books, groups and
        steps all ask for it.
        """
        return int(np.minimum.reduce(self.versions[self.loss_mask])) if self.num_trainable else None


@dataclass(frozen=True, slots=True)
class RoleRecord:
    """One of several sessions of a rollout, whose reward is compared with those of the same
    role.
    """

    reward: float | None = None
    truncated: bool = False
    room: int | None = None
    """Both as in `SessionRecord`."""


class SessionRecord(msgspec.Struct, frozen=True, eq=False):
    """What the gateway hands over when a session closes."""

    session_id: str
    rows: tuple[Row, ...]
    num_turns: int
    num_branches: int
    truncated: bool
    """Some turn ended by `length`."""
    room: int | None = None
    """Tokens that its answers left of their own limits, the one that came nearest. None without an
    answer of the policy.
    """
    masked: Mapping[Reason, int] = {}
    """Generated tokens kept as context but not trained, by reason."""
    dropped: Mapping[Reason, int] = {}
    """Generated tokens that are in no row, by reason."""
    failed_requests: int = 0
    num_rewritten: int = 0
    """Answered chats that held a recorded reply, or another message in its place, and could not
    continue it token by token.
    """
    num_mismatches: int = 0
    """Answered prompts whose text, tokenised anew, would have had other ids than the recorded ones
    that were reused.
    """
    versions: frozenset[Version] = frozenset()
    """That sampled any token of the session, in a row or not."""
    num_answers: int = 0
    """Requests that were answered. One that asked for several choices made several turns."""
    times: tuple[TurnTimes, ...] = ()
    """Of its turns, in the order of their ends; those given again after a crash are left out."""
    roles: Mapping[str, RoleRecord] = {}
    """Where roles asked the model, those that did, by name; the session's own is empty. Rows and
    counts are of all, `truncated`, `room` and `num_answers` of the session itself."""


@dataclass(frozen=True, slots=True)
class RequestTime:
    """How long a rollout has waited for answers."""

    num_requests: int
    seconds: float
    """In which at least one request was under way, or its agent waited before another try as it was
    told.
    """
    num_open: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The token record of one rollout, with its reward. A reward of `None` says that the
    infrastructure failed (I10).
    """

    key: RolloutKey
    task_id: str
    source: str
    reward: float | None
    rows: tuple[Row, ...]
    truncated: bool = False
    error: str | None = None
    seconds: float = 0.0
    room: int | None = None
    """As in `SessionRecord`."""
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    """As in `Result`, and so are the next three."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    turn_rewards: tuple[float, ...] = ()
    fields: Mapping[str, Json] = field(default_factory=dict[str, Json])
    roles: Mapping[str, RoleRecord] = field(default_factory=dict[str, RoleRecord])
    """Those that are trained, by name, where there are any but the session's own, whose name is
    empty.
    """

    def of_role(self, name: str) -> Trajectory:
        """What a role said, with the role's reward."""
        rows = tuple(row for row in self.rows if row.role == name)
        if not name:
            return replace(self, rows=rows, roles={})
        of = self.roles[name]
        scored = {"reward": of.reward, "truncated": of.truncated, "room": of.room}
        return replace(self, rows=rows, roles={}, components={}, turn_rewards=(), **scored)

    @property
    def num_trainable(self) -> int:
        return sum(row.num_trainable for row in self.rows)

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    @property
    def oldest_version(self) -> Version | None:
        return min((v for row in self.rows if (v := row.oldest_version) is not None), default=None)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The trajectories of one task, compared with each other for the advantage."""

    key: GroupKey
    task_id: str
    source: str
    trajectories: tuple[Trajectory, ...]

    @classmethod
    def of(cls, key: GroupKey, task: Task, trajectories: Iterable[Trajectory]) -> Group:
        """The scored trajectories in the order of their samples.

        A reward of `None` says that the infrastructure failed: it leaves the group and never
        becomes a number (I10).
        """
        scored = sorted(
            (t for t in trajectories if t.reward is not None), key=lambda t: t.key.sample
        )
        return cls(key, task.id, task.source, tuple(scored))

    @property
    def oldest_version(self) -> Version | None:
        """Age of a group is that of its oldest trainable token; `None` when nothing in it is
        trainable.
        """
        return min(
            (v for t in self.trajectories if (v := t.oldest_version) is not None), default=None
        )

    @property
    def num_trainable(self) -> int:
        return sum(t.num_trainable for t in self.trajectories)

    def by_role(self) -> Mapping[str, Group]:
        """Whose rewards are compared with each other: those of one role, in the order of the names.
        Without roles it is the group itself.
        """
        names = sorted({name for t in self.trajectories for name in t.roles})
        if not names:
            return {"": self}
        of = {
            name: [t.of_role(name) for t in self.trajectories if name in (t.roles or {"": None})]
            for name in ["", *names]
        }
        return {
            name: replace(self, trajectories=tuple(found)) for name, found in of.items() if found
        }


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one step of the trainer eats: a lease on whole groups."""

    lease: int
    train_version: Version
    """The version whose weights begin the step: ages are counted from here."""
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Accounts:
    """Where all groups are (I1), and all tokens of rollouts that have ended (I3): of the whole run,
    whatever died meanwhile.

    Submitted are those running, waiting, leased, trained and dropped; received are those waiting
    (of leased groups too), trained, masked and dropped. `dropped` and `masked` are by reason.
    """

    submitted: int = 0
    running: int = 0
    waiting: int = 0
    leased: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    received_tokens: int = 0
    waiting_tokens: int = 0
    trained_tokens: int = 0
    masked_tokens: dict[str, int] = field(default_factory=dict[str, int])
    dropped_tokens: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class Unclaimed:
    """Rollouts that wait for a worker outside to claim them."""

    number: int
    seconds: float
    """The oldest has waited for so long."""
    idle_seconds: float
    """For so long there was one to claim, and no worker claimed one or had one under way."""
    claimed_seconds: float | None
    """A worker claimed one so long ago. None where none ever did."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """A batch as flat arrays, for the wire and the trainer. N tokens, R rows, M rollouts.

    Row r holds tokens [row_offsets[r], row_offsets[r + 1]). Rollouts without rows still count in
    their group's baseline.
    """

    lease: int
    train_version: Version
    token_ids: Int32  # [N]
    loss_mask: Bool  # [N], True on the tokens to train on; the next three are meaningful there
    logprobs: Float32  # [N], behaviour log-probabilities
    versions: Int32  # [N]
    kv_versions: Int32  # [N]
    row_offsets: Int32  # [R + 1]
    row_rollout: Int32  # [R], the rollout of each row
    rewards: Float32  # [M]
    rollout_group: Int32  # [M], groups numbered from 0 in the batch
    truncated: Bool  # [M]
    # [N], the answer that the token is of, from 0; None where no rollout says what its answers
    # earned
    turns: Int32 | None = None
    # [M * K], what the first K answers of each rollout earned; there exactly if `turns` is
    turn_rewards: Float32 | None = None
    # [M * C], of each rollout's reward, NaN where one does not apply; None where there are none
    components: Float32 | None = None
    component_names: tuple[str, ...] = ()  # [C]
    # [M], tokens that the answer nearest to its own limit left of it; a number above all limits
    # without answers
    room: Int32 | None = None
    # records of what truncation kept, end to end; None where no token has one
    kept: UInt8 | None = None
    # [N], bytes of each token's record; 0 where nothing was cut off
    kept_lengths: Int32 | None = None
    experts: UInt8 | None = None  # [N, B], as in `Row`; None where no row has a record
    # [N], of a teacher, for the token after those before it; None in a run without one
    teacher_logprobs: Float32 | None = None
