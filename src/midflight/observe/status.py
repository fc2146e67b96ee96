"""A snapshot of a run, for everything that shows it: small, typed, and unchanged by a trip through
msgspec.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from midflight.types import Accounts, UnclaimedRollouts, facts

K = TypeVar("K")


class Phase(StrEnum):
    """The phases of a run, in their order. An evaluation in mid-training belongs to `TRAINING`."""

    STARTING = "starting"
    WARM_START = "warm start"
    EVALUATION = "evaluation"
    TRAINING = "training"
    DONE = "done"


class Bound(StrEnum):
    """The side that the other one waits for."""

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
    """One source of tasks: the recent reward of its training rollouts, and the mean reward on its
    held-out tasks in the first and in the last evaluation.

    After a single evaluation only what is named `before` is known. `num_heldout` counts the tasks
    scored in the last evaluation.
    """

    name: str = ""
    reward: float | None = None
    num_rollouts: int = 0
    num_heldout: int = 0
    heldout_before: float | None = None
    heldout_after: float | None = None
    failed_before: int = 0
    """Held-out tasks without a score in the first evaluation. They are in no mean."""
    failed_after: int = 0
    """The same in the last evaluation."""
    incomplete: bool = False
    """True if its scores can't be compared, because too many tasks are missing from one of them."""

    @property
    def was_evaluated(self) -> bool:
        return self.num_heldout + self.failed_before > 0 or self.heldout_before is not None

    @property
    def was_evaluated_again(self) -> bool:
        return self.heldout_after is not None or self.failed_after > 0

    @property
    def num_failed(self) -> int:
        """Held-out tasks without a score in the last evaluation."""
        return self.failed_after if self.was_evaluated_again else self.failed_before

    @property
    def heldout_newest(self) -> float | None:
        """The mean reward in the last evaluation."""
        return self.heldout_after if self.was_evaluated_again else self.heldout_before


INCOMPLETE_SHARE = 0.05
"""Share of held-out tasks that may be without a score before an evaluation is marked."""


def is_incomplete(num_scored: int, num_failed: int) -> bool:
    return num_failed > INCOMPLETE_SHARE * (num_scored + num_failed)


def mean_age(ages: Mapping[int, int]) -> float | None:
    """The mean age of tokens that are counted by age, or None if there are none."""
    tokens = sum(ages.values())
    if not tokens:
        return None
    return sum(age * count for age, count in ages.items()) / tokens


def oldest_age(ages: Mapping[int, int]) -> int | None:
    """The largest age that some token has, or None if there are no tokens."""
    return max((age for age, count in ages.items() if count), default=None)


@dataclass(frozen=True, slots=True)
class LearningStatus:
    """Means over recent training rollouts and groups. `None` before the first."""

    generated_length: float | None = None
    """Mean output tokens of a rollout with a reward."""
    trained_length: float | None = None
    """Mean trainable tokens of a rollout in a batch. Healthy: near `rollout/length_mean`, less if long
    ones are dropped or masked.
    """
    truncated_share: float | None = None
    """Share of rollouts with a turn that ended by its limit. Healthy: below 0.1."""
    reward_spread: float | None = None
    """Mean standard deviation of the rewards within a group, over n - 1. Healthy: above 0."""
    zero_spread_share: float | None = None
    """Share of groups whose rewards are all alike, which teach nothing. Healthy: below 0.5."""
    turns_mean: float | None = None
    """Mean answers of the model in a rollout with a reward."""
    components: dict[str, float] = field(default_factory=dict[str, float])
    """Mean of each component of the rewards (docs/environments.md#what-an-environment-returns),
    where it applies.
    """
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Mean of each number that environments measured, over the rollouts that have it."""
    lengths: dict[str, float] = field(default_factory=dict[str, float])
    """`min` and `max` output tokens of rollouts with a reward; `terminated_mean`, `terminated_min` and
    `terminated_max` of those not cut short.
    """
    curriculum: dict[str, float] = field(default_factory=dict[str, float])
    """`refilled/...` and `drawn/...` count groups, `pool/...` counts tasks, and `pass_rate` is a
    share. It is empty without a curriculum and without refills.
    """


@dataclass(frozen=True, slots=True)
class IdleTime:
    """The side `who` was idle for `seconds` in all because of the side `for_whom`. `share` is their
    share of the training phase, or None if its length is not known.
    """

    who: str
    for_whom: str
    seconds: float
    share: float | None

    def __str__(self) -> str:
        return f"{self.who} for {self.for_whom}"


def idle_times(seconds: Mapping[str, float], training_seconds: float) -> tuple[IdleTime, ...]:
    """The idle times, longest first. `seconds` has them by texts such as `trainer for engines`."""
    found: list[IdleTime] = []
    for text, waited in sorted(seconds.items(), key=lambda item: -item[1]):
        who, _, for_whom = text.partition(" for ")
        share = min(1.0, waited / training_seconds) if training_seconds > 0 else None
        found.append(IdleTime(who, for_whom, waited, share))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the run began, over all its starts. Tokens that were lost when a process died
    count as generated.

    Steps that a resumed run has lost do not count as trained. A rollout with a reward of `None`
    counts as a rollout and as a failed one.
    """

    generated_tokens: int = 0
    trained_tokens: int = 0
    """`generated_tokens`, `trained_tokens`: Output tokens of the engines, evaluation included, and
    tokens in the loss, without the warm start.
    """
    rollouts: int = 0
    failed_rollouts: int = 0
    rollouts_spanning_versions: int = 0
    """`rollouts`, `failed_rollouts`, `rollouts_spanning_versions`: Training rollouts that ended, those
    without a reward, and those with tokens of several versions.
    """
    failed_requests: int = 0
    """Requests that ended in an error at the agent's edge."""
    weight_updates: int = 0
    """Versions after the first that went live on at least one engine."""
    max_token_staleness: int = 0
    """Largest age of a trained token (versions)."""


@dataclass(frozen=True, slots=True)
class MemberChanges:
    """The engines that joined and left since this process of the run began."""

    joined: tuple[str, ...] = ()
    """Engines that joined while the run went on, and have not left."""
    joining: tuple[str, ...] = ()
    """The members of `joined` that do not have the current weights yet."""
    num_left: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """The state and the progress of a run. Every field has a default, so that a launcher can show
    the phases in which no rollout process lives yet.
    """

    phase: Phase = Phase.STARTING
    name: str = ""
    step: int = 0
    steps: int = 0
    version: int = 0
    seconds: float = 0.0
    """The seconds that the run has run, over all its starts."""
    start_seconds: float = 0.0
    """Seconds of this start, its warm start and its end included."""
    training_seconds: float = 0.0
    """Seconds of this start from its first training rollout to the end of its last step."""
    eta_seconds: float | None = None
    """Seconds until the last step; none before two steps."""
    warm_start: WarmStartStatus | None = None
    evaluated: int = 0
    """The number of the `to_evaluate` tasks of the present evaluation that are answered."""
    to_evaluate: int = 0
    reward: float | None = None
    """Mean of recent training rollouts over all sources."""
    sources: tuple[SourceStatus, ...] = ()
    staleness: dict[int, int] = field(default_factory=dict[int, int])
    """Trained tokens by age, over the last 20 batches."""
    totals: Totals = Totals()
    generation_rate: float = 0.0
    """Output tokens of all engines, over 15 s; in the journal, since the line before (tokens/s)."""
    training_rate: float = 0.0
    """Trained tokens/s, over 15 s, or since the newest step began if that is longer."""
    num_running: int = 0
    """Requests decoding now, over all engines."""
    quarantined: tuple[str, ...] = ()
    members: MemberChanges = MemberChanges()
    failures: dict[str, int] = field(default_factory=dict[str, int])
    masked_by: dict[str, int] = field(default_factory=dict[str, int])
    replaced: dict[str, int] = field(default_factory=dict[str, int])
    """`failures`, `masked_by`, `replaced`: Since this process of the run began: tries without a
    reward, by class of error; tokens masked as `not_policy_sampled`, and requests in which the run's
    own sampling replaced a field, by that field.
    """
    learning: LearningStatus = LearningStatus()
    trainer: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """`TRAINER_KEYS` of the last step."""
    waits: tuple[IdleTime, ...] = ()
    """Longest first."""
    accounts: Accounts | None = None
    """None if nothing is trained."""
    engine_busy: float | None = None
    slots_used: float | None = None
    """Mean share of the engines' slots that decoded a request. Null if their number is not known."""
    trainer_busy: float | None = None
    overlap_share: float | None = None
    """`engine_busy`, `trainer_busy`, `overlap_share`: Shares of the training phase in which some
    engine, the trainer, and both computed.
    """
    bound: Bound = Bound.UNKNOWN
    """`generation-bound` if the trainer is idle a tenth of the time more than the engines,
    `trainer-bound` if they are, else `balanced`; `unknown` before the training phase.
    """
    advice: str = ""
    """The option to change, in a few words."""
    unclaimed: UnclaimedRollouts | None = None
    """The rollouts that wait for workers outside, if such workers run the agents."""
    digest: str = ""
    """The digest of the steps so far (`types.digests`). Empty if the trainer makes none."""
    sample: facts.Shown | None = None
    """The last rollout that ended with tokens to train on, if rollouts are shown."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """The groups that were dropped, by reason, over all starts of the run."""
        return {} if self.accounts is None else self.accounts.dropped


def merge_statuses(first: Status, others: Sequence[Status]) -> Status:
    """The status of several rollout processes as one: counts and rates are summed, and the rest is
    that of the first, which runs its part of the rollouts.
    """
    every = [first, *others]
    accounts = [one.accounts for one in every if one.accounts is not None]
    return replace(
        first,
        totals=_summed_totals([one.totals for one in every]),
        accounts=_summed(accounts) if accounts else None,
        staleness=_sums(one.staleness for one in every),
        failures=_sums(one.failures for one in every),
        masked_by=_sums(one.masked_by for one in every),
        replaced=_sums(one.replaced for one in every),
        generation_rate=sum(one.generation_rate for one in every),
        training_rate=sum(one.training_rate for one in every),
    )


def _summed_totals(every: Sequence[Totals]) -> Totals:
    counted = Counter[str]()
    for totals in every:
        counted.update(asdict(totals))
    counted["max_token_staleness"] = max(totals.max_token_staleness for totals in every)
    return Totals(**counted)


def _summed(accounts: Sequence[Accounts]) -> Accounts:
    return Accounts(
        submitted=sum(one.submitted for one in accounts),
        running=sum(one.running for one in accounts),
        waiting=sum(one.waiting for one in accounts),
        leased=sum(one.leased for one in accounts),
        trained=sum(one.trained for one in accounts),
        received_tokens=sum(one.received_tokens for one in accounts),
        waiting_tokens=sum(one.waiting_tokens for one in accounts),
        trained_tokens=sum(one.trained_tokens for one in accounts),
        dropped=_sums(one.dropped for one in accounts),
        masked_tokens=_sums(one.masked_tokens for one in accounts),
        dropped_tokens=_sums(one.dropped_tokens for one in accounts),
    )


def _sums(counts: Iterable[Mapping[K, int]]) -> dict[K, int]:
    total = Counter[K]()
    for one in counts:
        total.update(one)
    return dict(total.most_common())


TRAINER_KEYS = (
    "mismatch/mean",
    "clip/low_share",
    "clip/high_share",
    "entropy/estimate",
    "rho/k3",
    "grad_norm",
    "critic/explained_variance",
)
"""The metrics of a step that are shown while a run goes on."""
