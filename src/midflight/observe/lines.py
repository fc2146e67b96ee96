"""The lines of `metrics.jsonl`: a step, an evaluation, an alarm and four others.

A key that has no value is left out, so that it is never read as zero; a number that isn't finite is
null.
"""

from __future__ import annotations

import msgspec

from midflight.observe.learning import Histogram
from midflight.observe.status import Bound, Totals
from midflight.types import Version, facts
from midflight.types.digests import StepDigests


class StepLine(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step", tag_field="kind"
):
    """One step of the trainer. docs/metrics.md defines every key."""

    step: int
    version: Version
    seconds: float
    step_seconds: float
    eta_seconds: float | None = None
    tokens: int
    groups: int | None = None
    rollouts: int
    reward: float | None = None
    reward_by_source: dict[str, float] | None = None
    reward_spread: float | None = None
    zero_spread_share: float | None = None
    generated_length: float | None = None
    trained_length: float | None = None
    truncated_share: float | None = None
    lengths: dict[str, float] | None = None
    histograms: dict[str, Histogram] | None = None
    turns_mean: float | None = None
    components: dict[str, float] | None = None
    metrics: dict[str, float] | None = None
    curriculum: dict[str, float] | None = None
    failures: dict[str, int] | None = None
    staleness: dict[int, int] | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    generation_rate: float
    training_rate: float
    training_seconds: float = 0.0
    overlap_share: float | None = None
    engine_busy: float | None = None
    trainer_busy: float | None = None
    slots_used: float | None = None
    bound: Bound = Bound.UNKNOWN
    advice: str = ""
    waits: dict[str, float] | None = None
    dropped: dict[str, int] | None = None
    stage_seconds: float | None = None
    pause_seconds: float | None = None
    trainer: dict[str, float | None] | None = None
    digests: StepDigests | None = None
    totals: Totals


class EvaluationLine(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    """One source in one evaluation on held-out tasks."""

    version: Version
    step: int
    seconds: float
    source: str
    num_tasks: int
    mean_reward: float | None
    num_failed: int = 0
    error: str | None = None
    """The error of one of the tasks that failed."""
    incomplete: bool = False
    """Too many failed to compare the mean with another."""
    at: dict[str, float] | None = None
    """For a suite: its `samples` and `temperature`, `pass@k` and `best@k`."""


class AlarmLine(msgspec.Struct, frozen=True, kw_only=True, tag="alarm", tag_field="kind"):
    """An alarm that the terminal showed, because a person should look at it."""

    version: Version
    step: int
    seconds: float
    name: str
    text: str


class CompletionsLine(
    msgspec.Struct, frozen=True, kw_only=True, tag="completions", tag_field="kind"
):
    """Some rollouts that the step was made on."""

    version: Version
    step: int
    seconds: float
    rollouts: tuple[facts.Shown, ...]


class CheckpointLine(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint", tag_field="kind"):
    """A checkpoint of `version` is on disk."""

    version: Version
    step: int
    seconds: float
    digest: str = ""
    """The digest of the steps up to it."""


class MemberLine(msgspec.Struct, frozen=True, kw_only=True, tag="engine", tag_field="kind"):
    """An engine came or went while the run went on."""

    version: Version
    step: int
    seconds: float
    engine: str
    event: str
    """`joined` or `left`."""
    detail: str
    """The address from which it came, or the reason why it went."""


class ResumeLine(msgspec.Struct, frozen=True, kw_only=True, tag="resume", tag_field="kind"):
    """The run went on from the checkpoint of `version`. The lines of later steps are gone, but
    their work still counts in the totals.
    """

    version: Version
    step: int
    seconds: float
    totals: Totals


Line = (
    StepLine
    | EvaluationLine
    | AlarmLine
    | CompletionsLine
    | CheckpointLine
    | MemberLine
    | ResumeLine
)

encode_line = msgspec.json.Encoder().encode
decode_line = msgspec.json.Decoder(Line).decode
