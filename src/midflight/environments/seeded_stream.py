"""The order in which the tasks of weighted sources are tried: it follows from the seed alone."""

import random
from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from midflight.config.sources import CurriculumSection
from midflight.environments.curriculum import Curriculum
from midflight.environments.sources import Source
from midflight.errors import ConfigError
from midflight.types import GroupKey, Task

MAX_SOURCES = 256
"""The order of an epoch holds the number of a source in a byte."""
NO_CURRICULUM = CurriculumSection()
Shard: TypeAlias = tuple[int, int]
"""(s, R): the positions that leave s when divided by R, where the positions of all epochs are
counted from 0.
"""
WHOLE: Shard = (0, 1)


class SeededStream:
    """An endless stream of tasks from weighted sources. It never waits, and has no bubble between
    epochs.

    An epoch has as many positions as there are training tasks. Each source has the same number of
    them in every epoch, by its weight, at places shuffled anew. A source goes through its own tasks
    in seeded permutations, one after the other without a break and each to its end: with one
    source, or weights in proportion to the sizes, an epoch is one permutation of all tasks. A
    curriculum chooses for itself which task of a source has the source's turn.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seed: int,
        curriculum: CurriculumSection = NO_CURRICULUM,
        shard: Shard = WHOLE,
    ) -> None:
        """It draws the positions of this `shard` only."""
        _check_sources(sources)
        self._shard = shard
        self.curriculum = Curriculum(
            [len(source.training) for source in sources],
            curriculum,
            seed=seed,
            place_at=self.place_at,
        )
        self._sources = tuple(sources)
        self._seed = seed
        self._counts = _positions(
            [source.weight for source in sources],
            total=sum(len(source.training) for source in sources),
        )
        self._permutation = lru_cache(maxsize=4 * len(sources))(self._make_permutation)
        self._order = lru_cache(maxsize=2)(self._make_order)
        self.seek(0, 0)

    @property
    def epoch_length(self) -> int:
        """Positions of one epoch."""
        return sum(self._counts)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, index) of the next task."""
        return self._epoch, self._index

    def next(self) -> tuple[GroupKey, Task]:
        self._pass_over()
        key = GroupKey(self._epoch, self._index)
        places, _ = self._order(self._epoch)
        self.curriculum.choose(int(places[self._index]), self._epoch, self._index)
        task = self._task(self._epoch, self._index)
        self._index += 1
        return key, task

    def _pass_over(self) -> None:
        """Goes to the next position of this shard, in the next epoch if this one has none left."""
        number, of = self._shard
        self._index += (number - self._epoch * self.epoch_length - self._index) % of
        if self._index >= self.epoch_length:
            self.seek(self._epoch + 1, 0)
            self._pass_over()

    def seek(self, epoch: int, index: int) -> None:
        """Continues at a position, as a resumed run does."""
        if epoch < 0 or not 0 <= index <= self.epoch_length:
            raise ConfigError(
                f"cannot start at epoch {epoch}, index {index}: an epoch has {self.epoch_length} "
                "positions."
            )
        self._epoch = epoch
        self._index = index

    def task_at(self, epoch: int, index: int) -> Task:
        """Returns the task at a position, which need not be that of the stream. A resumed run uses
        it to try an unfinished task again.
        """
        return self._task(epoch, index)

    def _task(self, epoch: int, index: int) -> Task:
        number, place = self.place_at(epoch, index)
        task = self._sources[number].training[place]
        if (epoch, index) in self.curriculum.chosen:
            return replace(task, place=place)
        return task

    def place_at(self, epoch: int, index: int) -> tuple[int, int]:
        """The number of the source that has its turn at a position, and the place of its task."""
        places, turns = self._order(epoch)
        number = int(places[index])
        chosen = self.curriculum.chosen.get((epoch, index))
        if chosen is not None:
            return number, chosen
        # The number of draws from the source since the stream began.
        draw = epoch * self._counts[number] + int(turns[index])
        permutation, place = divmod(draw, len(self._sources[number].training))
        return number, self._permutation(number, permutation)[place]

    def _make_order(self, epoch: int) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """The source at each index, and how often it had its turn in this epoch before that
        index.
        """
        shuffled = bytearray()
        for number, count in enumerate(self._counts):
            shuffled += bytes([number]) * count
        if len(self._counts) > 1:
            random.Random(f"{self._seed}|epoch|{epoch}").shuffle(shuffled)
        places = np.frombuffer(shuffled, np.uint8)
        turns = np.empty(len(places), np.uint32)
        for number, count in enumerate(self._counts):
            turns[places == number] = np.arange(count, dtype=np.uint32)
        return places, turns

    def _make_permutation(self, number: int, permutation: int) -> Sequence[int]:
        """The order of a source's tasks in one pass. It takes four bytes a task, and about a second
        for a million of them.
        """
        source = self._sources[number]
        size = len(source.training)
        if not source.shuffle:
            return range(size)
        order = array("I", range(size))
        chance = random.Random(f"{self._seed}|{source.name}|{permutation}")
        chance.shuffle(cast("MutableSequence[int]", order))
        return order


def _positions(weights: Sequence[float], *, total: int) -> list[int]:
    """Splits `total` positions by weight, at least one for each source. The largest remainders get
    the positions that rounding leaves.
    """
    total_weight = sum(weights)
    shares = [weight / total_weight * total for weight in weights]
    counts = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_remainder[: max(0, total - sum(counts))]:
        counts[i] += 1
    while sum(counts) > total:  # ends: each source has a task, so `total` is at least one each
        counts[counts.index(max(counts))] -= 1
    return counts


def _check_sources(sources: Sequence[Source]) -> None:
    """Raises `ConfigError` for sources that give no stream. Only the ids of tasks in memory are
    checked.
    """
    if len(sources) > MAX_SOURCES:
        raise ConfigError(
            f"environment.sources has {len(sources)} sources, and {MAX_SOURCES} are the most; put "
            "rows of some into one file."
        )
    if not sources:
        raise ConfigError("there is no source of tasks; name at least one in environment.sources.")
    names: set[str] = set()
    for source in sources:
        if source.name in names:
            raise ConfigError(f"two sources are called {source.name!r}; give them different names.")
        names.add(source.name)
        if not source.training:
            raise ConfigError(
                f"source {source.name!r} has no training task; raise its size or remove it."
            )
        if source.weight <= 0:
            raise ConfigError(
                f"source {source.name!r} has weight {source.weight}, expected more than 0; remove "
                "the source instead."
            )
        if isinstance(source.training, tuple):
            _check_ids(source.name, source.training)


def _check_ids(name: str, tasks: Sequence[Task]) -> None:
    ids: set[str] = set()
    for task in tasks:
        if task.id in ids:
            raise ConfigError(
                f"source {name!r} has two tasks with id {task.id!r}; ids must be unique "
                "within a source."
            )
        ids.add(task.id)
