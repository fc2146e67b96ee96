"""Which task of a source is tried next, by how often its rollouts have passed lately.

A draw follows from the seed, its position, the groups that have ended and the tasks under way, in
whatever order those ended. So a resumed run draws what the run that it goes on from would have
drawn.
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
    """Of a task, by its pass rate."""

    UNSEEN = "unseen"
    HARD = "hard"
    LEARNABLE = "learnable"
    EASY = "easy"


HOPEFUL = (Pool.UNSEEN, Pool.LEARNABLE)
"""Those that `curriculum.target` is about."""
Passes = tuple[GroupKey, int, int]
"""A group that has ended: how many of its rollouts passed, and of how many that were scored."""


class SourcePools:
    """The tasks of one source, by their place in it. Those under way are in no pool that is drawn
    from.
    """

    def __init__(self, size: int, section: CurriculumSection) -> None:
        self._size = size
        self._section = section
        self._ended = defaultdict[int, list[Passes]](list)
        self._under_way = Counter[int]()
        self.passed = self.scored = 0
        """Rollouts that pass rates look back on."""
        self._sort()

    def _sort(self) -> None:
        """Puts all tasks into their pools; rising places, so that a pool is the same however it
        came about.
        """
        self._free = {pool: array("I") for pool in Pool}
        self._free[Pool.UNSEEN] = array(
            "I", (place for place in range(self._size) if place not in self._ended)
        )
        for place in sorted(self._ended):
            self._free[self.pool(place)].append(place)
        self.sizes = {pool: len(places) for pool, places in self._free.items()}
        """Tasks of each pool, those under way too."""

    def restore(self, ended: Iterable[tuple[int, Passes]]) -> None:
        """What ended before any task was begun here."""
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
        """A group that was begun has ended; one without a scored rollout says nothing of the task
        (I10).
        """
        self.sizes[self.pool(place)] -= 1
        self._learn(place, passes)
        self.sizes[self.pool(place)] += 1
        self._under_way[place] -= 1
        if not self._under_way[place]:
            del self._under_way[place]
            insort(self._free[self.pool(place)], place)

    def _learn(self, place: int, passes: Passes) -> None:
        """Keeps the newest groups that have `window` scored rollouts together. They are the newest
        by key, so the order of ends does not matter.
        """
        if not passes[2]:
            return
        ended = self._ended[place]
        insort(ended, passes)
        self._count(passes, +1)
        while sum(scored for *_, scored in ended[1:]) >= self._section.window:
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
        if (rate := self.rate(place)) is None:
            return Pool.UNSEEN
        if rate < self._section.hard_below:
            return Pool.HARD
        return Pool.EASY if rate > self._section.easy_above else Pool.LEARNABLE

    def chance(self, place: int) -> float:
        """Of the task to be taken when it comes up: 4 p (1 - p) and at least `floor`, 1 where
        nothing is known of it.

        With rewards of 0 and 1, p (1 - p) is the variance of the reward, and the expected square of
        the advantage of a rollout.
        """
        rate = self.rate(place)
        if rate is None or self._section.priority == "uniform":
            return 1.0
        return max(self._section.floor, 4 * rate * (1 - rate))

    def choose(self, chance: random.Random) -> int:
        """The place of a task that is not under way; of any, where all are."""
        pools = self._side(chance)
        total = sum(map(len, pools))
        if not total:
            return chance.randrange(self._size)
        while True:  # ends: a task that comes up is taken with a chance of at least `floor`
            place = _nth(pools, chance.randrange(total))
            if chance.random() < self.chance(place):
                return place

    def _side(self, chance: random.Random) -> Sequence[Sequence[int]]:
        """The pools to draw from: by the target, or all of them; where one side is empty the
        other.
        """
        target = self._section.target
        wanted = (
            set(Pool)
            if target is None
            else set(HOPEFUL)
            if chance.random() < target
            else set(Pool) - set(HOPEFUL)
        )
        sides = [places for pool, places in self._free.items() if pool in wanted]
        return sides if any(sides) else list(self._free.values())


def _nth(pools: Iterable[Sequence[int]], number: int) -> int:
    for places in pools:
        if number < len(places):
            return places[number]
        number -= len(places)
    raise AssertionError("there are fewer tasks than were counted")


class Curriculum:
    """Which task each position of the stream has, and what came of it. Sources keep their shares.
    Posted tasks, whose epochs are below 0, are tried once each and are no part of it."""

    def __init__(
        self,
        sizes: Sequence[int],
        section: CurriculumSection,
        *,
        seed: int,
        place_at: Callable[[int, int], tuple[int, int]],
    ) -> None:
        """`sizes` of the sources. `place_at` gives by epoch and index the number of the source that
        has its turn, and the place of its task.
        """
        self._pools = [SourcePools(size, section) for size in sizes] if section.chooses else []
        self._section = section
        self._seed = seed
        self._place_at = place_at
        self.chosen: dict[tuple[int, int], int] = {}
        """By position the place of a task that was chosen here, or before a crash."""

    def choose(self, source: int, epoch: int, index: int) -> None:
        """Chooses the task of a position whose turn it is; without a curriculum it has the one that
        it has.
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
        """It has ended, with the rewards of those of its rollouts that have one."""
        if self._pools and key.epoch >= 0:
            source, place = self._place_at(key.epoch, key.index)
            self._pools[source].end(
                place,
                (key, sum(reward >= self._section.passes for reward in rewards), len(rewards)),
            )

    def restore(self, groups: Iterable[GroupScores]) -> None:
        """What was chosen before a crash, and what came of it."""
        ended = defaultdict[int, list[tuple[int, Passes]]](list)
        for group in (group for group in groups if group.key.epoch >= 0):
            key = group.key
            if group.task.place is not None:
                self.chosen[key.epoch, key.index] = group.task.place
            if self._pools and group.is_over:
                source, place = self._place_at(key.epoch, key.index)
                ended[source].append((place, (key, group.num_passed, group.num_scored)))
        for source, of_source in ended.items():
            self._pools[source].restore(of_source)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Tasks of each pool, in all sources."""
        return {pool.value: sum(source.sizes[pool] for source in self._pools) for pool in Pool}

    @property
    def pass_rate(self) -> float | None:
        """Share of the rollouts that passed, of those that pass rates look back on."""
        scored = sum(source.scored for source in self._pools)
        return sum(source.passed for source in self._pools) / scored if scored else None
