"""The tasks of a run: the sources they come from, and the order in which they are tried."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from midflight.config.sections import SourceSection
from midflight.environments.reasoning_gym import DrawnTasks, draw_tasks
from midflight.errors import ConfigError
from midflight.types import GroupKey, Task


@dataclass(frozen=True, slots=True)
class Source:
    """Tasks of one kind. `weight` is their share in the stream, relative to the other sources."""

    name: str
    weight: float
    training: tuple[Task, ...]
    heldout: tuple[Task, ...] = ()


def load_sources(sections: Sequence[SourceSection], *, seed: int) -> tuple[Source, ...]:
    """Draws the tasks of every source. A dataset named twice gives the sources `name` and `name-2`.

    No source trains on what another one of the same dataset holds out: `ConfigError` if it is too small for that.
    """
    seen: Counter[str] = Counter()
    draws: dict[str, list[DrawnTasks]] = {}
    sources: list[Source] = []
    for section in sections:
        seen[section.dataset] += 1
        name = section.dataset if seen[section.dataset] == 1 else f"{section.dataset}-{seen[section.dataset]}"
        drawn = draw_tasks(
            section.dataset,
            size=section.size,
            heldout=section.heldout,
            prompt=section.prompt,
            content=section.content,
            only=section.only,
            options=section.options,
            seed=seed,
            source=name,
        )
        draws.setdefault(section.dataset, []).append(drawn)
        sources.append(Source(name=name, weight=section.weight, training=drawn.training, heldout=drawn.heldout))
    for dataset, drawn_of_one in draws.items():
        _check_apart(dataset, drawn_of_one)
    return tuple(sources)


def _check_apart(dataset: str, draws: Sequence[DrawnTasks]) -> None:
    training = frozenset[str]().union(*(drawn.training_contents for drawn in draws))
    shared = training & frozenset[str]().union(*(drawn.heldout_contents for drawn in draws))
    if shared:
        raise ConfigError(
            f"the sources of dataset {dataset!r} would train on {len(shared)} contents that another of them holds out, "
            f"{min(shared)!r} among them: it is too small for their numbers; lower heldout, or make it one source."
        )


class SeededStream:
    """An endless stream of tasks from weighted sources. It never waits, and has no bubble between epochs.

    An epoch has as many positions as there are training tasks. Each source has the same number of them in every epoch, by its
    weight, at places shuffled anew. A source goes through its own tasks in seeded permutations, one after the other without a
    break and each to its end: with one source, or weights in proportion to the sizes, an epoch is one permutation of all tasks.
    """

    def __init__(self, sources: Sequence[Source], *, seed: int) -> None:
        _check_sources(sources)
        self._sources = tuple(sources)
        self._seed = seed
        self._counts = _positions([source.weight for source in sources], total=sum(len(source.training) for source in sources))
        self._requeued: deque[tuple[GroupKey, Task]] = deque()
        self._permutation = lru_cache(maxsize=4 * len(sources))(self._make_permutation)
        self.seek(0, 0)

    @property
    def epoch_length(self) -> int:
        """Positions of one epoch."""
        return sum(self._counts)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, index) of the next new task; requeued ones come before it."""
        return self._epoch, self._index

    def next(self) -> tuple[GroupKey, Task]:
        if self._requeued:
            return self._requeued.popleft()
        if self._index == self.epoch_length:
            self.seek(self._epoch + 1, 0)
        key = GroupKey(self._epoch, self._index)
        task = self._order[self._index]
        self._index += 1
        return key, task

    def requeue(self, key: GroupKey, task: Task) -> GroupKey:
        """Puts a task before all new ones, behind those requeued earlier, with the attempt counted up. Returns its new key."""
        again = GroupKey(key.epoch, key.index, key.attempt + 1)
        self._requeued.append((again, task))
        return again

    def seek(self, epoch: int, index: int) -> None:
        """Continues at a position, as a resumed run does. What was requeued stays."""
        if epoch < 0 or not 0 <= index <= self.epoch_length:
            raise ConfigError(f"cannot start at epoch {epoch}, index {index}: an epoch has {self.epoch_length} positions.")
        self._order = self._epoch_order(epoch)
        self._epoch, self._index = epoch, index

    def task_at(self, epoch: int, index: int) -> Task:
        """The task at a position, wherever the stream is: for a resumed run that tries an unfinished one again."""
        return (self._order if epoch == self._epoch else self._epoch_order(epoch))[index]

    def _epoch_order(self, epoch: int) -> list[Task]:
        places = [number for number, count in enumerate(self._counts) for _ in range(count)]
        random.Random(f"{self._seed}|epoch|{epoch}").shuffle(places)
        drawn = [epoch * count for count in self._counts]
        order: list[Task] = []
        for number in places:
            order.append(self._draw(number, drawn[number]))
            drawn[number] += 1
        return order

    def _draw(self, number: int, draw: int) -> Task:
        """The `draw`-th task of a source since the stream began."""
        tasks = self._sources[number].training
        permutation, place = divmod(draw, len(tasks))
        return tasks[self._permutation(number, permutation)[place]]

    def _make_permutation(self, number: int, permutation: int) -> list[int]:
        order = list(range(len(self._sources[number].training)))
        random.Random(f"{self._seed}|{self._sources[number].name}|{permutation}").shuffle(order)
        return order


def _positions(weights: Sequence[float], *, total: int) -> list[int]:
    """Splits `total` positions by weight, at least one each; the largest remainders get what rounding leaves."""
    shares = [weight / sum(weights) * total for weight in weights]
    counts = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_remainder[: max(0, total - sum(counts))]:
        counts[i] += 1
    while sum(counts) > total:  # ends: each source has a task, so `total` is at least one each
        counts[counts.index(max(counts))] -= 1
    return counts


def _check_sources(sources: Sequence[Source]) -> None:
    if not sources:
        raise ConfigError("there is no source of tasks; name at least one in environment.sources.")
    names: set[str] = set()
    for source in sources:
        if source.name in names:
            raise ConfigError(f"two sources are called {source.name!r}; give them different names.")
        names.add(source.name)
        if not source.training:
            raise ConfigError(f"source {source.name!r} has no training task; raise its size or remove it.")
        if source.weight <= 0:
            raise ConfigError(f"source {source.name!r} has weight {source.weight}, expected more than 0; remove the source instead.")
        ids: set[str] = set()
        for task in source.training:
            if task.id in ids:
                raise ConfigError(f"source {source.name!r} has two tasks with id {task.id!r}; ids must be unique within a source.")
            ids.add(task.id)
