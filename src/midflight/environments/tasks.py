"""The new tasks of a run. A task that was posted while the run goes on is tried before all
others.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from midflight.config.sources import CurriculumSection, SourceSection, source_names
from midflight.environments.curriculum import Curriculum
from midflight.environments.posted import POSTED_EPOCH, PostedTasks
from midflight.environments.rows import Columns
from midflight.environments.seeded_stream import NO_CURRICULUM, WHOLE, SeededStream, Shard
from midflight.environments.sources import Source
from midflight.errors import NotSupported
from midflight.types import GroupKey, Task


def posted_tasks(
    sections: Sequence[SourceSection],
    folder: Path,
    *,
    heldout: Iterable[Source] = (),
    seed: int = 0,
) -> PostedTasks | None:
    """Returns the posted tasks of the run in a folder, or None if the run has no posted source.
    Tasks whose content `heldout` sources hold out are refused.
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
    """The new tasks of a run: posted tasks first, then those of the other sources. It never waits:
    if there is no task to draw, its answer says so.
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
        self._posted = posted
        self._seeded: SeededStream | None = None
        self.curriculum: Curriculum | None = None
        if posted is None or sources:
            self._seeded = SeededStream(sources, seed=seed, curriculum=curriculum, shard=shard)
            self.curriculum = self._seeded.curriculum

    def draw(self) -> GroupKey | None:
        """The key of the next task; None until one is posted."""
        if self._posted is not None:
            place = self._posted.draw()
            if place is not None:
                return GroupKey(POSTED_EPOCH, place)
        if self._seeded is None:
            return None
        key, _ = self._seeded.next()
        return key

    def post(self, rows: Sequence[Columns]) -> tuple[range, int]:
        """Takes posted tasks, and returns their places and the number of tasks that wait now.
        Raises `NotSupported` in a run that has no posted source.
        """
        if self._posted is None:
            raise NotSupported(
                "posting tasks: this run takes none. Start it with a source of them: "
                "[[environment.sources]] with posted = true."
            )
        return self._posted.post(rows), self._posted.num_waiting

    def task_of(self, key: GroupKey) -> Task:
        """Returns the task of a key, at any position of the stream. A resumed run uses it to try an
        unfinished task again.
        """
        if key.epoch == POSTED_EPOCH:
            assert self._posted is not None, "a run keeps its sources"
            return self._posted.task(key.index)
        assert self._seeded is not None, "a run keeps its sources"
        return self._seeded.task_at(key.epoch, key.index)

    def seek(self, epoch: int, index: int, *, posted: int = 0) -> None:
        """Goes on at a position of the seeded stream, and behind the first `posted` posted
        tasks.
        """
        if self._seeded is not None:
            self._seeded.seek(epoch, index)
        if self._posted is not None:
            self._posted.seek(posted)
