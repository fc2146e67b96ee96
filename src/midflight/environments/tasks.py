"""The tasks of a run: the sources they come from, and the order in which they are tried.

What comes over HTTP while a run goes on is tried before all else. It is kept in a file of the run's
folder, so that a resumed run goes on with what was waiting; the number of the line is the place of
a task.
"""

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from midflight.config.sources import DATASET_SIZE, CurriculumSection, SourceSection, source_names
from midflight.environments.curriculum import Curriculum
from midflight.environments.reasoning_gym import DrawnTasks, draw_tasks, rank_of
from midflight.environments.row_tasks import Ranks, RowBroken, RowSource, TaskMaker
from midflight.environments.rows import Columns
from midflight.errors import ConfigError, NotSupported, Overloaded, RequestRejected
from midflight.types import GroupKey, Json, Task

MAX_SOURCES = 256
"""The order of an epoch holds the number of a source in a byte."""


@dataclass(frozen=True, slots=True)
class Source:
    """Tasks of one kind. `weight` is their share in the stream, relative to the other sources."""

    name: str
    weight: float
    training: Sequence[Task]
    heldout: Sequence[Task] = ()
    shuffle: bool = True
    """Whether each pass through the tasks has an order of its own."""
    num_left_out: int = 0
    """Rows that are in neither, because their content is held out already."""
    held_ranks: Ranks = field(default_factory=lambda: np.zeros(0, np.uint64))
    """Of the contents that it holds out: what is posted must have none of them."""


def load_sources(
    sections: Sequence[SourceSection], *, seed: int, on_entry: Callable[[], None] = lambda: None
) -> tuple[Source, ...]:
    """Draws or opens the tasks of every source. A dataset named twice gives the sources `name` and
    `name-2`. `on_entry` is called for each entry that is drawn of a dataset, and may raise to end
    it.

    No source trains on what another one holds out, of the same dataset or of rows: `ConfigError` if
    a dataset is too small for that. What is posted is no source here.
    """
    names = source_names(sections)
    drawn = {
        i: _drawn(section, names[i], seed=seed, on_entry=on_entry)
        for i, section in enumerate(sections)
        if section.dataset is not None
    }
    for dataset in dict.fromkeys(
        section.dataset for section in sections if section.dataset is not None
    ):
        _check_apart(
            dataset, [drawn[i] for i, section in enumerate(sections) if section.dataset == dataset]
        )
    rows = {
        i: RowSource(section, name=names[i], number=i, seed=seed)
        for i, section in enumerate(sections)
        if section.dataset is None and not section.posted
    }
    look = any(source.needs_contents for source in rows.values())
    held = {i: source.look() for i, source in rows.items()} if look else {}
    of_all = np.concatenate([np.zeros(0, np.uint64), *held.values()])
    split = {i: source.split(held.get(i, of_all), of_all) for i, source in rows.items()}
    sources: list[Source] = []
    for i, section in enumerate(sections):
        if (tasks := drawn.get(i)) is not None:
            ranks = _held_ranks(tasks, seed=seed)
            sources.append(
                Source(
                    names[i],
                    section.weight,
                    tasks.training,
                    tasks.heldout,
                    section.shuffle,
                    held_ranks=ranks,
                )
            )
        elif (made := split.get(i)) is not None:
            ranks = held.get(i, np.zeros(0, np.uint64))
            sources.append(
                Source(
                    names[i],
                    section.weight,
                    made.training,
                    made.heldout,
                    section.shuffle,
                    made.num_left_out,
                    ranks,
                )
            )
    return tuple(sources)


def _held_ranks(drawn: DrawnTasks, *, seed: int) -> Ranks:
    """Of a dataset's contents and of the prompts made of them: who posts tasks need not know which
    field tells contents apart.
    """
    told = {*drawn.heldout_contents, *(str(task.data["question"]) for task in drawn.heldout)}
    return np.asarray([rank_of(content, seed=seed) for content in told], dtype=np.uint64)


def _drawn(
    section: SourceSection, name: str, *, seed: int, on_entry: Callable[[], None]
) -> DrawnTasks:
    heldout = section.num_heldout
    assert section.dataset is not None and isinstance(heldout, int)
    drawn = draw_tasks(
        section.dataset,
        size=section.size or DATASET_SIZE,
        heldout=heldout,
        prompt=section.prompt,
        content=section.content or "question",
        only=section.only,
        options=section.options,
        seed=seed,
        source=name,
        on_entry=on_entry,
    )
    if not section.system:
        return drawn
    training, held = (
        tuple(_with_system(task, section.system) for task in side)
        for side in (drawn.training, drawn.heldout)
    )
    return replace(drawn, training=training, heldout=held)


def _with_system(task: Task, system: str) -> Task:
    messages: list[Json] = [{"role": "system", "content": system}, *task.messages]
    return replace(task, data={**task.data, "messages": messages})


def _check_apart(dataset: str, draws: Sequence[DrawnTasks]) -> None:
    training = frozenset[str]().union(*(drawn.training_contents for drawn in draws))
    shared = training & frozenset[str]().union(*(drawn.heldout_contents for drawn in draws))
    if shared:
        raise ConfigError(
            f"the sources of dataset {dataset!r} would train on {len(shared)} contents that "
            f"another of them holds out, {min(shared)!r} among them: it is too small for their "
            "numbers; lower heldout, or make it one source."
        )


NO_CURRICULUM = CurriculumSection()
Shard: TypeAlias = tuple[int, int]
"""(s, R): of the positions of all epochs, counted from 0, those that leave s when divided by R."""
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
        """`shard`: of all positions, it draws those of this one."""
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
        self._requeued: deque[tuple[GroupKey, Task]] = deque()
        self._permutation = lru_cache(maxsize=4 * len(sources))(self._make_permutation)
        self._order = lru_cache(maxsize=2)(self._make_order)
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
        self._pass_over()
        key = GroupKey(self._epoch, self._index)
        self.curriculum.choose(
            int(self._order(self._epoch)[0][self._index]), self._epoch, self._index
        )
        task = self._task(self._epoch, self._index)
        self._index += 1
        return key, task

    def _pass_over(self) -> None:
        """Goes to the next position of this shard, in the next epoch where this one has none
        left.
        """
        number, of = self._shard
        self._index += (number - self._epoch * self.epoch_length - self._index) % of
        if self._index >= self.epoch_length:
            self.seek(self._epoch + 1, 0)
            self._pass_over()

    def requeue(self, key: GroupKey, task: Task) -> GroupKey:
        """Puts a task before all new ones, behind those requeued earlier, with the attempt counted
        up. Returns its new key.
        """
        again = GroupKey(key.epoch, key.index, key.attempt + 1)
        self._requeued.append((again, task))
        return again

    def seek(self, epoch: int, index: int) -> None:
        """Continues at a position, as a resumed run does. What was requeued stays."""
        if epoch < 0 or not 0 <= index <= self.epoch_length:
            raise ConfigError(
                f"cannot start at epoch {epoch}, index {index}: an epoch has {self.epoch_length} "
                "positions."
            )
        self._epoch = epoch
        self._index = index

    def task_at(self, epoch: int, index: int) -> Task:
        """The task at a position, wherever the stream is: for a resumed run that tries an
        unfinished one again.
        """
        return self._task(epoch, index)

    def _task(self, epoch: int, index: int) -> Task:
        number, place = self.place_at(epoch, index)
        task = self._sources[number].training[place]
        return replace(task, place=place) if (epoch, index) in self.curriculum.chosen else task

    def place_at(self, epoch: int, index: int) -> tuple[int, int]:
        """The number of the source that has its turn at a position, and the place of its task."""
        places, turns = self._order(epoch)
        number = int(places[index])
        if (chosen := self.curriculum.chosen.get((epoch, index))) is not None:
            return number, chosen
        # of the source, since the stream began
        draw = epoch * self._counts[number] + int(turns[index])
        permutation, place = divmod(draw, len(self._sources[number].training))
        return number, self._permutation(number, permutation)[place]

    def _make_order(self, epoch: int) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """By index the source, and how often that source had its turn in the epoch before."""
        shuffled = bytearray(
            b"".join(bytes([number]) * count for number, count in enumerate(self._counts))
        )
        if len(self._counts) > 1:
            random.Random(f"{self._seed}|epoch|{epoch}").shuffle(shuffled)
        places = np.frombuffer(shuffled, np.uint8)
        turns = np.empty(len(places), np.uint32)
        for number, count in enumerate(self._counts):
            turns[places == number] = np.arange(count, dtype=np.uint32)
        return places, turns

    def _make_permutation(self, number: int, permutation: int) -> Sequence[int]:
        """Four bytes a task: about a second for a million of them."""
        size = len(self._sources[number].training)
        if not self._sources[number].shuffle:
            return range(size)
        order = array("I", range(size))
        random.Random(f"{self._seed}|{self._sources[number].name}|{permutation}").shuffle(
            cast("MutableSequence[int]", order)
        )
        return order


def _positions(weights: Sequence[float], *, total: int) -> list[int]:
    """Splits `total` positions by weight, at least one each; the largest remainders get what
    rounding leaves.
    """
    shares = [weight / sum(weights) * total for weight in weights]
    counts = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_remainder[: max(0, total - sum(counts))]:
        counts[i] += 1
    while sum(counts) > total:  # ends: each source has a task, so `total` is at least one each
        counts[counts.index(max(counts))] -= 1
    return counts


def _check_sources(sources: Sequence[Source]) -> None:
    """Ids only of tasks that are in memory."""
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
        ids: set[str] = set()
        for task in source.training if isinstance(source.training, tuple) else ():
            if task.id in ids:
                raise ConfigError(
                    f"source {source.name!r} has two tasks with id {task.id!r}; ids must be unique "
                    "within a source."
                )
            ids.add(task.id)


# --- Tasks that are posted ------------------------------------------------------------------------


POSTED_EPOCH = -1
"""Of the keys of posted tasks, whose index is their line in the file."""
MAX_WAITING = 10_000
"""Posted tasks that were not tried yet: hours of work for most runs. A client that posts more is
told to come back.
"""


class PostedTasks:
    """All that were posted to a run, and how many of them have been drawn. One process writes the
    file.
    """

    def __init__(
        self,
        section: SourceSection,
        path: Path,
        *,
        name: str,
        number: int,
        heldout: Iterable[Source] = (),
        seed: int = 0,
    ) -> None:
        """`number` is the place of the section in `environment.sources`. What `heldout` sources
        hold out is not taken; `seed` is the one that they were drawn with. What a crash cut off at
        the end of the file is taken away."""
        self._held = {int(rank): source.name for source in heldout for rank in source.held_ranks}
        self._seed = seed
        self._maker = TaskMaker(section, name=name, option=f"environment.sources.{number}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0)
        self._ends = [0]
        for line in self._file:
            if line.endswith(b"\n"):
                self._ends.append(self._ends[-1] + len(line))
        self._file.truncate(self._ends[-1])
        self._drawn = 0

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def num_waiting(self) -> int:
        return len(self) - self._drawn

    def post(self, rows: Sequence[Columns]) -> range:
        """Takes all rows or none, and returns their places. `RequestRejected` names the first that
        makes no task or whose content is held out, `Overloaded` says that too many are waiting."""
        for number, row in enumerate(rows):
            try:
                self._maker.task(row, default_id=str(len(self) + number))
            except RowBroken as broken:
                raise RequestRejected(f"task {number}: {broken}", param="tasks") from None
            if (
                self._held
                and (source := self._held.get(rank_of(self._maker.content(row), seed=self._seed)))
                is not None
            ):
                raise RequestRejected(
                    (
                        f"task {number}: its content is held out by source {source!r}, for "
                        "evaluation; "
                        "leave it out, and post the others again."
                    ),
                    param="tasks",
                )
        if self.num_waiting + len(rows) > MAX_WAITING:
            raise Overloaded(
                f"{self.num_waiting:,} posted tasks are waiting, and {MAX_WAITING:,} are the most; "
                f"post these {len(rows):,} when some were drawn."
            )
        lines = [msgspec.json.encode(row) + b"\n" for row in rows]
        self._file.write(b"".join(lines))
        self._file.flush()
        first = len(self)
        for line in lines:
            self._ends.append(self._ends[-1] + len(line))
        return range(first, len(self))

    def draw(self) -> int | None:
        """The place of the next one; None while there is none."""
        if not self.num_waiting:
            return None
        self._drawn += 1
        return self._drawn - 1

    def seek(self, place: int) -> None:
        """Goes on at a place, as a resumed run does."""
        self._drawn = place

    def task(self, place: int) -> Task:
        self._file.seek(self._ends[place])
        row = msgspec.json.decode(
            self._file.read(self._ends[place + 1] - self._ends[place]), type=dict
        )
        return self._maker.task(row, default_id=str(place))


def posted_tasks(
    sections: Sequence[SourceSection],
    folder: Path,
    *,
    heldout: Iterable[Source] = (),
    seed: int = 0,
) -> PostedTasks | None:
    """Those of a run in that folder, in which nothing is that `heldout` sources hold out; None
    where it has no posted source.
    """
    names = source_names(sections)
    for number, section in enumerate(sections):
        if section.posted:
            return PostedTasks(
                section,
                folder / "posted.jsonl",
                name=names[number],
                number=number,
                heldout=heldout,
                seed=seed,
            )
    return None


class TaskStream:
    """New tasks of a run: what was posted before what the other sources have. It never waits;
    without a task to draw it says so.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        posted: PostedTasks | None,
        *,
        seed: int,
        curriculum: CurriculumSection = NO_CURRICULUM,
        shard: Shard = WHOLE,
    ) -> None:
        without = posted is not None and not sources
        self._seeded = (
            None
            if without
            else SeededStream(sources, seed=seed, curriculum=curriculum, shard=shard)
        )
        self.curriculum = None if self._seeded is None else self._seeded.curriculum
        self._posted = posted

    def draw(self) -> GroupKey | None:
        """The key of the next task; None until one is posted."""
        if self._posted is not None and (place := self._posted.draw()) is not None:
            return GroupKey(POSTED_EPOCH, place)
        return None if self._seeded is None else self._seeded.next()[0]

    def post(self, rows: Sequence[Columns]) -> tuple[range, int]:
        """Takes posted tasks, and returns their places and how many are waiting now. `NotSupported`
        in a run that has no posted source.
        """
        if self._posted is None:
            raise NotSupported(
                "posting tasks: this run takes none. Start it with a source of them: "
                "[[environment.sources]] with posted = true."
            )
        return self._posted.post(rows), self._posted.num_waiting

    def task_of(self, key: GroupKey) -> Task:
        """Wherever the stream is: for a resumed run that tries an unfinished one again."""
        if key.epoch == POSTED_EPOCH:
            assert self._posted is not None, "a run keeps its sources"
            return self._posted.task(key.index)
        assert self._seeded is not None, "a run keeps its sources"
        return self._seeded.task_at(key.epoch, key.index)

    def seek(self, epoch: int, index: int, *, posted: int = 0) -> None:
        """Goes on at a position of the seeded stream, and behind so many posted tasks."""
        if self._seeded is not None:
            self._seeded.seek(epoch, index)
        if self._posted is not None:
            self._posted.seek(posted)
