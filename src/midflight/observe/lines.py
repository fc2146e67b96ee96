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
    """One step of the trainer. Keys without a text here mean what they do in `LearningStatus` and
    `Status`, but of the rollouts and groups that ended since the line before.
    """

    step: int
    """The number of the step, from 1."""
    version: Version
    """The version that it made."""
    seconds: float
    step_seconds: float
    """Length of the step, without the wait for its batch (s)."""
    eta_seconds: float | None = None
    tokens: int
    groups: int | None = None
    """`tokens`, `groups`: Trainable tokens and groups of the batch. Healthy:
    `rollout.groups_per_step` groups.
    """
    rollouts: int
    """Training rollouts that ended."""
    reward: float | None = None
    """Mean reward of the rollouts. Healthy: rises."""
    reward_by_source: dict[str, float] | None = None
    """`reward` of each source."""
    reward_spread: float | None = None
    zero_spread_share: float | None = None
    generated_length: float | None = None
    trained_length: float | None = None
    truncated_share: float | None = None
    lengths: dict[str, float] | None = None
    histograms: dict[str, Histogram] | None = None
    """`reward`, `generated_length`, `truncated_length` and `trained_length`: each has `edges`, and
    `counts` between them.
    """
    turns_mean: float | None = None
    components: dict[str, float] | None = None
    metrics: dict[str, float] | None = None
    curriculum: dict[str, float] | None = None
    failures: dict[str, int] | None = None
    """Tries without a reward since the line before, by class of error."""
    staleness: dict[int, int] | None = None
    """Trainable tokens of the batch by age."""
    staleness_mean: float | None = None
    staleness_max: int | None = None
    """`staleness_mean`, `staleness_max`: Mean and largest age of the trainable tokens (versions).
    Healthy: at most `rollout.max_staleness`.
    """
    generation_rate: float
    """Output tokens/s of all engines, since the line before."""
    training_rate: float
    training_seconds: float = 0.0
    overlap_share: float | None = None
    engine_busy: float | None = None
    trainer_busy: float | None = None
    slots_used: float | None = None
    bound: Bound = Bound.UNKNOWN
    advice: str = ""
    waits: dict[str, float] | None = None
    """Seconds that a part waited for another one since the line before. `trainer for generation` is
    such a key.
    """
    dropped: dict[str, int] | None = None
    """Groups dropped since the line before, by reason."""
    stage_seconds: float | None = None
    pause_seconds: float | None = None
    """`stage_seconds`, `pause_seconds`: Slowest engine: bringing weights in while it decodes, and
    standing still for the swap (s). Healthy: less than a step; a hundredth of one.
    """
    trainer: dict[str, float | None] | None = None
    """The trainer's numbers, by their names above without `train/`."""
    digests: StepDigests | None = None
    """Digests of batch, stores, weights and all steps (`chain`): docs/audit.md."""
    totals: Totals
    """Counts since the run began, by keys of the summary."""


class EvaluationLine(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    """One source in one evaluation on held-out tasks."""

    version: Version
    """The version that answered."""
    step: int
    """The step after which it began."""
    seconds: float
    """Seconds that the run had run when it ended, over all starts."""
    source: str
    """The source of tasks, or `SUITE/SOURCE`."""
    num_tasks: int
    mean_reward: float | None
    """`num_tasks`, `mean_reward`: Tasks that were scored (of a suite, answers), and their mean reward."""
    num_failed: int = 0
    error: str | None = None
    """`num_failed`, `error`: Tasks without a score, which count in no mean, and the error of one."""
    incomplete: bool = False
    """More than 5 % have no score: do not compare the mean."""
    at: dict[str, float] | None = None
    """A suite has its `samples` and `temperature` here, and unbiased estimates: `pass@k` is the
    chance that one of k answers passes, `best@k` the mean reward of the best of k answers.
    """


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
