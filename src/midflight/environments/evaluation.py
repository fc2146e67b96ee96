"""Held-out tasks, tried once each, all by one version."""

import asyncio
import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from midflight.config.evaluation import SuiteSection
from midflight.environments.group import Slots
from midflight.types import GroupKey, Kind, RolloutKey, Task, Trajectory, Version
from midflight.types.facts import Evaluated, EvaluationKept, Record, RolloutEnded

UNFINISHED = (
    "its evaluation was over first: a new version came, or the engine fell out that "
    "served the old one"
)
"""Error of a rollout that was ended with its evaluation."""


class RolloutsOfOneVersion(Protocol):
    """Runs one rollout. `RolloutRunner` implements it."""

    async def run(self, key: RolloutKey, task: Task, *, version: Version) -> Trajectory:
        """Returns the trajectory of a rollout. If a version other than `version` sampled any of its
        tokens, it has no reward, and its error names that.
        """
        ...


@dataclass(frozen=True, slots=True)
class SourceScore:
    """The result of an evaluation on one source."""

    source: str
    mean_reward: float | None
    """The mean over the scored tasks; None if there is none (I10: a failure is no zero)."""
    num_scored: int
    num_failed: int
    """The number of tasks that have no reward."""
    error: str | None = None
    """The reason why the first of these has none. Each `RolloutEnded` holds its own."""
    at: dict[str, float] = field(default_factory=dict[str, float])
    """The sampling of a suite, `pass@k` and `best@k`."""

    @property
    def num_tasks(self) -> int:
        return self.num_scored + self.num_failed


def evaluation_key(position: int, *, sample: int = 0) -> RolloutKey:
    """The key of the task at this position of the list. It is the same in every evaluation, so that
    two of them differ by the weights alone. Each sample is in a group of its own, so that functions
    that score a group score each answer by itself.
    """
    return RolloutKey(
        GroupKey(epoch=0, index=position, attempt=sample), sample=0, kind=Kind.EVALUATION
    )


@dataclass(frozen=True, slots=True)
class Suite:
    """A suite of the configuration, with the `rollouts` that sample as it says."""

    section: SuiteSection
    temperature: float
    rollouts: RolloutsOfOneVersion

    def tasks_of(self, tasks: Sequence[Task]) -> list[Task]:
        """Its tasks, each as often as it is asked. The samples of one task stand together."""
        wanted = self.section.sources
        found: list[Task] = []
        for task in tasks:
            if not wanted or task.source in wanted:
                found += [task] * self.section.samples
        return found


class Evaluator:
    """Runs evaluations. `rollouts` must be untracked, because none of their tokens is trained
    on.
    """

    def __init__(
        self,
        *,
        rollouts: RolloutsOfOneVersion,
        slots: Slots,
        record: Record,
        keep: int = 0,
        suites: Sequence[Suite] = (),
        passes: float = 1.0,
    ) -> None:
        """`keep` is the number of rollouts of each source that are kept from an evaluation. They
        are those of its first tasks, the same in each evaluation, so that they can be compared. An
        answer to a suite has passed from the reward `passes`.
        """
        self._rollouts = rollouts
        self._slots = slots
        self._record = record
        self._keep = keep
        self._suites = suites
        self._passes = passes

    def num_rollouts(self, tasks: Sequence[Task]) -> int:
        """Returns the number of rollouts of an evaluation, including its suites."""
        return len(tasks) + sum(len(suite.tasks_of(tasks)) for suite in self._suites)

    async def run(
        self, tasks: Sequence[Task], *, version: Version, over: asyncio.Event | None = None
    ) -> tuple[SourceScore, ...]:
        """Returns the scores of each source in order of appearance. Waits for all rollouts, each of
        which its deadline ends. Cancellation ends them all.

        Every scored task was answered by `version` alone. Once `over` is set it ends the unfinished
        rollouts, whose tasks have then failed.
        """
        over = over or asyncio.Event()
        kept = self._kept(tasks)
        keyed = [(evaluation_key(i), task) for i, task in enumerate(tasks)]
        found = await self._tried(self._rollouts, keyed, version=version, over=over, kept=kept)
        every = _scores(found)
        self._tell(every, version=version)
        for suite in self._suites:
            keyed = _keyed_samples(suite.tasks_of(tasks), suite.section.samples)
            found = await self._tried(suite.rollouts, keyed, version=version, over=over)
            scores = suite_scores(
                suite.section, found, temperature=suite.temperature, passes=self._passes
            )
            self._tell(scores, version=version)
            every += scores
        return every

    def _kept(self, tasks: Sequence[Task]) -> set[int]:
        """Returns the positions of the tasks whose rollouts are kept: the first of each source."""
        kept = set[int]()
        seen = Counter[str]()
        for i, task in enumerate(tasks):
            if seen[task.source] < self._keep:
                kept.add(i)
            seen[task.source] += 1
        return kept

    def _tell(self, scores: Sequence[SourceScore], *, version: Version) -> None:
        for score in scores:
            evaluated = Evaluated(
                version,
                score.source,
                score.num_scored,
                score.mean_reward,
                score.num_failed,
                score.error,
                score.at or None,
            )
            self._record(evaluated)

    async def _tried(
        self,
        rollouts: RolloutsOfOneVersion,
        keyed: Sequence[tuple[RolloutKey, Task]],
        *,
        version: Version,
        over: asyncio.Event,
        kept: Container[int] = (),
    ) -> list[Trajectory]:
        """Waits for all rollouts, and ends as `run` does."""
        started = asyncio.get_running_loop().time()
        running: list[asyncio.Task[Trajectory]] = []
        async with asyncio.TaskGroup() as group:
            for i, (key, task) in enumerate(keyed):
                trying = self._try(rollouts, key, task, version=version, keep=i in kept)
                running.append(group.create_task(trying, name=f"evaluation {key}"))
            ending = group.create_task(_end(running, over))
            await asyncio.gather(*running, return_exceptions=True)
            ending.cancel()
        seconds = asyncio.get_running_loop().time() - started
        found: list[Trajectory] = []
        for (key, task), rollout in zip(keyed, running, strict=True):
            if rollout.cancelled():
                found.append(self._unfinished(key, task, seconds=seconds))
            else:
                found.append(rollout.result())
        return found

    async def _try(
        self,
        rollouts: RolloutsOfOneVersion,
        key: RolloutKey,
        task: Task,
        *,
        version: Version,
        keep: bool,
    ) -> Trajectory:
        """Waits for a slot, which another rollout's end frees, and for the rollout."""
        async with self._slots:
            made = await rollouts.run(key, task, version=version)
        if keep:
            self._record(EvaluationKept(version, task, made))
        return made

    def _unfinished(self, key: RolloutKey, task: Task, *, seconds: float) -> Trajectory:
        """The trajectory of a rollout that was ended, `seconds` after the evaluation began."""
        ended = RolloutEnded(
            key,
            task.source,
            reward=None,
            num_tokens=0,
            num_versions=0,
            seconds=seconds,
            error=UNFINISHED,
        )
        self._record(ended)
        return Trajectory(
            key, task.id, task.source, reward=None, rows=(), error=UNFINISHED, seconds=seconds
        )


def _keyed_samples(tasks: Sequence[Task], samples: int) -> list[tuple[RolloutKey, Task]]:
    """The tasks of a suite with their keys. Each task stands `samples` times in a row."""
    keyed: list[tuple[RolloutKey, Task]] = []
    for i, task in enumerate(tasks):
        position, sample = divmod(i, samples)
        keyed.append((evaluation_key(position, sample=sample), task))
    return keyed


async def _end(rollouts: Sequence[asyncio.Task[Trajectory]], over: asyncio.Event) -> None:
    """Waits until `over` is set, then ends the rollouts. It is cancelled with the evaluation."""
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
    section: SuiteSection, found: Sequence[Trajectory], *, temperature: float, passes: float
) -> tuple[SourceScore, ...]:
    """The scores by source, under the name of the suite. An answer has passed from the reward
    `passes`. A task with fewer than k scored answers is
    in no mean of that k (I10).
    """
    of_tasks = [found[i : i + section.samples] for i in range(0, len(found), section.samples)]
    return tuple(
        _suite_score(section, score, of_tasks, temperature=temperature, passes=passes)
        for score in _scores(found)
    )


def _suite_score(
    section: SuiteSection,
    score: SourceScore,
    of_tasks: Sequence[Sequence[Trajectory]],
    *,
    temperature: float,
    passes: float,
) -> SourceScore:
    rewards: list[list[float]] = []
    for answers in of_tasks:
        if answers[0].source == score.source:
            rewards.append([t.reward for t in answers if t.reward is not None])
    at = {"samples": float(section.samples), "temperature": temperature}
    for k in section.ks:
        passed: list[float] = []
        best: list[float] = []
        for scored in rewards:
            if len(scored) >= k:
                num_passed = sum(reward >= passes for reward in scored)
                passed.append(pass_at(len(scored), num_passed, k))
                best.append(best_at(scored, k))
        if passed:
            at[f"pass@{k}"] = math.fsum(passed) / len(passed)
            at[f"best@{k}"] = math.fsum(best) / len(best)
    return replace(score, source=f"{section.name}/{score.source}", at=at)


def pass_at(num_answers: int, num_passed: int, k: int) -> float:
    """The chance that at least one of k answers has passed, which are drawn from `num_answers`
    without replacement.

        1 - C(n - c, k) / C(n, k)

    Chen et al. 2021, eq. 1. It has no bias, unlike 1 - (1 - c/n)^k.
    """
    return 1 - math.comb(num_answers - num_passed, k) / math.comb(num_answers, k)


def best_at(rewards: Sequence[float], k: int) -> float:
    """The mean of the largest of k rewards, over all ways to draw k of them. The i-th smallest
    reward is the largest in C(i - 1, k - 1) of the C(n, k) ways.
    """
    weighted = [reward * math.comb(i, k - 1) for i, reward in enumerate(sorted(rewards))]
    return math.fsum(weighted) / math.comb(len(rewards), k)
