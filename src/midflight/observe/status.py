"""A snapshot of a run, for whoever shows it: small, typed, and the same after a trip through
msgspec as before. And how its numbers read.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from midflight.config.cores import CoreUse
from midflight.types import Accounts, Unclaimed, facts

K = TypeVar("K")


class Phase(StrEnum):
    """What a run is doing, in the order it does it; an evaluation in mid-training belongs to
    `TRAINING`.
    """

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
    """One source of tasks: recent reward of training rollouts, and mean reward on held-out tasks at
    first and at last.

    After a single evaluation only `heldout_before` is known. `num_heldout` are the tasks scored in
    the last one.
    """

    name: str
    reward: float | None = None
    num_rollouts: int = 0
    num_heldout: int = 0
    heldout_before: float | None = None
    heldout_last: float | None = None
    failed_before: int = 0
    """Held-out tasks without a score, which are in no mean, at first and at last."""
    failed_last: int = 0

    @property
    def was_evaluated(self) -> bool:
        return self.num_heldout + self.failed_before > 0 or self.heldout_before is not None

    @property
    def was_evaluated_again(self) -> bool:
        return self.heldout_last is not None or self.failed_last > 0

    @property
    def num_failed(self) -> int:
        """In the last evaluation."""
        return self.failed_last if self.was_evaluated_again else self.failed_before

    @property
    def is_incomplete(self) -> bool:
        """Whether its scores can't be compared, because too many tasks are missing from one of
        them.
        """
        total = self.num_heldout + self.num_failed
        return any(
            is_incomplete(total - failed, failed)
            for failed in (self.failed_before, self.failed_last)
        )


INCOMPLETE_SHARE = 0.05
"""Share of held-out tasks that may be without a score before an evaluation is marked."""


def is_incomplete(num_scored: int, num_failed: int) -> bool:
    return num_failed > INCOMPLETE_SHARE * (num_scored + num_failed)


def heldout(source: SourceStatus, *, digits: int = 3) -> str:
    """`0.500 → 0.800 (256 tasks)`, and how many failed."""
    scores = number(source.heldout_before, digits=digits)
    if source.was_evaluated_again:
        scores += f" → {number(source.heldout_last, digits=digits)}"
    if not source.failed_before and not source.failed_last:
        return f"{scores} ({source.num_heldout} tasks)"
    first = f"{source.failed_before} and " if source.was_evaluated_again else ""
    mark = ": do not compare" if source.is_incomplete else ""
    return (
        f"{scores} ({first}{source.num_failed} of {source.num_heldout + source.num_failed} "
        f"tasks failed{mark})"
    )


@dataclass(frozen=True, slots=True)
class LearningStatus:
    """Of recent training rollouts and groups. `None` before the first."""

    generated_length: float | None = None
    """Output tokens of a rollout that got a reward."""
    trained_length: float | None = None
    """Trainable tokens of a rollout in a batch: less where long ones are dropped or masked."""
    truncated_share: float | None = None
    """Rollouts of which some turn was cut short by its limit."""
    reward_spread: float | None = None
    """Standard deviation of the rewards within a group."""
    zero_spread_share: float | None = None
    """Groups whose rewards are all alike, which teach nothing."""
    turns_mean: float | None = None
    """Answers of the model in a rollout that got a reward."""
    components: dict[str, float] = field(default_factory=dict[str, float])
    """Means of what rewards are made of, over the rollouts that each applied to."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Means of what environments measured, over the rollouts that each was measured in."""
    lengths: dict[str, float] = field(default_factory=dict[str, float])
    """Smallest and largest output of a rollout that got a reward; and `terminated_...`, with the
    mean, of those that were not cut short.
    """
    curriculum: dict[str, float] = field(default_factory=dict[str, float])
    """`refilled/...` and `drawn/...`, counts of groups; `pool/...`, tasks; `pass_rate`. Empty
    without a curriculum and without refills.
    """


@dataclass(frozen=True, slots=True)
class IdleTime:
    """`who` was idle because of `for_whom`, `seconds` in all, which is `share` of the training
    phase.
    """

    who: str
    for_whom: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the run began, over all its starts; what died with its processes was generated
    all the same.

    Steps that a resumed run has lost do not count as trained. Rewards of `None` count as rollouts,
    as failed ones too.
    """

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
class MemberChanges:
    """Of the engines, since this process of the run began."""

    joined: tuple[str, ...] = ()
    """Those that came while the run went on, and are there."""
    joining: tuple[str, ...] = ()
    """Those of them that have yet to get the current weights."""
    num_left: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """Everything defaults, so that a launcher can show the phases in which no rollout process lives
    yet.
    """

    phase: Phase = Phase.STARTING
    name: str = ""
    step: int = 0
    steps: int = 0
    version: int = 0
    seconds: float = 0.0
    """That the run has run for, over all its starts."""
    start_seconds: float = 0.0
    """Since this start."""
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
    members: MemberChanges = MemberChanges()
    failures: dict[str, int] = field(default_factory=dict[str, int])
    """Tries of rollouts without a reward, by the class of their error, since this process of the
    run began; most first.
    """
    learning: LearningStatus = LearningStatus()
    trainer: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """`TRAINER_KEYS` of the last step."""
    waits: tuple[IdleTime, ...] = ()
    """Longest first."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """Groups by reason."""
    accounts: Accounts | None = None
    """None where nothing is trained."""
    engine_busy: float | None = None
    """Share of the training phase in which some engine computed; none before it."""
    slots_used: float | None = None
    """Mean share of the requests that could have decoded together which did; none where it is not
    known how many could.
    """
    trainer_busy: float | None = None
    overlap_share: float | None = None
    """Share in which engine and trainer computed at the same time."""
    bound: Bound = Bound.UNKNOWN
    advice: str = ""
    """Which knob to turn, in a few words."""
    unclaimed: Unclaimed | None = None
    """The rollouts that wait for workers outside, where such workers run the agents."""
    sample: facts.Shown | None = None
    """The last rollout that ended with tokens to train on, where it is to be shown."""


def together(first: Status, others: Sequence[Status]) -> Status:
    """Of several rollout processes: counts and rates of all, and the rest as the first says, which
    has its part of the rollouts.
    """
    every = (first, *others)
    counted = {
        name: sum(getattr(one.totals, name) for one in every) for name in asdict(first.totals)
    }
    counted["max_token_staleness"] = max(one.totals.max_token_staleness for one in every)
    accounts = [one.accounts for one in every if one.accounts is not None]
    return replace(
        first,
        totals=Totals(**counted),
        accounts=_summed(accounts) if accounts else None,
        staleness=_sums(one.staleness for one in every),
        failures=_sums(one.failures for one in every),
        dropped=_sums(one.dropped for one in every),
        generation_rate=sum(one.generation_rate for one in every),
        training_rate=sum(one.training_rate for one in every),
    )


def _summed(accounts: Sequence[Accounts]) -> Accounts:
    numbers = (
        "submitted",
        "running",
        "waiting",
        "leased",
        "trained",
        "received_tokens",
        "waiting_tokens",
        "trained_tokens",
    )
    return Accounts(
        **{name: sum(getattr(one, name) for one in accounts) for name in numbers},
        dropped=_sums(one.dropped for one in accounts),
        masked_tokens=_sums(one.masked_tokens for one in accounts),
        dropped_tokens=_sums(one.dropped_tokens for one in accounts),
    )


def _sums(counts: Iterable[Mapping[K, int]]) -> dict[K, int]:
    total = Counter[K]()
    for one in counts:
        total.update(one)
    return dict(total.most_common())


BALANCED = 0.1
"""Idle shares that differ by less than this call for no change."""


WAITS = 0.25
"""A trainer that is idle for so long does not bound the run."""
FREE = 0.5
"""With so many slots free, more of them do not help."""


def judge(
    *,
    engine_busy: float | None,
    trainer_busy: float | None,
    slots_used: float | None = None,
    cores: CoreUse = CoreUse(),
) -> tuple[Bound, str]:
    """Compares how much of the training phase each side was idle. The side with less idle time
    bounds the run.

    An engine computes all the time also for one request: beside a trainer that seldom waits, what
    is free of its slots is its idle share, where that is known. Beside one that waits, an engine
    that computes all the time is what it waits for, however few its requests.
    """
    if engine_busy is None or trainer_busy is None:
        return Bound.UNKNOWN, ""
    trainer_idle = 1 - trainer_busy
    free = None if slots_used is None else 1 - slots_used
    engine_idle = 1 - engine_busy if free is None or trainer_idle >= WAITS else free
    if trainer_idle >= engine_idle + BALANCED:
        return (
            Bound.GENERATION,
            f"the trainer is idle {trainer_idle:.0%}{_more_generation(free, cores)}",
        )
    if trainer_idle >= WAITS:
        return Bound.BALANCED, (
            "both sides wait, for agents and their tools or for each other (trainer idle "
            f"{trainer_idle:.0%}, engines {engine_idle:.0%}): a larger rollout.max_in_flight or "
            "rollout.max_staleness"
        )
    if engine_idle >= trainer_idle + BALANCED:
        return Bound.TRAINER, f"the engines are idle {engine_idle:.0%}: {_more_training(cores)}"
    return Bound.BALANCED, "both sides are about equally busy"


def _more_generation(free: float | None, cores: CoreUse) -> str:
    """Advice by which engines make more, or the trainer needs less of them."""
    if free is not None and free >= FREE:
        return (
            f", and {free:.0%} of the engines' slots are free: a larger rollout.max_in_flight "
            "or rollout.max_staleness, quicker agents"
        )
    if not cores.are_full:
        return ": more engine.count, engine.max_running or rollout.max_in_flight"
    ways = [
        *(
            ["engine.lend = true, by which the trainer's cores generate while it waits"]
            if cores.can_lend
            else []
        ),
        *(["fewer trainer.threads for more engine.threads"] if cores.can_shift else []),
        "shorter answers (environment.max_tokens, or what the prompt asks for)",
        "a machine with more cores",
    ]
    return (
        ", and every core computes already, so that more engines or threads would not help: "
        f"{'; '.join(ways)}"
    )


def _more_training(cores: CoreUse) -> str:
    if cores.are_full:
        return (
            "more trainer.threads for fewer engine.threads or engine.count, or more "
            "trainer.micro_batch_tokens"
        )
    return "more trainer.threads or trainer.micro_batch_tokens, or fewer engines"


def busy_words(
    *, engine_busy: float | None, trainer_busy: float | None, slots_used: float | None = None
) -> str:
    """`engines busy 90% (35% of their slots), trainer busy 80%`."""
    slots = "" if slots_used is None else f" ({percent(slots_used)} of their slots)"
    return f"engines busy {percent(engine_busy)}{slots}, trainer busy {percent(trainer_busy)}"


TRAINER_KEYS = (
    "mismatch/mean",
    "clip/low_share",
    "clip/high_share",
    "entropy/estimate",
    "rho/k3",
    "grad_norm",
    "critic/explained_variance",
)
"""What of a step's metrics is shown while a run goes on; docs/metrics.md says what they are."""

UNKNOWN = "–"


def number(value: float | None, *, digits: int = 3) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def duration(seconds: float | None) -> str:
    """`7 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds is None:
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def unclaimed_words(found: Unclaimed) -> str:
    """`4 rollouts wait to be claimed, the oldest for 2 min 10 s; the last claim was 3 min 05 s
    ago`.
    """
    waits = (
        f"{found.number} rollouts wait to be claimed, the oldest"
        if found.number > 1
        else "1 rollout waits to be claimed,"
    )
    last = "no worker has claimed one so far"
    if found.claimed_seconds is not None:
        last = f"the last claim was {duration(found.claimed_seconds)} ago"
    return f"{waits} for {duration(found.seconds)}; {last}"


def size(num_bytes: float) -> str:
    """`512 KB`, `3.4 MB`, `1.2 GB`, in powers of 1024."""
    for unit, factor in (("GB", 2**30), ("MB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 1024:.0f} KB"
