"""The nouns that cross from one station to another: frozen, slotted, without behaviour beyond what they can derive.

Shapes: `T` is the number of tokens of a row. Times are seconds, on the clock of the running event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Version: TypeAlias = int
"""The number of a published set of weights: 0, 1, 2, ... (not a step, not a checkpoint)."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Int32: TypeAlias = NDArray[np.int32]
Float32: TypeAlias = NDArray[np.float32]
Bool: TypeAlias = NDArray[np.bool_]


# --- Closed sets -----------------------------------------------------------------------------------------------------


class PauseMode(StrEnum):
    """What happens to requests in flight, and to their keys and values, while an engine is paused."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    ABORT = "abort"
    DRAIN = "drain"


class FinishReason(StrEnum):
    """Why a generation ended. `ABORT` is never shown to an agent: the gateway resumes such a request."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class StalePolicy(StrEnum):
    """What is done with a group that is, or would become, older than `max_staleness`."""

    WAIT = "wait"
    DROP = "drop"
    MASK = "mask"
    REQUEUE = "requeue"


class LogprobKind(StrEnum):
    """Of which distribution an engine gives the log-probability of a sampled token."""

    SAMPLED = "sampled"
    """After temperature and every truncation, renormalised: exactly the distribution sampled from."""
    TEMPERATURE = "temperature"
    """softmax(logits / temperature), before truncation."""
    RAW = "raw"
    """softmax(logits)."""


class Fate(StrEnum):
    """What became of a token the gateway received (invariant I3): exactly one of these."""

    IN_FLIGHT = "in_flight"
    WAITING = "waiting"
    TRAINED = "trained"
    MASKED = "masked"
    DROPPED = "dropped"
    EVALUATED = "evaluated"
    UNTRACKED = "untracked"


class Reason(StrEnum):
    """Why a token was masked, or a token, rollout or group was dropped."""

    STALE = "stale"
    OVERSHOOT = "overshoot"
    UNCHOSEN = "unchosen"
    NOT_POLICY_SAMPLED = "not_policy_sampled"
    NO_REWARD = "no_reward"
    TOO_FEW = "too_few"
    ZERO_SPREAD = "zero_spread"
    TOO_LONG = "too_long"
    REQUEUED = "requeued"
    NOT_FINITE = "not_finite"
    RESTARTED = "restarted"
    SHUTDOWN = "shutdown"
    ABANDONED = "abandoned"
    """The request was cancelled or failed before its answer was complete."""


# --- Generation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Limits count output tokens from `GenerateRequest.num_prompt_tokens`, also after a resume."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    """Unsigned 64 bits. The noise of a token is a function of (seed, absolute position, token id) and nothing else."""

    @property
    def samples_the_policy(self) -> bool:
        """Whether the distribution sampled is the policy's own, up to its temperature (DECISIONS 11)."""
        return self.temperature > 0 and self.top_p >= 1 and self.top_k is None and self.min_p <= 0 and self.min_tokens == 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. To resume it, send it again with the tokens so far appended to `input_ids`; all else is unchanged."""

    request_id: str
    input_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams

    @property
    def num_output_tokens(self) -> int:
        return len(self.input_ids) - self.num_prompt_tokens

    @property
    def remaining(self) -> int:
        """Output tokens that may still be generated."""
        return self.sampling.max_tokens - self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Finish:
    """How a generation ended; `matched` is the stop string or stop id that ended it."""

    reason: FinishReason
    matched: str | int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive output tokens, all sampled under one version. The last chunk of a generation carries `finish`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: Version
    kv_version: Version
    """The oldest version whose keys these tokens attended to; below `version` only after a pause in `keep` mode."""
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Output tokens [start, end) of a turn, sampled under one version."""

    version: Version
    kv_version: Version
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the model inside a session, complete. All per-token tuples have the length of `output_ids`."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    finish: Finish
    policy_sampled: bool = True
    """False where the sampled support differs from the policy's: the turn is masked (`not_policy_sampled`)."""
    num_overshoot: int = 0
    """Tokens received after a stop string and cut from `output_ids`: dropped(overshoot)."""
    num_resumes: int = 0


# --- Engines and weights ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; the gateway and the handover ask here and never by the engine's name."""

    pause_modes: frozenset[PauseMode]
    logprob_kind: LogprobKind
    honours_seed: bool
    """The same seed gives the same tokens, whatever the batch and the interruptions."""
    versions_per_token: bool
    stops_on_strings: bool
    aborts_single_requests: bool
    stages_weights: bool
    """Weights can be brought in while decoding goes on, and committed later."""
    max_context: int
    vocab_size: int
    max_running: int
    """Requests decoded together; more wait inside the engine."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A reading of an engine. Progress, not liveness: two readings with work and equal `num_tokens` show a stall."""

    version: Version
    paused: bool
    num_tokens: int
    """Output tokens since the engine started."""
    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where one tensor lies in a packed buffer. `dtype` is a safetensors name (F32, BF16, ...); offsets are in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """A published version: where its bytes are and what they must hash to. Names are checkpoint names."""

    version: Version
    fingerprint: str
    """Of names, dtypes, shapes and bytes: `models.fingerprint`. What an engine serves is compared with it (I7)."""
    transport: str
    """`shared_memory` (location: path of a mapped file) or `file` (location: path of a safetensors file)."""
    location: str
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Attestation:
    """What an engine says it serves after a commit."""

    version: Version
    fingerprint: str


# --- Tasks, rollouts, trajectories -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `data` is whatever the environment and its reward need; `id` is unique within `source`."""

    id: str
    source: str
    data: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    """A group is one attempt at one position of the task stream (DECISIONS 6)."""

    epoch: int
    index: int
    """Position in the epoch's order."""
    attempt: int = 0


@dataclass(frozen=True, slots=True, order=True)
class RolloutKey:
    group: GroupKey
    sample: int

    def __str__(self) -> str:
        g = self.group
        return f"{g.epoch}-{g.index}-{g.attempt}-{self.sample}"


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A packed-ready token record. Every array has shape [T]; entries where `loss_mask` is False are context.

    `logprobs`, `versions` and `kv_versions` are meaningful only where the token was generated (`generated`);
    `loss_mask` is True on the generated tokens that this row trains on: each generated token in exactly one row (I3).
    """

    token_ids: Int32
    generated: Bool
    loss_mask: Bool
    logprobs: Float32
    versions: Int32
    kv_versions: Int32

    def __post_init__(self) -> None:
        lengths = {len(a) for a in (self.token_ids, self.generated, self.loss_mask, self.logprobs, self.versions, self.kv_versions)}
        assert len(lengths) == 1, f"I6: per-token arrays of lengths {lengths}"

    @property
    def num_trainable(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> Version | None:
        """The smallest version among trainable tokens, `None` if there is none."""
        return int(self.versions[self.loss_mask].min()) if self.loss_mask.any() else None


@dataclass(frozen=True, slots=True, eq=False)
class SessionRecord:
    """What the gateway hands over when a session closes."""

    session_id: str
    rows: tuple[Row, ...]
    num_turns: int
    num_branches: int
    truncated: bool
    """Some turn ended by `length`."""
    masked: Mapping[Reason, int] = field(default_factory=dict[Reason, int])
    """Generated tokens kept as context but not trained, by reason."""
    dropped: Mapping[Reason, int] = field(default_factory=dict[Reason, int])
    """Generated tokens that are in no row, by reason."""
    failed_requests: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The token record of one rollout, with its reward. A reward of `None` says that the infrastructure failed (I10)."""

    key: RolloutKey
    task_id: str
    source: str
    reward: float | None
    rows: tuple[Row, ...]
    truncated: bool = False
    error: str | None = None
    seconds: float = 0.0

    @property
    def num_trainable(self) -> int:
        return sum(row.num_trainable for row in self.rows)

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

    @property
    def oldest_version(self) -> Version | None:
        """Age of a group is that of its oldest trainable token; `None` when nothing in it is trainable."""
        return min((v for t in self.trajectories if (v := t.oldest_version) is not None), default=None)

    @property
    def num_trainable(self) -> int:
        return sum(t.num_trainable for t in self.trajectories)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one step of the trainer eats: a lease on whole groups (DECISIONS 13)."""

    lease: int
    train_version: Version
    """The version whose weights begin the step: ages are counted from here (DECISIONS 2)."""
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """A batch as flat arrays, for the wire and the trainer. N tokens, R rows, M rollouts.

    Row r holds tokens [row_offsets[r], row_offsets[r + 1]). Rollouts without rows still count in their group's baseline.
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
