"""What has happened so far: facts added up to what terminal, journal and summary show; numbers over the recent past, and exact unions and
intersections of the times when something was busy."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from midflight.observe.failures import Failures
from midflight.observe.learning import LEARNED_FROM, Learning
from midflight.observe.status import TRAINER_KEYS, IdleTime, Phase, SourceStatus, Status, Totals, judge
from midflight.types import Kind, Version, facts


class Rate:
    """Amount per second over the last `seconds`, or over the time since the first amount while that is shorter."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._recent: deque[tuple[float, float]] = deque()
        self._sum = 0.0
        self._first: float | None = None

    def add(self, at: float, amount: float) -> None:
        """Amounts of the same tenth of a second share an entry, which bounds memory by the window."""
        self._first = at if self._first is None else min(self._first, at)
        self._sum += amount
        if self._recent and at - self._recent[-1][0] < 0.1:
            last, sum_before = self._recent[-1]
            self._recent[-1] = (last, sum_before + amount)
        else:
            self._recent.append((at, amount))

    def per_second(self, now: float) -> float:
        while self._recent and self._recent[0][0] < now - self._seconds:
            self._sum -= self._recent.popleft()[1]
        if self._first is None or not self._recent:
            return 0.0
        return self._sum / max(min(self._seconds, now - self._first), 0.1)


class Mean:
    """Mean of the last `size` numbers; `None` before the first, which is not zero."""

    def __init__(self, size: int) -> None:
        self._recent: deque[float] = deque(maxlen=size)

    def add(self, number: float) -> None:
        self._recent.append(number)

    def value(self) -> float | None:
        return sum(self._recent) / len(self._recent) if self._recent else None


SLACK_SECONDS = 120.0
"""How late an interval may arrive and still be counted exactly: longer than a step's report can be under way."""
MAX_SPANS = 50_000
"""Spans kept per side before the older half is settled whatever happens: a few MB."""


@dataclass(slots=True)
class Spans:
    """A union of intervals as disjoint spans in order: `starts[i] < ends[i] < starts[i + 1]`."""

    starts: list[float] = field(default_factory=list[float])
    ends: list[float] = field(default_factory=list[float])

    def add(self, start: float, end: float) -> None:
        """Joins [start, end] with every span it touches."""
        if end <= start:
            return
        first = bisect_left(self.ends, start)
        after = bisect_right(self.starts, end)
        if first < after:
            start, end = min(start, self.starts[first]), max(end, self.ends[after - 1])
        self.starts[first:after] = [start]
        self.ends[first:after] = [end]

    def length(self) -> float:
        return sum(self.ends) - sum(self.starts)

    def cut(self, line: float) -> Spans:
        """Takes out and returns everything before `line`; a span across it is divided."""
        last = bisect_left(self.starts, line)
        before = Spans(self.starts[:last], self.ends[:last])
        del self.starts[:last], self.ends[:last]
        if before.ends and before.ends[-1] > line:
            self.starts.insert(0, line)
            self.ends.insert(0, before.ends[-1])
            before.ends[-1] = line
        return before


def common_length(a: Spans, b: Spans) -> float:
    """Length of the intersection, in one pass over both."""
    total, i, j = 0.0, 0, 0
    while i < len(a.starts) and j < len(b.starts):
        total += max(0.0, min(a.ends[i], b.ends[j]) - max(a.starts[i], b.starts[j]))
        if a.ends[i] <= b.ends[j]:
            i += 1
        else:
            j += 1
    return total


class Overlap:
    """How long two sides were busy, and both together, since `begin`.

    What lies further back than `SLACK_SECONDS` before the newest end of both sides is settled into sums and forgotten, so
    memory stays flat however long the run; an interval that arrives later than that is counted from the settled line on.
    """

    def __init__(self) -> None:
        self._sides = (Spans(), Spans())
        self._latest = [0.0, 0.0]
        self._settled = [0.0, 0.0, 0.0]
        self._line: float | None = None
        self._end: float | None = None
        self._began: float | None = None

    def begin(self, at: float) -> None:
        """Nothing before this counts."""
        self._began = self._line = at

    def finish(self, at: float) -> None:
        """Nothing after this counts."""
        self._end = at
        self._sides = (self._sides[0].cut(at), self._sides[1].cut(at))

    def seconds(self, now: float) -> float:
        """Length of the time looked at, until `now` or the finish."""
        return 0.0 if self._began is None else max(0.0, (now if self._end is None else self._end) - self._began)

    def add(self, side: int, start: float, end: float) -> None:
        """Side 0 or 1 was busy in [start, end]. Before `begin` nothing is kept."""
        if self._line is None:
            return
        end = end if self._end is None else min(end, self._end)
        self._sides[side].add(max(start, self._line), end)
        self._latest[side] = max(self._latest[side], end)
        crowded = len(self._sides[side].starts) > MAX_SPANS
        if crowded:
            self._settle(self._sides[side].starts[MAX_SPANS // 2])
        elif len(self._sides[side].starts) % 1024 == 0:
            self._settle(min(self._latest) - SLACK_SECONDS)

    def busy(self) -> tuple[float, float, float]:
        """Seconds of side 0, of side 1, and of both at once."""
        a, b = self._sides
        return self._settled[0] + a.length(), self._settled[1] + b.length(), self._settled[2] + common_length(a, b)

    def _settle(self, line: float) -> None:
        if self._line is None or line <= self._line:
            return
        a, b = self._sides[0].cut(line), self._sides[1].cut(line)
        for number, seconds in enumerate((a.length(), b.length(), common_length(a, b))):
            self._settled[number] += seconds
        self._line = line


RATE_SECONDS = 15.0
"""Window of the tokens per second: a few steps of a small model, short enough to show a stall."""
REWARD_ROLLOUTS = 256
"""Window of the moving reward: two batches of the default size."""
RECENT_BATCHES = 20
"""Window of the staleness histogram and of the time per step that the ETA is taken from."""

ENGINE, TRAINER = 0, 1


@dataclass(slots=True)
class SourceState:
    """One source of tasks. Held-out scores are those of the first and of the last evaluation."""

    reward: Mean = field(default_factory=lambda: Mean(REWARD_ROLLOUTS))
    num_rollouts: int = 0
    first: facts.Evaluated | None = None
    last: facts.Evaluated | None = None

    def evaluated(self, score: facts.Evaluated) -> None:
        self.first, self.last = self.first or score, score

    def status(self, name: str) -> SourceStatus:
        reward = self.reward.value()
        if self.first is None or self.last is None:
            return SourceStatus(name, reward, self.num_rollouts)
        again = None if self.last is self.first else self.last
        return SourceStatus(
            name,
            reward,
            self.num_rollouts,
            self.last.num_tasks,
            heldout_before=self.first.mean_reward,
            heldout_last=again and again.mean_reward,
            failed_before=self.first.num_failed,
            failed_last=again.num_failed if again else 0,
        )


class RunState:
    """Adds up facts. Synchronous; `clock` is CLOCK_MONOTONIC, as in the events (on Linux the event loop's time as well)."""

    def __init__(
        self, *, name: str = "run", steps: int = 0, start_version: Version = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._began = clock, clock()
        self._name, self._steps = name, steps
        self._phase = Phase.STARTING
        self._step, self._version, self._live = 0, start_version, start_version
        self._counts = Counter[str]()  # by the name of a field of `Totals`
        self.sources: dict[str, SourceState] = {}
        self.overlap = Overlap()
        self._evaluation = (0, 0)
        self._reward = Mean(REWARD_ROLLOUTS)
        self._ages: deque[Mapping[int, int]] = deque(maxlen=RECENT_BATCHES)
        self._step_ends: deque[float] = deque(maxlen=RECENT_BATCHES)
        self._generation, self._training = Rate(RATE_SECONDS), Rate(RATE_SECONDS)
        self._running: dict[str, tuple[int, float]] = {}
        self._waits: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._dropped: Counter[str] = Counter()
        self._quarantined: dict[str, str] = {}
        self._failures, self._learning = Failures(), Learning(REWARD_ROLLOUTS)
        self._trainer: dict[str, float | None] = {}

    # --- What the assembling code tells, because no station knows it -------------------------------------------------

    def begin_phase(self, phase: Phase, *, num_tasks: int = 0) -> None:
        """Overlap and waiting are shares of the time from `TRAINING` to the next other phase; `num_tasks` is of an evaluation."""
        self._evaluation = (0, num_tasks)
        if phase is Phase.TRAINING and self._phase is not Phase.TRAINING:
            self.overlap.begin(self._clock())
            self._waits.clear()
        if self._phase is Phase.TRAINING and phase is not Phase.TRAINING:
            self.overlap.finish(self._clock())
        self._phase = phase

    def restore(self, *, step: int, version: Version, totals: Totals) -> None:
        """Goes on from the counts of an earlier process of the same run. Versions only grow, also after a crash."""
        self._step, self._counts = step, Counter(asdict(totals))
        self._version, self._live = max(self._version, version), max(self._live, version)

    # --- Facts -------------------------------------------------------------------------------------------------------

    def apply(self, fact: facts.Fact) -> None:
        if isinstance(fact, LEARNED_FROM):
            self._learning.apply(fact)
        match fact:
            case facts.EngineStepped():
                self.overlap.add(ENGINE, fact.started, fact.ended)
                self._generation.add(fact.ended, fact.num_tokens)
                self._running[fact.engine] = (fact.num_running, fact.ended)
                self._counts["generated_tokens"] += fact.num_tokens
            case facts.RequestFailed():
                self._counts["failed_requests"] += 1
            case facts.RolloutEnded():
                self._rollout(fact)
            case facts.GroupClosed(reason=reason):
                self._dropped[reason.value] += 1
            case facts.Waited():
                self._waits[fact.who, fact.for_whom] += fact.seconds
            case facts.Leased(staleness=ages):
                self._ages.append(ages)
                oldest = max((age for age, count in ages.items() if count), default=0)
                self._counts["max_token_staleness"] = max(self._counts["max_token_staleness"], oldest)
            case facts.Stepped():
                self._stepped(fact)
            case facts.WeightsCommitted(version=version) if version > self._live:
                # Several engines commit one version; the version that engines were started with is no update.
                self._live = version
                self._counts["weight_updates"] += 1
            case facts.Quarantined():
                self._quarantined[fact.engine] = fact.error
            case facts.Rejoined(engine=engine):
                self._quarantined.pop(engine, None)
            case facts.Evaluated(source=source):
                self.sources.setdefault(source, SourceState()).evaluated(fact)
            case _:
                pass

    def _rollout(self, rollout: facts.RolloutEnded) -> None:
        if rollout.reward is None:
            self._failures.add(rollout.error)
        if rollout.key.kind is not Kind.TRAINING:
            self._evaluation = (self._evaluation[0] + 1, self._evaluation[1])
            return
        state = self.sources.setdefault(rollout.source, SourceState())
        state.num_rollouts += 1
        self._counts["rollouts"] += 1
        self._counts["failed_rollouts"] += rollout.reward is None
        self._counts["rollouts_spanning_versions"] += rollout.num_versions > 1
        if rollout.reward is not None:
            state.reward.add(rollout.reward)
            self._reward.add(rollout.reward)

    def _stepped(self, step: facts.Stepped) -> None:
        self.overlap.add(TRAINER, step.started, step.ended)
        self._training.add(step.ended, step.num_tokens)
        self._step_ends.append(step.ended)
        self._step += 1
        self._version = step.version
        self._counts["trained_tokens"] += step.num_tokens
        self._trainer = {key: step.metrics[key] for key in TRAINER_KEYS if key in step.metrics}

    # --- Reading -----------------------------------------------------------------------------------------------------

    @property
    def totals(self) -> Totals:
        return Totals(**self._counts)

    @property
    def step(self) -> int:
        """Steps finished, those before a resume included."""
        return self._step

    @property
    def seconds(self) -> float:
        """Since this object was made."""
        return self._clock() - self._began

    def status(self) -> Status:
        now = self._clock()
        shares = self._shares(now)
        num_running = sum(running for running, at in self._running.values() if now - at < RATE_SECONDS)
        bound, advice = judge(engine_busy=shares[ENGINE], trainer_busy=shares[TRAINER])
        return Status(
            phase=self._phase,
            name=self._name,
            step=self._step,
            steps=self._steps,
            version=self._version,
            seconds=now - self._began,
            eta_seconds=self._eta(now),
            evaluated=self._evaluation[0],
            to_evaluate=self._evaluation[1],
            reward=self._reward.value(),
            sources=tuple(state.status(name) for name, state in self.sources.items()),
            staleness=self.staleness(),
            totals=self.totals,
            generation_rate=self._generation.per_second(now),
            training_rate=self._training.per_second(now),
            num_running=num_running,
            quarantined=tuple(self._quarantined),
            failures=dict(self._failures.counts.most_common()),
            learning=self._learning.status(),
            trainer=self._trainer,
            waits=self._wait_shares(now),
            dropped=dict(self._dropped),
            engine_busy=shares[ENGINE],
            trainer_busy=shares[TRAINER],
            overlap_share=shares[2],
            bound=bound,
            advice=advice,
        )

    def staleness(self) -> dict[int, int]:
        """Trained tokens by age over the recent batches, youngest first."""
        total: Counter[int] = Counter()
        for ages in self._ages:
            total.update(ages)
        return dict(sorted(total.items()))

    def _shares(self, now: float) -> tuple[float | None, float | None, float | None]:
        """Engine, trainer and both, as shares of the training phase; none before a step of the trainer shows its side."""
        seconds = self.overlap.seconds(now)
        if seconds <= 0 or not self._step_ends:
            return None, None, None
        engine, trainer, both = self.overlap.busy()
        return min(1.0, engine / seconds), min(1.0, trainer / seconds), min(1.0, both / seconds)

    def _wait_shares(self, now: float) -> tuple[IdleTime, ...]:
        phase = self.overlap.seconds(now)
        pairs = sorted(self._waits.items(), key=lambda item: -item[1])
        return tuple(IdleTime(who, whom, seconds, min(1.0, seconds / phase) if phase > 0 else 0.0) for (who, whom), seconds in pairs)

    def _eta(self, now: float) -> float | None:
        if len(self._step_ends) < 2 or self._phase is not Phase.TRAINING:
            return None
        each = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        return max(0.0, (self._steps - self._step) * each - (now - self._step_ends[-1]))
