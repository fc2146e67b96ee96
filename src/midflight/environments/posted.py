"""The tasks that were posted to a run over HTTP.

They are kept in a file of the run's folder, so that a resumed run goes on with those that were
waiting. The number of a line is the place of its task.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from midflight.config.sources import SourceSection
from midflight.environments.reasoning_gym import rank_of
from midflight.environments.row_tasks import InvalidRow, TaskMaker
from midflight.environments.rows import Columns
from midflight.environments.sources import Source
from midflight.errors import Overloaded, RequestRejected
from midflight.types import Task

POSTED_EPOCH = -1
"""The epoch in the keys of posted tasks. Their index is their line in the file."""
MAX_WAITING = 10_000
"""The number of posted tasks that may wait: hours of work for most runs. A client that posts more
gets an error, and may try again later.
"""


class PostedTasks:
    """All tasks that were posted to a run, and how many of them have been drawn. One process writes
    the file.
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
        """`number` is the place of the section in `environment.sources`. Tasks whose content
        `heldout` sources hold out are refused; `seed` is the one with which these were drawn. A
        line that a crash cut short at the end of the file is removed.
        """
        self._held: dict[int, str] = {}
        for source in heldout:
            for rank in source.held_ranks:
                self._held[int(rank)] = source.name
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
        """Takes all rows or none, and returns their places. Raises `RequestRejected` with the first
        row that makes no task or whose content is held out. Raises `Overloaded` if too many tasks
        are waiting.
        """
        for number, row in enumerate(rows):
            self._check(number, row)
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

    def _check(self, number: int, row: Columns) -> None:
        try:
            self._maker.task(row, default_id=str(len(self) + number))
        except InvalidRow as broken:
            raise RequestRejected(f"task {number}: {broken}", param="tasks") from None
        if not self._held:
            return
        rank = rank_of(self._maker.content(row), seed=self._seed)
        if rank in self._held:
            raise RequestRejected(
                f"task {number}: its content is held out by source {self._held[rank]!r}, for "
                "evaluation; leave it out, and post the others again.",
                param="tasks",
            )

    def draw(self) -> int | None:
        """The place of the next task; None while there is none."""
        if not self.num_waiting:
            return None
        self._drawn += 1
        return self._drawn - 1

    def seek(self, place: int) -> None:
        """Goes on at a place, as a resumed run does."""
        self._drawn = place

    def task(self, place: int) -> Task:
        begin = self._ends[place]
        end = self._ends[place + 1]
        self._file.seek(begin)
        row = msgspec.json.decode(self._file.read(end - begin), type=dict)
        return self._maker.task(row, default_id=str(place))
