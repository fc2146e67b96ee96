"""A snapshot of a run, for whoever shows it: small, typed, and the same after a trip through msgspec as before."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """What a run is doing, in the order it does it; an evaluation in mid-training belongs to `TRAINING`."""

    STARTING = "starting"
    WARM_START = "warm start"
    EVALUATION = "evaluation"
    TRAINING = "training"
    DONE = "done"


class Bound(StrEnum):
    """Which side the other one waits for."""

    UNKNOWN = "unknown"
    GENERATION = "generation-bound"
    TRAINER = "trainer-bound"
    BALANCED = "balanced"


@dataclass(frozen=True, slots=True)
class WarmStartStatus:
    """The supervised warm start. `accuracy` is the last one measured."""

    step: int
    max_steps: int
    loss: float | None = None
    accuracy: float | None = None
    target: float | None = None


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """One source of tasks: recent reward of training rollouts, and mean reward on held-out tasks at first and at last.

    After a single evaluation only `heldout_before` is known.
    """

    name: str
    reward: float | None = None
    num_rollouts: int = 0
    num_heldout: int = 0
    heldout_before: float | None = None
    heldout_last: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """`who` was idle because of `for_whom`, `seconds` in all, which is `share` of the training phase."""

    who: str
    for_whom: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the run began, a resume included. Rewards of `None` count as rollouts, as failed ones too."""

    generated_tokens: int = 0
    """Output tokens of the engines, evaluation included."""
    trained_tokens: int = 0
    """Tokens the loss was taken over; the warm start is not among them."""
    rollouts: int = 0
    failed_rollouts: int = 0
    rollouts_spanning_versions: int = 0
    """Training rollouts whose tokens come from more than one version."""
    failed_requests: int = 0
    """Requests that ended in an error at the agent's edge."""
    weight_updates: int = 0
    """Versions that went live on at least one engine, the first one aside."""
    max_token_staleness: int = 0
    """Largest age of a trained token, in versions."""


@dataclass(frozen=True, slots=True)
class Status:
    """Everything defaults, so that a launcher can show the phases in which no rollout process lives yet."""

    phase: Phase = Phase.STARTING
    name: str = ""
    step: int = 0
    steps: int = 0
    version: int = 0
    seconds: float = 0.0
    eta_seconds: float | None = None
    """Until the last step; none before two steps."""
    warm_start: WarmStartStatus | None = None
    evaluated: int = 0
    """Tasks of the evaluation going on that are answered, of `to_evaluate`."""
    to_evaluate: int = 0
    reward: float | None = None
    """Mean of recent training rollouts over all sources."""
    sources: tuple[SourceStatus, ...] = ()
    staleness: dict[int, int] = field(default_factory=dict[int, int])
    """Trained tokens by age, over the last 20 batches."""
    totals: Totals = Totals()
    generation_rate: float = 0.0
    """Output tokens per second, lately."""
    training_rate: float = 0.0
    """Trained tokens per second, lately."""
    num_running: int = 0
    """Requests decoding now, over all engines."""
    quarantined: tuple[str, ...] = ()
    waits: tuple[Wait, ...] = ()
    """Longest first."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """Groups by reason."""
    engine_busy: float | None = None
    """Share of the training phase in which some engine computed; none before it."""
    trainer_busy: float | None = None
    overlap_share: float | None = None
    """Share in which engine and trainer computed at the same time."""
    bound: Bound = Bound.UNKNOWN
    advice: str = ""
    """Which knob to turn, in a few words."""
