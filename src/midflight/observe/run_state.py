"""The events of a run so far: facts added up to the numbers that terminal, journal and summary
show.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain

from midflight.config.cores import CoreUse
from midflight.observe.bottleneck import find_bottleneck
from midflight.observe.failures import Failures
from midflight.observe.learning import LEARNED_FROM, Learning
from midflight.observe.rolling import Mean, Overlap, Rate
from midflight.observe.status import (
    TRAINER_KEYS,
    MemberChanges,
    Phase,
    SourceStatus,
    Status,
    Totals,
    idle_times,
    is_incomplete,
    oldest_age,
)
from midflight.types import Accounts, Kind, Version, facts

RATE_SECONDS = 15.0
"""Window of the tokens per second: a few steps of a small model, short enough to show a stall."""
REWARD_ROLLOUTS = 256
"""Window of the moving reward: two batches of the default size."""
RECENT_BATCHES = 20
"""Window of the staleness histogram, and of the time per step from which the ETA is computed."""

ENGINE = 0
TRAINER = 1


@dataclass(slots=True)
class SourceState:
    """One source of tasks, with the held-out scores of its first and of its last evaluation."""

    reward: Mean = field(default_factory=lambda: Mean(REWARD_ROLLOUTS))
    num_rollouts: int = 0
    first: facts.Evaluated | None = None
    last: facts.Evaluated | None = None

    def evaluated(self, score: facts.Evaluated) -> None:
        self.first = self.first or score
        self.last = score

    def status(self, name: str) -> SourceStatus:
        reward = self.reward.value()
        if self.first is None or self.last is None:
            return SourceStatus(name, reward, self.num_rollouts)
        evaluated_again = self.last is not self.first
        scores = (self.first, self.last)
        return SourceStatus(
            name,
            reward,
            self.num_rollouts,
            self.last.num_tasks,
            heldout_before=self.first.mean_reward,
            heldout_after=self.last.mean_reward if evaluated_again else None,
            failed_before=self.first.num_failed,
            failed_after=self.last.num_failed if evaluated_again else 0,
            incomplete=any(is_incomplete(one.num_tasks, one.num_failed) for one in scores),
        )


class RunState:
    """Adds up facts. It is synchronous. `clock` is CLOCK_MONOTONIC, as in the events; on Linux that
    is the event loop's time as well.
    """

    def __init__(
        self,
        *,
        name: str = "run",
        steps: int = 0,
        start_version: Version = 0,
        slots: int | None = None,
        cores: CoreUse = CoreUse(),
        seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots` is the number of requests that all engines may decode together, and `seconds` the
        time that the run has run so far.
        """
        self._began = clock()
        self._clock = clock
        self._before = seconds
        self.accounts: Callable[[], Accounts] | None = None
        self._name = name
        self._steps = steps
        self._phase = Phase.STARTING
        self._step = 0
        self._version = start_version
        self._digest = ""
        self._live = start_version
        self._counts = Counter[str]()  # by the name of a field of `Totals`
        self.sources: dict[str, SourceState] = {}
        self.overlap = Overlap()
        self._slots = slots
        self._slot_seconds = 0.0  # in use since training began
        self._cores = cores
        self._evaluation = (0, 0)
        self._reward = Mean(REWARD_ROLLOUTS)
        self._ages: deque[Mapping[int, int]] = deque(maxlen=RECENT_BATCHES)
        self._step_ends: deque[float] = deque(maxlen=RECENT_BATCHES)
        # made and in no checkpoint yet: version, tokens
        self._unsaved: list[tuple[Version, int]] = []
        self._generation = Rate(RATE_SECONDS)
        self._training = Rate(RATE_SECONDS)
        self._running: dict[str, tuple[int, float]] = {}
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._quarantined: dict[str, str] = {}
        self._joined: dict[str, bool] = {}  # whether it serves by now
        self._num_left = 0
        self._failures = Failures()
        self._masked_by = Counter[str]()
        self._replaced = Counter[str]()
        self.learning = Learning(REWARD_ROLLOUTS)
        self._trainer: dict[str, float | None] = {}

    # --- What the assembling code tells, because no station knows it ------------------------------

    def begin_phase(self, phase: Phase, *, num_tasks: int = 0) -> None:
        """Begins a phase. Overlap and waiting are shares of the time from `TRAINING` to the next
        other phase; `num_tasks` counts the tasks of an evaluation.
        """
        self._evaluation = (0, num_tasks)
        if phase is Phase.TRAINING and self._phase is not Phase.TRAINING:
            self.overlap.begin(self._clock())
            self._waits.clear()
            self._slot_seconds = 0.0
        if self._phase is Phase.TRAINING and phase is not Phase.TRAINING:
            self.overlap.finish(self._clock())
        self._phase = phase

    def restore(self, *, step: int, version: Version, totals: Totals, seconds: float = 0.0) -> None:
        """Goes on from the counts of an earlier process of the same run, which ran for `seconds` at
        least. Versions and the time only grow, also after a crash.
        """
        self._counts = Counter(asdict(totals))
        self._step = step
        self._before = max(self._before, seconds)
        self._version = max(self._version, version)
        self._live = max(self._live, version)

    # --- Facts ------------------------------------------------------------------------------------

    def apply(self, fact: facts.Fact) -> None:
        if isinstance(fact, LEARNED_FROM):
            self.learning.apply(fact)
        match fact:
            case facts.EngineStepped():
                self._decoded(fact)
            case facts.RequestFailed():
                self._counts["failed_requests"] += 1
            case facts.RolloutEnded():
                self._rollout(fact)
            case facts.SessionEnded():
                self._masked_by.update(fact.masked_by)
                self._replaced.update(fact.replaced)
            case facts.Waited():
                self._waits[f"{fact.who} for {fact.for_whom}"] += fact.seconds
            case facts.Leased(staleness=ages):
                self._ages.append(ages)
                oldest = self._counts["max_token_staleness"]
                self._counts["max_token_staleness"] = max(oldest, oldest_age(ages) or 0)
            case facts.Stepped():
                self._stepped(fact)
            case facts.WeightsCommitted(version=version) if version > self._live:
                # Several engines commit one version; the version that engines were started with is
                # no update.
                self._live = version
                self._counts["weight_updates"] += 1
            case facts.Quarantined() | facts.Rejoined() | facts.EngineJoined() | facts.EngineLeft():
                self._stands(fact)
            case facts.Resumed():
                self._resumed(fact)
            case facts.WentBack(checkpoint=checkpoint):
                self._went_back(checkpoint)
            case facts.Checkpointed(version=version):
                self._unsaved = [made for made in self._unsaved if made[0] > version]
            case facts.Evaluated(source=source):
                self.sources.setdefault(source, SourceState()).evaluated(fact)
            case _:
                pass

    def _decoded(self, step: facts.EngineStepped) -> None:
        self.overlap.add(ENGINE, step.started, step.ended)
        self._generation.add(step.started, step.ended, step.num_tokens)
        self._running[step.engine] = (step.num_running, step.ended)
        self._counts["generated_tokens"] += step.num_tokens
        if self._phase is Phase.TRAINING:
            self._slot_seconds += step.num_running * (step.ended - step.started)

    def _stands(
        self, fact: facts.Quarantined | facts.Rejoined | facts.EngineJoined | facts.EngineLeft
    ) -> None:
        engine = fact.engine
        match fact:
            case facts.Quarantined(error=error):
                self._quarantined[engine] = error
            case facts.Rejoined():
                self._quarantined.pop(engine, None)
                if engine in self._joined:
                    self._joined[engine] = True
            case facts.EngineJoined():
                self._joined[engine] = False
            case facts.EngineLeft():
                self._num_left += 1
                for known in (self._joined, self._quarantined, self._running):
                    known.pop(engine, None)

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
        self._training.add(step.started, step.ended, step.num_tokens)
        self._step_ends.append(step.ended)
        self._step += 1
        self._version = step.version
        self._digest = "" if step.digests is None else step.digests.chain
        self._counts["trained_tokens"] += step.num_tokens
        self._trainer = {key: step.metrics[key] for key in TRAINER_KEYS if key in step.metrics}
        self._unsaved.append((step.version, step.num_tokens))

    def _resumed(self, resumed: facts.Resumed) -> None:
        """Takes counts from the store, which knows of rollouts that were recorded after the
        journal's last line.
        """
        accounts = resumed.accounts
        failed = sum(resumed.failed.values())
        known = {
            "generated_tokens": accounts.received_tokens + resumed.unfinished_tokens,
            "rollouts": sum(resumed.scored.values()) + failed,
            "failed_rollouts": failed,
        }
        for name, number in known.items():
            self._counts[name] = max(self._counts[name], number)
        self._counts["trained_tokens"] = accounts.trained_tokens
        for source in chain(resumed.scored, resumed.failed):
            number = resumed.scored.get(source, 0) + resumed.failed.get(source, 0)
            self.sources.setdefault(source, SourceState()).num_rollouts = number

    def _went_back(self, checkpoint: Version) -> None:
        """Takes back the steps after a checkpoint, to which the trainer went back while this
        process lives: they are in no weights that survive.
        """
        for version, num_tokens in self._unsaved:
            if version > checkpoint:
                self._step -= 1
                self._counts["trained_tokens"] -= num_tokens
        self._unsaved.clear()

    # --- Reading ----------------------------------------------------------------------------------

    @property
    def totals(self) -> Totals:
        return Totals(**self._counts)

    @property
    def step(self) -> int:
        """Steps finished, those before a resume included."""
        return self._step

    @property
    def seconds(self) -> float:
        """The seconds that the run has run, over all its starts."""
        return self._before + self._clock() - self._began

    def status(self) -> Status:
        now = self._clock()
        shares = self._shares(now)
        used = self._used(now)
        bound, advice = find_bottleneck(
            engine_busy=shares[ENGINE],
            trainer_busy=shares[TRAINER],
            slots_used=used,
            cores=self._cores,
        )
        return Status(
            phase=self._phase,
            name=self._name,
            step=self._step,
            steps=self._steps,
            version=self._version,
            seconds=self._before + now - self._began,
            start_seconds=now - self._began,
            training_seconds=self.overlap.seconds(now),
            eta_seconds=self._eta(now),
            evaluated=self._evaluation[0],
            to_evaluate=self._evaluation[1],
            reward=self._reward.value(),
            sources=tuple(state.status(name) for name, state in self.sources.items()),
            staleness=self.staleness(),
            totals=self.totals,
            generation_rate=self._generation.per_second(now),
            training_rate=self._training.per_second(now),
            num_running=self._num_running(now),
            quarantined=tuple(self._quarantined),
            members=self._members(),
            failures=dict(self._failures.counts.most_common()),
            masked_by=dict(self._masked_by.most_common()),
            replaced=dict(self._replaced.most_common()),
            learning=self.learning.status(),
            trainer=self._trainer,
            waits=idle_times(self._waits, self.overlap.seconds(now)),
            accounts=None if self.accounts is None else self.accounts(),
            engine_busy=shares[ENGINE],
            slots_used=used,
            trainer_busy=shares[TRAINER],
            overlap_share=shares[2],
            bound=bound,
            advice=advice,
            digest=self._digest,
        )

    def _num_running(self, now: float) -> int:
        """Requests that decode, by the latest reports of the engines."""
        return sum(running for running, at in self._running.values() if now - at < RATE_SECONDS)

    def _members(self) -> MemberChanges:
        joining = tuple(name for name, serves in self._joined.items() if not serves)
        return MemberChanges(tuple(self._joined), joining, self._num_left)

    def staleness(self) -> dict[int, int]:
        """Trained tokens by age over the recent batches, youngest first."""
        total: Counter[int] = Counter()
        for ages in self._ages:
            total.update(ages)
        return dict(sorted(total.items()))

    def _shares(self, now: float) -> tuple[float | None, float | None, float | None]:
        """The shares of the training phase in which the engines, the trainer and both computed.
        There are none before the first step of the trainer.
        """
        seconds = self.overlap.seconds(now)
        if seconds <= 0 or not self._step_ends:
            return None, None, None
        engine, trainer, both = self.overlap.busy()
        return min(1.0, engine / seconds), min(1.0, trainer / seconds), min(1.0, both / seconds)

    def _used(self, now: float) -> float | None:
        """The mean share of the slots in use since training began, if it is known."""
        seconds = self.overlap.seconds(now)
        if not self._slots or seconds <= 0 or not self._step_ends:
            return None
        return min(1.0, self._slot_seconds / (self._slots * seconds))

    def _eta(self, now: float) -> float | None:
        if len(self._step_ends) < 2 or self._phase is not Phase.TRAINING:
            return None
        step_seconds = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        since_last = now - self._step_ends[-1]
        return max(0.0, (self._steps - self._step) * step_seconds - since_last)
