"""Held-out tasks, tried once each, all by one version."""

import asyncio
import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from midflight.config.sections import SuiteSection
from midflight.environments.rollout import Slots
from midflight.types import GroupKey, Kind, RolloutKey, Task, Trajectory, Version
from midflight.types.facts import Evaluated, EvaluationKept, Record, RolloutEnded

UNFINISHED = (
    "its evaluation was over first: a new version came, or the engine fell out that "
    "served the old one"
)
"""Error of a rollout that was ended with its evaluation."""


class RolloutsOfOneVersion(Protocol):
    """What runs one rollout; `RolloutRunner` is one."""

    async def run(self, key: RolloutKey, task: Task, *, version: Version) -> Trajectory:
        """Without reward, and with an error that says so, where any of its tokens is of another
        version.
        """
        ...


@dataclass(frozen=True, slots=True)
class SourceScore:
    """What an evaluation found on one source."""

    source: str
    mean_reward: float | None
    """Over the scored tasks; None if there is none (I10: a failure is no zero)."""
    num_scored: int
    num_failed: int
    """Tasks without reward."""
    error: str | None = None
    """Why the first of them has none; each says so in its `RolloutEnded`."""
    at: dict[str, float] = field(default_factory=dict[str, float])
    """Of a suite: how it sampled, `pass@k` and `best@k`."""

    @property
    def num_tasks(self) -> int:
        return self.num_scored + self.num_failed


def evaluation_key(position: int, *, sample: int = 0) -> RolloutKey:
    """Key of the task at this position of the list. The same in every evaluation, so that two of
    them differ by the weights alone. Samples are in groups of their own: functions that score a
    group score each answer by itself."""
    return RolloutKey(
        GroupKey(epoch=0, index=position, attempt=sample), sample=0, kind=Kind.EVALUATION
    )


@dataclass(frozen=True, slots=True)
class Suite:
    """`rollouts` sample as the suite says."""

    section: SuiteSection
    temperature: float
    rollouts: RolloutsOfOneVersion

    def tasks_of(self, tasks: Sequence[Task]) -> list[Task]:
        """Each as often as it is asked; samples of one task stand together."""
        wanted = self.section.sources
        return [
            task
            for task in tasks
            if not wanted or task.source in wanted
            for _ in range(self.section.samples)
        ]


class Evaluator:
    """Runs evaluations. `rollouts` must be untracked: no token of theirs is trained on."""

    def __init__(
        self,
        *,
        rollouts: RolloutsOfOneVersion,
        slots: Slots,
        record: Record,
        keep: int = 0,
        suites: Sequence[Suite] = (),
    ) -> None:
        """`keep`: rollouts of each source that are kept of an evaluation, those of its first tasks:
        the same in each, to be compared.
        """
        self._rollouts = rollouts
        self._slots = slots
        self._record = record
        self._keep = keep
        self._suites = suites

    def num_rollouts(self, tasks: Sequence[Task]) -> int:
        """Of an evaluation, suites included."""
        return len(tasks) + sum(len(suite.tasks_of(tasks)) for suite in self._suites)

    async def run(
        self, tasks: Sequence[Task], *, version: Version, over: asyncio.Event | None = None
    ) -> tuple[SourceScore, ...]:
        """Scores of each source in order of appearance. Waits for all rollouts, each ended by its
        deadline; cancellation ends all.

        Every scored task was answered by `version` alone. `over`, once set, ends what is
        unfinished: those tasks have failed.
        """
        kept = set[int]()
        seen = Counter[str]()
        for i, task in enumerate(tasks):
            kept |= {i} if seen[task.source] < self._keep else set()
            seen[task.source] += 1
        over = over or asyncio.Event()
        keyed = [(evaluation_key(i), task) for i, task in enumerate(tasks)]
        usual = _scores(
            await self._tried(self._rollouts, keyed, version=version, over=over, kept=kept)
        )
        self._tell(usual, version=version)
        for suite in self._suites:
            keyed = [
                (evaluation_key(i // suite.section.samples, sample=i % suite.section.samples), task)
                for i, task in enumerate(suite.tasks_of(tasks))
            ]
            found = await self._tried(suite.rollouts, keyed, version=version, over=over)
            scores = suite_scores(suite.section, found, temperature=suite.temperature)
            self._tell(scores, version=version)
            usual += scores
        return usual

    def _tell(self, scores: Sequence[SourceScore], *, version: Version) -> None:
        for score in scores:
            self._record(
                Evaluated(
                    version,
                    score.source,
                    score.num_scored,
                    score.mean_reward,
                    score.num_failed,
                    score.error,
                    score.at or None,
                )
            )

    async def _tried(
        self,
        rollouts: RolloutsOfOneVersion,
        keyed: Sequence[tuple[RolloutKey, Task]],
        *,
        version: Version,
        over: asyncio.Event,
        kept: Container[int] = (),
    ) -> list[Trajectory]:
        """Waits for all; ended as `run` says."""
        started = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(
                    self._try(rollouts, key, task, version=version, keep=i in kept),
                    name=f"evaluation {key}",
                )
                for i, (key, task) in enumerate(keyed)
            ]
            ending = group.create_task(_end(running, over))
            await asyncio.gather(*running, return_exceptions=True)
            ending.cancel()
        seconds = asyncio.get_running_loop().time() - started
        return [
            self._unfinished(*keyed[i], seconds=seconds)
            if rollout.cancelled()
            else rollout.result()
            for i, rollout in enumerate(running)
        ]

    async def _try(
        self,
        rollouts: RolloutsOfOneVersion,
        key: RolloutKey,
        task: Task,
        *,
        version: Version,
        keep: bool,
    ) -> Trajectory:
        """Waits for a slot, freed by another rollout's end, and for the rollout."""
        async with self._slots:
            made = await rollouts.run(key, task, version=version)
        if keep:
            self._record(EvaluationKept(version, task, made))
        return made

    def _unfinished(self, key: RolloutKey, task: Task, *, seconds: float) -> Trajectory:
        """What a rollout left that was ended; `seconds` since the evaluation began."""
        error = UNFINISHED
        self._record(
            RolloutEnded(
                key,
                task.source,
                reward=None,
                num_tokens=0,
                num_versions=0,
                seconds=seconds,
                error=error,
            )
        )
        return Trajectory(
            key, task.id, task.source, reward=None, rows=(), error=error, seconds=seconds
        )


async def _end(rollouts: Sequence[asyncio.Task[Trajectory]], over: asyncio.Event) -> None:
    """Waits for the evaluation to be over; ended with it."""
    await over.wait()
    for rollout in rollouts:
        rollout.cancel()


def _scores(trajectories: Iterable[Trajectory]) -> tuple[SourceScore, ...]:
    by_source: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_source.setdefault(trajectory.source, []).append(trajectory)
    return tuple(_score(source, found) for source, found in by_source.items())


def _score(source: str, found: Sequence[Trajectory]) -> SourceScore:
    rewards = [trajectory.reward for trajectory in found if trajectory.reward is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    error = next((trajectory.error for trajectory in found if trajectory.error is not None), None)
    return SourceScore(
        source=source,
        mean_reward=mean,
        num_scored=len(rewards),
        num_failed=len(found) - len(rewards),
        error=error,
    )


# --- Suites ---------------------------------------------------------------------------------------


def suite_scores(
    section: SuiteSection, found: Sequence[Trajectory], *, temperature: float
) -> tuple[SourceScore, ...]:
    """By source, under the name of the suite. A task with fewer than k scored answers is in no mean
    of that k (I10).
    """
    of_tasks = [found[i : i + section.samples] for i in range(0, len(found), section.samples)]
    return tuple(
        _suite_score(section, score, of_tasks, temperature=temperature) for score in _scores(found)
    )


def _suite_score(
    section: SuiteSection,
    score: SourceScore,
    of_tasks: Sequence[Sequence[Trajectory]],
    *,
    temperature: float,
) -> SourceScore:
    rewards = [
        [t.reward for t in answers if t.reward is not None]
        for answers in of_tasks
        if answers[0].source == score.source
    ]
    at = {"samples": float(section.samples), "temperature": temperature}
    for k in section.ks:
        enough = [each for each in rewards if len(each) >= k]
        if enough:
            at[f"pass@{k}"] = math.fsum(
                pass_at(len(each), sum(r >= section.passes for r in each), k) for each in enough
            ) / len(enough)
            at[f"best@{k}"] = math.fsum(best_at(each, k) for each in enough) / len(enough)
    return replace(score, source=f"{section.name}/{score.source}", at=at)


def pass_at(num_answers: int, num_passed: int, k: int) -> float:
    """The chance that of k answers, drawn from `num_answers` without replacement, at least one has
    passed.

        1 - C(n - c, k) / C(n, k)

    Chen et al. 2021, eq. 1: without bias, unlike 1 - (1 - c/n)^k.
    """
    return 1 - math.comb(num_answers - num_passed, k) / math.comb(num_answers, k)


def best_at(rewards: Sequence[float], k: int) -> float:
    """The mean of the largest of k rewards, over all ways to draw k of them: the i-th smallest is
    it in C(i - 1, k - 1) of C(n, k).
    """
    ways = math.comb(len(rewards), k)
    return (
        math.fsum(reward * math.comb(i, k - 1) for i, reward in enumerate(sorted(rewards))) / ways
    )
