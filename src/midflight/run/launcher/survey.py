"""Looks at the tasks of a run before it starts, to see whether every row is a task and how long the
prompts are.
"""

import time
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec
import numpy as np

from midflight.config.sources import SourceSection
from midflight.environments.row_tasks import RowTasks
from midflight.environments.sources import Source
from midflight.errors import ConfigError, TaskFieldMissing
from midflight.text.tokenizer import Tokenizer
from midflight.types import Task

LOOKING_SECONDS = 20.0
"""The processor time for which rows are checked, all sources together. It is enough for a million
short ones. Nothing is refused for it.
"""
MEASURED = 1000
"""Prompts of a source that are tokenised, evenly from its first to its last."""
QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
"""The quantiles of the lengths of prompts that are shown."""


class SourceFindings(msgspec.Struct, frozen=True):
    """The content of a source in numbers. `lengths` are quantiles of the lengths in tokens of the
    `num_measured` prompts that were tokenised.
    """

    name: str
    num_training: int
    num_heldout: int
    num_left_out: int
    num_measured: int = 0
    lengths: tuple[int, ...] = ()
    num_too_long: int = 0
    """The measured prompts that are so long that no token is left for an answer."""


class Survey:
    """Looks at the tasks. Raises `ConfigError` with file and line of the first row that makes no
    task.
    """

    def __init__(self, *, needs_answer: bool, max_context: int) -> None:
        """With `needs_answer`, every task must have a text as `answer`."""
        self._needs_answer = needs_answer
        self._max_context = max_context
        self._left = LOOKING_SECONDS
        self.notes: list[str] = []

    def rows(self, source: Source, section: SourceSection) -> None:
        """Makes every task of a source over rows, until the time is up."""
        if not isinstance(source.training, RowTasks):
            return
        began = time.thread_time()
        number = 0
        total = len(source.training) + len(source.heldout)
        ids = array("q")
        for number, task in enumerate(chain(source.training, source.heldout), start=1):
            if self._needs_answer:
                self._check_answer(source, task, number - 1)
            if section.id:
                ids.append(hash(task.id))
            if number % 1000 == 0 and time.thread_time() - began > self._left:
                break
        self._left = max(0.5, self._left - (time.thread_time() - began))
        if section.id and len(np.unique(np.frombuffer(ids, np.int64))) < len(ids):
            self._refuse_twice(source, section)
        if number < total:
            self.notes.append(
                f"of {source.name} the first {number:,} of {total:,} rows were looked at in "
                f"{LOOKING_SECONDS:.0f} s of processor time: a broken one behind them ends the run "
                "when it is drawn."
            )

    def _check_answer(self, source: Source, task: Task, number: int) -> None:
        try:
            task.text("answer")
        except TaskFieldMissing as error:
            raise ConfigError(
                f"{_place(source, number)}: {error} The environment compares replies with a text: "
                "name its column as answer in environment.sources, which makes numbers texts."
            ) from None

    def _refuse_twice(self, source: Source, section: SourceSection) -> None:
        seen: dict[str, int] = {}
        for number, task in enumerate(chain(source.training, source.heldout)):
            first = seen.setdefault(task.id, number)
            if first != number:
                raise ConfigError(
                    f"{_place(source, number)}: column {section.id!r} is {task.id!r}, as at "
                    f"{_place(source, first)}; ids must be unique within a source: correct one of "
                    "them, or leave the option id out."
                )

    def lengths(self, source: Source, tokenizer: Tokenizer) -> SourceFindings:
        """Tokenises some of the prompts. Raises `RequestRejected` if the chat template refuses
        one.
        """
        lengths = np.array([_length(tokenizer, task) for task in _some(source.training)])
        too_long = int((lengths >= self._max_context).sum())
        if too_long:
            self.notes.append(
                f"{too_long} of {len(lengths)} prompts of {source.name} that were measured have "
                f"{self._max_context} tokens or more (model.max_context), which leaves none for an "
                "answer: their rollouts fail. Raise it, or remove those rows."
            )
        quantiles = tuple(int(x) for x in np.quantile(lengths, QUANTILES, method="nearest"))
        return SourceFindings(
            source.name,
            num_training=len(source.training),
            num_heldout=len(source.heldout),
            num_left_out=source.num_left_out,
            num_measured=len(lengths),
            lengths=quantiles,
            num_too_long=too_long,
        )


def _some(tasks: Sequence[Task]) -> Iterator[Task]:
    return (tasks[i] for i in range(0, len(tasks), -(-len(tasks) // MEASURED)))


def _length(tokenizer: Tokenizer, task: Task) -> int:
    return len(tokenizer.encode(tokenizer.render(task.messages, add_generation_prompt=True)))


def _place(source: Source, number: int) -> str:
    """The place at which the task with this number is written. Training tasks are counted before
    held-out ones.
    """
    tasks = source.training
    if number >= len(tasks):
        number -= len(tasks)
        tasks = source.heldout
    if isinstance(tasks, RowTasks):
        return tasks.place(number)
    return f"task {tasks[number].id} of {source.name}"
