"""Tasks from the user's own rows: their prompts and answers, and the held-out ones among them.

As with datasets of reasoning-gym, a hash of content and seed decides. The contents of lowest hash
are held out, so that the order of the rows does not matter. A row whose content this source or
another one holds out is not trained on.
"""

import json
import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, overload

import numpy as np
from numpy.typing import NDArray

from midflight.config.sources import SourceSection
from midflight.environments.reasoning_gym import pattern_of, rank_of
from midflight.environments.rows import SHOWN, Columns, SourceRows, open_rows, rows_of_entry
from midflight.errors import ConfigError, nearest
from midflight.types import Json, Task

Ranks = NDArray[np.uint64]
"""The hash of the content of each row."""


class InvalidRow(Exception):
    """No task can be made of a row, for the reason in the text. The code that knows the row's place
    adds it.
    """


class TaskMaker:
    """Makes tasks of rows. Raises `InvalidRow` with column and option if a task cannot be made."""

    def __init__(self, section: SourceSection, *, name: str, option: str) -> None:
        """`option` is the source's own key, such as `environment.sources.0`."""
        self.name = name
        self._section = section
        self._option = option
        self._columns = _template_columns(section.prompt, option)

    def task(self, row: Columns, *, default_id: str) -> Task:
        """The task of a row. Its data are all columns, with `question` or `messages` as the prompt,
        and `answer` if an option names it.
        """
        section = self._section
        prompt = self._prompt(row)
        data = {name: value for name, value in row.items() if name != "messages"}
        if isinstance(prompt, str):
            data["question"] = prompt
        if section.system or not isinstance(prompt, str):
            data["messages"] = self._with_system(prompt)
        if section.answer:
            data["answer"] = self._answer(self._column(row, section.answer, "answer"))
        task_id = default_id
        if section.id:
            task_id = self._id(self._column(row, section.id, "id"))
        return Task(task_id, self.name, data)

    def content(self, row: Columns) -> str:
        """A text that identifies the row's content."""
        name = self._section.content
        value = self._column(row, name, "content") if name else self._prompt(row)
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True)

    def _column(self, row: Columns, name: str, option: str) -> Json:
        if name not in row:
            near = nearest(name, row)
            raise InvalidRow(
                f"there is no column {name!r}, which {self._option}.{option} names; there are "
                f"{', '.join(row) or 'none'}.{near if 'mean' in near else ''}"
            )
        return row[name]

    # --- What is asked ----------------------------------------------------------------------------

    def _prompt(self, row: Columns) -> str | list[Json]:
        prompt = self._section.prompt
        if self._columns is None:
            value = self._column(row, prompt, "prompt")
            return value if isinstance(value, str) and value else self._conversation(value)
        values = {name: self._printed(row, name) for name in self._columns}
        try:
            return prompt.format(**values)
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidRow(
                f"{self._option}.prompt {prompt!r} cannot be filled in: {error}; write a literal "
                "brace twice."
            ) from error

    def _printed(self, row: Columns, name: str) -> str | float:
        value = self._column(row, name, "prompt")
        if value is None or isinstance(value, list | dict):
            raise InvalidRow(
                f"column {name!r} holds {_short(value)}, which {self._option}.prompt "
                f"{self._section.prompt!r} cannot print; give it a text or a number, or remove the "
                "row."
            )
        return value

    def _conversation(self, value: Json) -> list[Json]:
        column = f"column {self._section.prompt!r}"
        wanted = "expected a text, or a list of messages that ends with a user's or a tool's"
        if not isinstance(value, list) or not value:
            raise InvalidRow(f"{column} holds {_short(value)}; {wanted}.")
        for number, message in enumerate(value):
            if not _is_message(message):
                raise InvalidRow(
                    f"{column}: message {number} is {_short(message)}; give it a role and a "
                    "content."
                )
        if _role(value[-1]) == "assistant":
            raise InvalidRow(
                f"{column} ends with an assistant's message, so there is nothing to answer; "
                f"{wanted}."
            )
        return value

    def _with_system(self, prompt: str | list[Json]) -> list[Json]:
        if isinstance(prompt, str):
            messages: list[Json] = [{"role": "user", "content": prompt}]
        else:
            messages = prompt
        if not self._section.system:
            return messages
        if _role(messages[0]) == "system":
            raise InvalidRow(
                f"the conversation has a system message of its own beside {self._option}.system; "
                "remove one of them."
            )
        return [{"role": "system", "content": self._section.system}, *messages]

    # --- What is expected -------------------------------------------------------------------------

    def _answer(self, value: Json) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return json.dumps(value)
        raise InvalidRow(
            f"column {self._section.answer!r} holds {_short(value)}, and {self._option}.answer "
            "takes a text or a number; correct the row, or leave the option out and let a "
            "reward read the column."
        )

    def _id(self, value: Json) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise InvalidRow(
                f"column {self._section.id!r} holds {_short(value)}, and {self._option}.id takes a "
                "text or a whole number; correct the row."
            )
        return str(value)


def _is_message(message: Json) -> bool:
    if not isinstance(message, dict) or "content" not in message:
        return False
    return isinstance(message.get("role"), str)


def _role(message: Json) -> Json:
    return cast("dict[str, Json]", message)["role"]


def _short(value: Json) -> str:
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]} ..."


def _template_columns(prompt: str, option: str) -> tuple[str, ...] | None:
    """Returns the columns that a format names, or None if the prompt is the name of a column."""
    if "{" not in prompt and "}" not in prompt:
        return None
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"{option}.prompt {prompt!r} is not a format: {error}; write a literal brace twice."
        ) from error
    if not names or not all(names):
        raise ConfigError(
            f"{option}.prompt {prompt!r} names no column where it should; write its name between "
            f"braces, such as {{question}}."
        )
    return tuple(dict.fromkeys(names))


# --- Tasks that are made when they are asked for --------------------------------------------------


class RowTasks(Sequence[Task]):
    """The tasks of some rows, by number. No task is kept: each is made again from its row. Raises
    `ConfigError` with the place of a broken row.
    """

    def __init__(
        self,
        rows: SourceRows,
        maker: TaskMaker,
        numbers: range | NDArray[np.uint32],
        *,
        prefix: str = "",
    ) -> None:
        """`numbers` are those of the rows, rising. `prefix` begins the ids of rows that have
        none.
        """
        self.rows = rows
        self._maker = maker
        self._numbers = numbers
        self._prefix = prefix

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Task: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Task, ...]: ...
    def __getitem__(self, place: int | slice) -> Task | tuple[Task, ...]:
        if isinstance(place, slice):
            return tuple(self[i] for i in range(len(self))[place])
        number = int(self._numbers[place])
        return self._task(number, self.rows[number])

    def __iter__(self) -> Iterator[Task]:
        """All tasks in order. This is faster than reading them one by one."""
        wanted = np.zeros(len(self.rows), bool)
        wanted[self._numbers] = True
        return (self._task(number, row) for number, row in enumerate(self.rows) if wanted[number])

    def place(self, place: int) -> str:
        """The place of a task's row."""
        return self.rows.place(int(self._numbers[place]))

    def _task(self, number: int, row: Columns) -> Task:
        try:
            return self._maker.task(row, default_id=f"{self._prefix}{number}")
        except InvalidRow as broken:
            raise ConfigError(f"{self.rows.place(number)}: {broken}") from None


# --- The split ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SplitTasks:
    """The tasks of a source, split into training and held-out ones."""

    training: RowTasks
    heldout: RowTasks
    num_left_out: int
    """Rows that are on neither side, because their content is held out already, here or by another
    source.
    """


class RowSource:
    """One source over rows. The contents of all rows are looked at only if that is needed."""

    def __init__(self, section: SourceSection, *, name: str, number: int, seed: int) -> None:
        """Opens the rows that the section names. `number` is its place in `environment.sources`."""
        self._section = section
        self._seed = seed
        self._option = f"environment.sources.{number}"
        self._pattern = pattern_of(section.only)
        self._maker = TaskMaker(section, name=name, option=self._option)
        self._rows = self._open()
        self._apart: SourceRows | None = None
        if isinstance(section.heldout, Path):
            self._apart = open_rows(section.heldout, option=f"{self._option}.heldout")
        self._ranks = np.zeros(0, np.uint64)
        self._wanted: NDArray[np.bool_] | None = None
        if not len(self._rows):
            raise ConfigError(
                f"{self._option}: {section.origin} has no rows; give it some, or remove the source."
            )

    def _open(self) -> SourceRows:
        section = self._section
        if section.path is not None:
            return open_rows(section.path, option=f"{self._option}.path")
        assert section.entry is not None
        return rows_of_entry(section.entry, section.options, option=f"{self._option}.entry")

    @property
    def needs_contents(self) -> bool:
        return self._section.has_heldout or self._pattern is not None

    def look(self) -> Ranks:
        """Looks at the contents of all rows, and returns the ranks of those that are held out, each
        once and in rising order.
        """
        self._ranks, self._wanted = self._ranks_of(self._rows)
        held = self._section.num_heldout
        if self._apart is not None:
            ranks, _ = self._ranks_of(self._apart)
            return np.unique(ranks)
        distinct = np.unique(self._ranks if self._wanted is None else self._ranks[self._wanted])
        number = round(held * len(distinct)) if isinstance(held, float) else cast(int, held)
        if number >= len(distinct):
            matching = "" if self._pattern is None else " that match only"
            raise ConfigError(
                f"{self._option}.heldout is {held}, and {self._section.origin} has {len(distinct)} "
                f"rows of distinct content{matching}: none would be left to train on; lower "
                "heldout."
            )
        return distinct[:number]

    def _ranks_of(self, rows: SourceRows) -> tuple[Ranks, NDArray[np.bool_] | None]:
        """The rank of the content of each row, and whether it matches the pattern."""
        ranks = np.empty(len(rows), np.uint64)
        wanted = None if self._pattern is None else np.empty(len(rows), bool)
        for number, row in enumerate(rows):
            try:
                content = self._maker.content(row)
            except InvalidRow as broken:
                raise ConfigError(f"{rows.place(number)}: {broken}") from None
            ranks[number] = rank_of(content, seed=self._seed)
            if wanted is not None and self._pattern is not None:
                wanted[number] = self._pattern.fullmatch(content) is not None
        return ranks, wanted

    def split(self, own: Ranks, of_all: Ranks) -> SplitTasks:
        """Splits the rows. Contents with the ranks `own` are held out here, and those with the
        ranks `of_all` are not trained on. If the contents were not looked at, every row is for
        training.
        """
        size = self._section.size
        if not len(self._ranks):
            return SplitTasks(self._tasks(range(len(self._rows))[:size]), self._tasks(range(0)), 0)
        wanted = np.ones(len(self._ranks), bool) if self._wanted is None else self._wanted
        trainable = np.flatnonzero(wanted & ~np.isin(self._ranks, of_all)).astype(np.uint32)
        left_out = int(wanted.sum()) - len(trainable)
        if not len(trainable):
            raise ConfigError(
                f"{self._option}: every row of {self._section.origin} is held out or passed over; "
                "lower heldout, or widen only."
            )
        training = self._tasks(trainable[:size])
        if self._apart is not None:
            every = range(len(self._apart))
            heldout = RowTasks(self._apart, self._maker, every, prefix="heldout-")
            return SplitTasks(training, heldout, left_out)
        # A content that occurs several times is asked once.
        firsts = np.unique(self._ranks, return_index=True)[1]
        mine = np.sort(firsts[np.isin(self._ranks[firsts], own)]).astype(np.uint32)
        return SplitTasks(training, self._tasks(mine), left_out - len(mine))

    def _tasks(self, numbers: range | NDArray[np.uint32]) -> RowTasks:
        return RowTasks(self._rows, self._maker, numbers)
