"""Chooses the task of a source that is tried next, by how often its rollouts have passed lately.

A draw follows from the seed, its position, the groups that have ended and the tasks under way. The
order in which those ended does not matter. A resumed run therefore draws the same tasks as the run
before it would have drawn.
"""

import random
from array import array
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

from midflight.config.sources import CurriculumSection
from midflight.types import GroupKey
from midflight.types.facts import TaskDrawn
from midflight.types.rollouts import GroupScores


class Pool(StrEnum):
    """The pool of a task, by its pass rate."""

    UNSEEN = "unseen"
    HARD = "hard"
    LEARNABLE = "learnable"
    EASY = "easy"


HOPEFUL = (Pool.UNSEEN, Pool.LEARNABLE)
HOPEFUL_SHARE = 0.9
"""The share of the draws for tasks that may teach. A simulated policy needs 0.89 of the rollouts
that it needs without this share (`benchmarks/tasks.py --parts curriculum`).
"""
HARD_BELOW = 0.1
"""Tasks of a lower pass rate are hard."""
EASY_ABOVE = 0.9
"""Tasks of a higher pass rate are easy."""
WINDOW = 16
"""Scored rollouts of a task that its pass rate looks back on, in whole groups, the newest first."""
FLOOR = 0.05
"""Chance of a task that always passes, or never does, relative to one of pass rate 1/2."""
Passes = tuple[GroupKey, int, int]
"""A group that has ended, with how many of its rollouts passed and how many were scored."""


class SourcePools:
    """The tasks of one source by pool, each by its place in the source. Tasks under way are not
    drawn.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._ended = defaultdict[int, list[Passes]](list)
        self._under_way = Counter[int]()
        self.passed = 0
        self.scored = 0
        """Rollouts that pass rates look back on, and how many of them passed."""
        self._sort()

    def _sort(self) -> None:
        """Puts all tasks into their pools. Places rise in a pool, so its order does not depend on
        the order of events.
        """
        unseen = (place for place in range(self._size) if place not in self._ended)
        self._free = {pool: array("I") for pool in Pool}
        self._free[Pool.UNSEEN] = array("I", unseen)
        for place in sorted(self._ended):
            self._free[self.pool(place)].append(place)
        self.sizes = {pool: len(places) for pool, places in self._free.items()}
        """The number of tasks in each pool, including those under way."""

    def restore(self, ended: Iterable[tuple[int, Passes]]) -> None:
        """Takes the results of groups that had ended before any task was begun here."""
        for place, passes in ended:
            self._learn(place, passes)
        self._sort()

    def begin(self, place: int) -> None:
        """A group tries the task."""
        if not self._under_way[place]:
            places = self._free[self.pool(place)]
            del places[bisect_left(places, place)]
        self._under_way[place] += 1

    def end(self, place: int, passes: Passes) -> None:
        """A group that was begun has ended. A group without a scored rollout says nothing about the
        task (I10).
        """
        self.sizes[self.pool(place)] -= 1
        self._learn(place, passes)
        self.sizes[self.pool(place)] += 1
        self._under_way[place] -= 1
        if not self._under_way[place]:
            del self._under_way[place]
            insort(self._free[self.pool(place)], place)

    def _learn(self, place: int, passes: Passes) -> None:
        """Keeps the newest groups that have `WINDOW` scored rollouts together. They are the newest
        by key, so that the order of their ends does not matter.
        """
        if not passes[2]:
            return
        ended = self._ended[place]
        insort(ended, passes)
        self._count(passes, +1)
        while sum(scored for *_, scored in ended[1:]) >= WINDOW:
            self._count(ended.pop(0), -1)

    def _count(self, passes: Passes, sign: int) -> None:
        self.passed += sign * passes[1]
        self.scored += sign * passes[2]

    def rate(self, place: int) -> float | None:
        """Share of the task's latest rollouts that passed; None before the first."""
        if place not in self._ended:
            return None
        ended = self._ended[place]
        return sum(passed for _, passed, _ in ended) / sum(scored for *_, scored in ended)

    def pool(self, place: int) -> Pool:
        rate = self.rate(place)
        if rate is None:
            return Pool.UNSEEN
        if rate < HARD_BELOW:
            return Pool.HARD
        return Pool.EASY if rate > EASY_ABOVE else Pool.LEARNABLE

    def chance(self, place: int) -> float:
        """The chance that a task is taken when it comes up: 4 p (1 - p) and at least `FLOOR`, and 1
        if nothing is known about it.

        With rewards of 0 and 1, p (1 - p) is the variance of the reward, and the expected square of
        the advantage of a rollout.
        """
        rate = self.rate(place)
        if rate is None:
            return 1.0
        return max(FLOOR, 4 * rate * (1 - rate))

    def choose(self, chance: random.Random) -> int:
        """The place of a task that is not under way, or of any task if all are."""
        pools = self._side(chance)
        total = sum(map(len, pools))
        if not total:
            return chance.randrange(self._size)
        while True:  # ends: a task that comes up is taken with a chance of at least `FLOOR`
            place = _nth(pools, chance.randrange(total))
            if chance.random() < self.chance(place):
                return place

    def _side(self, chance: random.Random) -> Sequence[Sequence[int]]:
        """Returns the pools to draw from: those of the tasks that may teach, or the others. If that
        side is empty, it returns all.
        """
        is_hopeful = chance.random() < HOPEFUL_SHARE
        side = [places for pool, places in self._free.items() if (pool in HOPEFUL) == is_hopeful]
        return side if any(side) else list(self._free.values())


def _nth(pools: Iterable[Sequence[int]], number: int) -> int:
    for places in pools:
        if number < len(places):
            return places[number]
        number -= len(places)
    raise AssertionError("there are fewer tasks than were counted")


class Curriculum:
    """Chooses the task of each position of the stream, and records its outcome. Sources keep their
    shares. Posted tasks, whose epochs are below 0, are tried once each and are not part of it.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        section: CurriculumSection,
        *,
        seed: int,
        place_at: Callable[[int, int], tuple[int, int]],
    ) -> None:
        """`sizes` are the numbers of tasks of the sources. `place_at` gives, by epoch and index,
        the number of the source that has its turn and the place of its task.
        """
        self._pools: list[SourcePools] = []
        if section.chooses:
            self._pools = [SourcePools(size) for size in sizes]
        self._section = section
        self._seed = seed
        self._place_at = place_at
        self.chosen: dict[tuple[int, int], int] = {}
        """The places of the tasks that were chosen, here or before a crash, by position."""

    def choose(self, source: int, epoch: int, index: int) -> None:
        """Chooses the task of a position whose turn it is. Without a curriculum, the position keeps
        its task.
        """
        if self._pools:
            chance = random.Random(f"{self._seed}|curriculum|{epoch}|{index}")
            self.chosen[epoch, index] = self._pools[source].choose(chance)

    def begun(self, key: GroupKey) -> TaskDrawn | None:
        """A group tries the task of its position."""
        if not self._pools or key.epoch < 0:
            return None
        source, place = self._place_at(key.epoch, key.index)
        pool = self._pools[source].pool(place)
        self._pools[source].begin(place)
        return TaskDrawn(key, pool.value, self.sizes, self.pass_rate)

    def ended(self, key: GroupKey, rewards: Sequence[float]) -> None:
        """Notes that a group has ended, with the rewards of those of its rollouts that have one."""
        if not self._pools or key.epoch < 0:
            return
        source, place = self._place_at(key.epoch, key.index)
        num_passed = sum(reward >= self._section.passes for reward in rewards)
        self._pools[source].end(place, (key, num_passed, len(rewards)))

    def restore(self, groups: Iterable[GroupScores]) -> None:
        """Takes over the choices made before a crash, and their outcomes."""
        ended = defaultdict[int, list[tuple[int, Passes]]](list)
        for group in groups:
            key = group.key
            if key.epoch < 0:
                continue
            if group.task.place is not None:
                self.chosen[key.epoch, key.index] = group.task.place
            if self._pools and group.is_over:
                source, place = self._place_at(key.epoch, key.index)
                ended[source].append((place, (key, group.num_passed, group.num_scored)))
        for source, of_source in ended.items():
            self._pools[source].restore(of_source)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of tasks in each pool, over all sources."""
        sizes = dict.fromkeys([pool.value for pool in Pool], 0)
        for source in self._pools:
            for pool, size in source.sizes.items():
                sizes[pool.value] += size
        return sizes

    @property
    def pass_rate(self) -> float | None:
        """The share of passed rollouts among those that pass rates look back on, or None if there
        are none.
        """
        scored = sum(source.scored for source in self._pools)
        if not scored:
            return None
        return sum(source.passed for source in self._pools) / scored
