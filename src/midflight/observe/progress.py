"""What has happened so far: facts added up to what terminal, journal and summary show."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from midflight.observe.intervals import Overlap
from midflight.observe.observers import Silent
from midflight.observe.status import Phase, SourceStatus, Status, Totals, Wait, WarmStartStatus
from midflight.observe.verdict import judge
from midflight.observe.window import Mean, Rate
from midflight.types import GroupKey, Reason, RolloutKey, Version

RATE_SECONDS = 15.0
"""Window of the tokens per second: a few steps of a small model, short enough to show a stall."""
REWARD_ROLLOUTS = 256
"""Window of the moving reward: two batches of the default size."""
RECENT_BATCHES = 20
"""Window of the staleness histogram and of the time per step that the ETA is taken from."""

EVALUATION_ATTEMPT = 2**20
"""Rollouts whose group has this attempt number are evaluation: they are no part of reward and totals."""

ENGINE, TRAINER = 0, 1


@dataclass(slots=True)
class SourceState:
    """One source of tasks. Held-out scores are those of the first and of the last evaluation."""

    reward: Mean = field(default_factory=lambda: Mean(REWARD_ROLLOUTS))
    num_rollouts: int = 0
    num_heldout: int = 0
    heldout: list[tuple[Version, float]] = field(default_factory=list[tuple[int, float]])

    def status(self, name: str) -> SourceStatus:
        before = self.heldout[0][1] if self.heldout else None
        last = self.heldout[-1][1] if len(self.heldout) > 1 else None
        return SourceStatus(name, self.reward.value(), self.num_rollouts, self.num_heldout, before, last)


class RunState(Silent):
    """Adds up facts. Synchronous; `clock` is CLOCK_MONOTONIC, as in the events (on Linux the event loop's time as well)."""

    def __init__(
        self, *, name: str = "run", steps: int = 0, start_version: Version = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._clock, self._began = clock, clock()
        self._name, self._steps = name, steps
        self._phase, self._warm_start = Phase.STARTING, None
        self._step, self._version, self._live = 0, start_version, start_version
        self.totals = Totals()
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

    _warm_start: WarmStartStatus | None

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

    def warm_start_stepped(self, status: WarmStartStatus) -> None:
        self._warm_start = status

    def restore(self, *, step: int, version: Version, totals: Totals) -> None:
        """Goes on from the counts of an earlier process of the same run. Versions only grow, also after a crash."""
        self._step, self.totals = step, totals
        self._version, self._live = max(self._version, version), max(self._live, version)

    # --- Facts -------------------------------------------------------------------------------------------------------

    def engine_stepped(self, *, engine: str, started: float, ended: float, num_tokens: int, num_running: int) -> None:
        self.overlap.add(ENGINE, started, ended)
        self._generation.add(ended, num_tokens)
        self._running[engine] = (num_running, ended)
        self._add(generated_tokens=num_tokens)

    def request_failed(self, *, session_id: str | None, status: int, error: str) -> None:
        self._add(failed_requests=1)

    def rollout_finished(
        self, *, key: RolloutKey, source: str, reward: float | None, num_tokens: int, num_versions: int, seconds: float, error: str | None
    ) -> None:
        if key.group.attempt >= EVALUATION_ATTEMPT:
            self._evaluation = (self._evaluation[0] + 1, self._evaluation[1])
            return
        state = self.sources.setdefault(source, SourceState())
        state.num_rollouts += 1
        self._add(rollouts=1, failed_rollouts=int(reward is None), rollouts_spanning_versions=int(num_versions > 1))
        if reward is not None:
            state.reward.add(reward)
            self._reward.add(reward)

    def group_dropped(self, *, key: GroupKey, reason: Reason, num_tokens: int) -> None:
        self._dropped[reason.value] += 1

    def waited(self, *, who: str, for_whom: str, seconds: float) -> None:
        self._waits[who, for_whom] += seconds

    def batch_taken(self, *, train_version: Version, num_groups: int, num_tokens: int, staleness: Mapping[int, int]) -> None:
        self._ages.append(dict(staleness))
        oldest = max((age for age, count in staleness.items() if count), default=0)
        self.totals = replace(self.totals, max_token_staleness=max(self.totals.max_token_staleness, oldest))

    def step_finished(self, *, version: Version, started: float, ended: float, num_tokens: int, metrics: Mapping[str, float]) -> None:
        self.overlap.add(TRAINER, started, ended)
        self._training.add(ended, num_tokens)
        self._step_ends.append(ended)
        self._step += 1
        self._version = version
        self._add(trained_tokens=num_tokens)

    def weights_committed(self, *, engine: str, version: Version, stage_seconds: float, pause_seconds: float) -> None:
        """Several engines commit one version; the version that engines were started with is no update."""
        if version > self._live:
            self._live = version
            self._add(weight_updates=1)

    def engine_quarantined(self, *, engine: str, error: str) -> None:
        self._quarantined[engine] = error

    def engine_rejoined(self, *, engine: str, version: Version) -> None:
        self._quarantined.pop(engine, None)

    def evaluated(
        self, *, version: Version, source: str, num_tasks: int, mean_reward: float | None, num_failed: int = 0, error: str | None = None
    ) -> None:
        if mean_reward is None:
            return
        state = self.sources.setdefault(source, SourceState())
        state.num_heldout = num_tasks
        state.heldout.append((version, mean_reward))

    # --- Reading -----------------------------------------------------------------------------------------------------

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
            warm_start=self._warm_start,
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

    def _wait_shares(self, now: float) -> tuple[Wait, ...]:
        phase = self.overlap.seconds(now)
        pairs = sorted(self._waits.items(), key=lambda item: -item[1])
        return tuple(Wait(who, whom, seconds, min(1.0, seconds / phase) if phase > 0 else 0.0) for (who, whom), seconds in pairs)

    def _eta(self, now: float) -> float | None:
        if len(self._step_ends) < 2 or self._phase is not Phase.TRAINING:
            return None
        each = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        return max(0.0, (self._steps - self._step) * each - (now - self._step_ends[-1]))

    def _add(
        self,
        *,
        generated_tokens: int = 0,
        trained_tokens: int = 0,
        rollouts: int = 0,
        failed_rollouts: int = 0,
        rollouts_spanning_versions: int = 0,
        failed_requests: int = 0,
        weight_updates: int = 0,
    ) -> None:
        t = self.totals
        self.totals = Totals(
            generated_tokens=t.generated_tokens + generated_tokens,
            trained_tokens=t.trained_tokens + trained_tokens,
            rollouts=t.rollouts + rollouts,
            failed_rollouts=t.failed_rollouts + failed_rollouts,
            rollouts_spanning_versions=t.rollouts_spanning_versions + rollouts_spanning_versions,
            failed_requests=t.failed_requests + failed_requests,
            weight_updates=t.weight_updates + weight_updates,
            max_token_staleness=t.max_token_staleness,
        )


__all__ = ["Phase", "RunState", "SourceStatus", "Status", "Totals", "Wait", "WarmStartStatus"]
