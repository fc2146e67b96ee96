"""Tasks, rollouts, and the batches of the trainer's steps.

Shapes: `T` is the number of tokens of a row. Times are seconds on the clock of the running event
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
    """One problem. `data` holds the fields that the environment and its reward need. `id` is unique
    within `source`.
    """

    id: str
    source: str
    data: Mapping[str, Json] = field(default_factory=dict[str, Json])
    place: int | None = field(default=None, compare=False)
    """Its place among the training tasks of its source, if `[curriculum]` chose it."""

    @property
    def prompt(self) -> str | list[dict[str, Json]]:
        """The prompt of its source: the conversation `data["messages"]`, else the text
        `data["question"]`. Raises `TaskFieldMissing` if it has neither.
        """
        messages = self.data.get("messages")
        if isinstance(messages, list):
            return [dict(cast("Mapping[str, Json]", message)) for message in messages]
        return self.text("question")

    @property
    def messages(self) -> list[dict[str, Json]]:
        """The conversation that a rollout begins with: `prompt`, or a user's message with that
        text.
        """
        prompt = self.prompt
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    def text(self, name: str) -> str:
        """A field that must exist and hold text. Otherwise `TaskFieldMissing` names the field, the
        task and the task's fields.
        """
        value = self.data.get(name)
        if isinstance(value, str):
            return value
        has = ", ".join(sorted(self.data)) or "no field at all"
        what = f"has no field {name!r}"
        if name in self.data:
            what = f"holds {value!r} in field {name!r}, which is not text"
        raise TaskFieldMissing(
            f"task {self.id} of {self.source} {what} (it has: {has}); add the field to the task or "
            "use another environment."
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The result that an environment may return instead of a number. Everything but `reward` may be
    left out.
    """

    reward: float | Awaitable[float | None] | None
    """The reward of the whole rollout: a finite number, or `None` if it cannot be scored (I10). A
    late reward is an awaitable, which is awaited until the rollout's deadline.
    """
    components: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """The components of the reward, by name, before weights. A component that is None does not
    apply here and is left out.
    """
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that are shown, but not trained on."""
    turns: Sequence[float] = ()
    """The part of `reward` that each answer of the model earned, in the order of the requests. The
    whole rollout earned the rest. At most as many as there were answers.
    """
    fields: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Values that reward functions get by name, as if the task had them. Numbers among them are
    shown too.
    """
    roles: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """The reward of each role that asked the model (`client.role(name)`). `reward` is that of the
    client itself. A role whose reward is None cannot be scored, and is not trained.
    """


class GroupKey(msgspec.Struct, frozen=True, order=True):
    """A group is one attempt at one position of the task stream."""

    epoch: int
    index: int
    """The position in the epoch's order."""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class GroupScores:
    """The scores of a group's rollouts that have ended, in a run that goes on."""

    key: GroupKey
    task: Task
    is_over: bool
    """True if the group neither runs nor waits in line."""
    num_scored: int
    num_failed: int
    num_passed: int
    """The number of rollouts whose reward counts as a pass."""
    rewards: float
    """The sum of the rewards."""


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
    """The spans [begin, end) of tokens that the model read or wrote, in order. Each has True if the
    model wrote it.
    """
    edges = [0]
    edges += [at for at in range(1, len(generated)) if generated[at] != generated[at - 1]]
    edges.append(len(generated))
    return [(begin, end, bool(generated[begin])) for begin, end in pairwise(edges) if begin < end]


class Seal(msgspec.Struct, array_like=True, frozen=True):
    """The end of a store's chain of digests at some moment."""

    number: int
    """The number of links so far."""
    head: bytes


class TurnRecord(msgspec.Struct, array_like=True, frozen=True):
    """The place of an answer in its row, the way in which it was sampled, and its digest."""

    start: int
    """The first token of the prompt that is not in the answer before."""
    first: int
    """The first token of the answer."""
    end: int
    conditions: bytes
    """As `digests.conditions` writes them."""
    digest: bytes
    """`digests.turn_digest`. It covers the digest of the answer before in the row."""


@dataclass(frozen=True, eq=False)
class Row:
    """A token record that is ready for packing. Every array has shape [T]. Tokens whose `loss_mask`
    is False are context.

    `logprobs`, `versions` and `kv_versions` are meaningful only for generated tokens (`generated`).
    `loss_mask` is True for the generated tokens that this row trains on. Each generated token is
    trained in exactly one row (I3).
    """

    token_ids: Int32
    generated: Bool
    loss_mask: Bool
    logprobs: Float32
    versions: Int32
    kv_versions: Int32
    turns: Int32 | None = None
    """The number of the token's answer, from 0 in the order of the session's requests."""
    kept: UInt8 | None = None
    """The records of truncation (`types.sampling_masks`) of the tokens that this row trains on, end to end.
    It is None if no token has one.
    """
    kept_lengths: Int32 | None = None
    """[T], the bytes of each token's record in `kept`; 0 if nothing was cut off."""
    experts: UInt8 | None = None
    """[T, B], the experts of a mixture that each token was sent to, as an engine packs them. All B
    bytes are 255 if no engine recorded the token. It is None if no token has a record.
    """
    role: str = ""
    """The role of its session, if the rollout has several."""
    records: tuple[TurnRecord, ...] = ()
    """A record of each answer of the row, in order. Empty for rows that no gateway made."""

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
        """The size of its arrays in memory."""
        num_kept = 0 if self.kept is None else self.kept.nbytes
        return sum(a.nbytes for a in self._arrays()) + num_kept

    def _arrays(self) -> Sequence[Int32 | Bool | Float32 | UInt8]:
        """The arrays that have an entry for each token."""
        arrays: list[Int32 | Bool | Float32 | UInt8] = [
            self.token_ids,
            self.generated,
            self.loss_mask,
            self.logprobs,
            self.versions,
            self.kv_versions,
        ]
        for optional in (self.turns, self.kept_lengths, self.experts):
            if optional is not None:
                arrays.append(optional)
        return arrays

    @cached_property
    def oldest_version(self) -> Version | None:
        """The smallest version among trainable tokens; `None` if there is none. It is cached,
        because books, groups and steps all read it.
        """
        if not self.num_trainable:
            return None
        return int(np.minimum.reduce(self.versions[self.loss_mask]))


@dataclass(frozen=True, slots=True)
class RoleRecord:
    """The session of one role of a rollout. Its reward is compared with those of the same role."""

    reward: float | None = None
    truncated: bool = False
    room: int | None = None
    """This and `truncated` are as in `SessionRecord`."""


class SessionRecord(msgspec.Struct, frozen=True, eq=False):
    """The record that the gateway hands over when a session closes."""

    session_id: str
    rows: tuple[Row, ...]
    num_turns: int
    num_branches: int
    truncated: bool
    """True if some turn ended by `length`."""
    room: int | None = None
    """The least number of tokens that one of its answers left of its own limit. None without an
    answer of the policy.
    """
    masked: Mapping[Reason, int] = {}
    """The numbers of generated tokens that are kept as context but not trained, by reason."""
    masked_by: Mapping[str, int] = {}
    """The numbers of tokens that are masked as `not_policy_sampled`, by the field of the request
    that caused it. A token of a request with several such fields counts under each.
    """
    replaced: Mapping[str, int] = {}
    """The numbers of requests in which the run's own sampling replaced a field, by that field."""
    dropped: Mapping[Reason, int] = {}
    """The numbers of generated tokens that are in no row, by reason."""
    failed_requests: int = 0
    num_rewritten: int = 0
    """Answered chats that held a recorded reply, or another message in its place, but could not
    continue it token by token.
    """
    num_mismatches: int = 0
    """Answered prompts whose text would have had other ids than the reused ones if it had been
    tokenised anew.
    """
    versions: frozenset[Version] = frozenset()
    """The versions that sampled any token of the session, in a row or not."""
    num_answers: int = 0
    """Requests that were answered. A request for several choices made several turns."""
    times: tuple[TurnTimes, ...] = ()
    """The times of its turns, in the order of their ends. Turns that were given again after a crash
    are left out.
    """
    roles: Mapping[str, RoleRecord] = {}
    """The records of the roles that asked the model, by name. It is empty if none did. The
    session's own name is empty. Rows and counts cover all roles; `truncated`, `room` and
    `num_answers` are those of the session itself.
    """

    @property
    def num_trainable(self) -> int:
        return sum(row.num_trainable for row in self.rows)

    @property
    def shares(self) -> dict[str, float]:
        """The share of its tokens that is `trained`, and the share that is lost for each reason.
        It is empty if there are no tokens.
        """
        numbers: dict[str, int] = {"trained": self.num_trainable}
        for reason, number in (*self.masked.items(), *self.dropped.items()):
            numbers[reason.value] = numbers.get(reason.value, 0) + number
        total = sum(numbers.values())
        return {name: number / total for name, number in numbers.items()} if total else {}


@dataclass(frozen=True, slots=True)
class RequestTime:
    """The time that a rollout has waited for answers."""

    num_requests: int
    seconds: float
    """The time in which at least one request was under way, or its agent waited before another try
    as it was told.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The token record of one rollout, with its reward. A reward of `None` means that the
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
    """See `SessionRecord`."""
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    """This and the next three are as in `Result`."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    turn_rewards: tuple[float, ...] = ()
    fields: Mapping[str, Json] = field(default_factory=dict[str, Json])
    roles: Mapping[str, RoleRecord] = field(default_factory=dict[str, RoleRecord])
    """The roles that are trained, by name. The session's own role has the empty name. Empty if
    there is no other role.
    """

    def of_role(self, name: str) -> Trajectory:
        """The rows of one role, with the role's reward."""
        rows = tuple(row for row in self.rows if row.role == name)
        if not name:
            return replace(self, rows=rows, roles={})
        role = self.roles[name]
        return replace(
            self,
            rows=rows,
            reward=role.reward,
            truncated=role.truncated,
            room=role.room,
            roles={},
            components={},
            turn_rewards=(),
        )

    @property
    def num_trainable(self) -> int:
        return sum(row.num_trainable for row in self.rows)

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    @property
    def oldest_version(self) -> Version | None:
        versions = [row.oldest_version for row in self.rows]
        return min((version for version in versions if version is not None), default=None)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The trajectories of one task, compared with each other for the advantage."""

    key: GroupKey
    task_id: str
    source: str
    trajectories: tuple[Trajectory, ...]

    @classmethod
    def of(cls, key: GroupKey, task: Task, trajectories: Iterable[Trajectory]) -> Group:
        """A group of the scored trajectories, in the order of their samples.

        A reward of `None` means that the infrastructure failed. Such a trajectory leaves the group,
        and its reward never becomes a number (I10).
        """
        scored = [trajectory for trajectory in trajectories if trajectory.reward is not None]
        scored.sort(key=lambda trajectory: trajectory.key.sample)
        return cls(key, task.id, task.source, tuple(scored))

    @property
    def oldest_version(self) -> Version | None:
        """The version of its oldest trainable token, which is the age of the group. `None` if
        nothing in it is trainable.
        """
        versions = [trajectory.oldest_version for trajectory in self.trajectories]
        return min((version for version in versions if version is not None), default=None)

    @property
    def num_trainable(self) -> int:
        return sum(t.num_trainable for t in self.trajectories)

    def by_role(self) -> Mapping[str, Group]:
        """One group for each role, in the order of the names, because rewards are compared within a
        role. Without roles it is the group itself.
        """
        names = sorted({name for t in self.trajectories for name in t.roles})
        if not names:
            return {"": self}
        groups: dict[str, Group] = {}
        for name in ("", *names):
            members = [t for t in self.trajectories if name in (t.roles or {"": None})]
            if members:
                found = tuple([trajectory.of_role(name) for trajectory in members])
                groups[name] = replace(self, trajectories=found)
        return groups


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The groups of one step of the trainer: a lease on whole groups."""

    lease: int
    train_version: Version
    """The version whose weights the step begins with. Ages are counted from it."""
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Accounts:
    """The counts of all groups (I1), and of all tokens of rollouts that have ended (I3). They cover
    the whole run, even if processes died meanwhile.

    Submitted groups are those running, waiting, leased, trained and dropped. Received tokens are
    those waiting (including those of leased groups), trained, masked and dropped. `dropped` and
    `masked` are by reason.
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
class UnclaimedRollouts:
    """Rollouts that wait until a worker outside claims them."""

    number: int
    seconds: float
    """The time that the oldest has waited."""
    idle_seconds: float
    """The time in which there has been a rollout to claim while no worker claimed one
    or ran one.
    """
    claimed_seconds: float | None
    """The time since a worker last claimed one. It is None if no worker ever did."""


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
    # [N], the number of the token's answer, from 0; None if no rollout has rewards of answers
    turns: Int32 | None = None
    # [M * K], the rewards of the first K answers of each rollout; None exactly if `turns` is
    turn_rewards: Float32 | None = None
    # [M * C], the components of each rollout's reward, NaN if one does not apply; None without any
    components: Float32 | None = None
    component_names: tuple[str, ...] = ()  # [C]
    # [M], the least number of tokens that an answer left of its own limit; a number above all
    # limits for a rollout without answers
    room: Int32 | None = None
    # records of truncation, end to end; None if no token has one
    kept: UInt8 | None = None
    # [N], bytes of each token's record; 0 if nothing was cut off
    kept_lengths: Int32 | None = None
    experts: UInt8 | None = None  # [N, B], as in `Row`; None if no row has a record
    # [N], a teacher's log-probability of each token after those before it; None without a teacher
    teacher_logprobs: Float32 | None = None
    # the chain of each store that gave a part of the batch, as far as it was when it gave it
    seals: tuple[Seal, ...] = ()
