"""Turns the arguments of a Python program into a configuration. Functions become entries, rows
become a file.
"""

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, cast

import msgspec

from midflight import given
from midflight.config import Config, load_config
from midflight.config.derived import model_sizes
from midflight.entries import ENTRY
from midflight.environments.rows import plain
from midflight.errors import ConfigError
from midflight.run.launcher.checks.model import check_teacher
from midflight.run.launcher.folder import HELDOUT_ROWS, ROWS, is_stored
from midflight.run.launcher.trial import to_terminal

Tables = Mapping[str, Mapping[str, object]]
Weighted = Sequence[object]
"""Functions, their entries, or pairs of one of these with its weight."""


NUMBER_OR_FILE = (Real, str, Path, type(None))
"""What `heldout` may be, if it is not rows."""


class RowsFile:
    """The rows that were given as data, one object a line. The file is temporary, and is deleted
    with this object.
    """

    def __init__(self, rows: Iterable[object], *, argument: str = "data") -> None:
        """Reads them all. Raises `ConfigError` with the row that cannot be written. `argument` is
        the one that they were given as.
        """
        self._file = tempfile.NamedTemporaryFile("wb", prefix="midflight-", suffix=".jsonl")  # noqa: SIM115 (it lives as long as this)
        self.path = Path(self._file.name)
        number = -1
        for number, row in enumerate(rows):
            place = f"{argument}, row {number}"
            columns = plain(row, place)
            try:
                self._file.write(msgspec.json.encode(columns) + b"\n")
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"{place} has a text that UTF-8 cannot write ({error}); correct it."
                ) from error
        if number < 0:
            raise ConfigError(
                f"{argument} has no rows, so there is nothing to ask; an iterator can be read only "
                "once."
            )
        self._file.flush()


class Objects:
    """The functions and classes of the program, by the names that its configuration calls them."""

    def __init__(self) -> None:
        self._by_name: dict[str, object] = {}

    def entry(self, value: object, *, role: str) -> str:
        """The entry of an object. A text is an entry itself. `role` names the argument that the
        object was given as.
        """
        if isinstance(value, str):
            return value
        if not callable(value):
            raise ConfigError(
                f"{role} is {type(value).__name__} {value!r:.80}, expected a function, or its "
                "`module:function`."
            )
        called = str(getattr(getattr(value, "func", value), "__name__", type(value).__name__))
        wanted = called if re.fullmatch(r"\w+", called) else role
        name = wanted
        number = 1
        while self._by_name.get(name, value) is not value:
            number += 1
            name = f"{wanted}_{number}"
        self._by_name[name] = value
        return given.entry_of(name)

    def packed(self) -> bytes:
        return given.pack(self._by_name)


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A run that was checked as far as possible before anything is started."""

    config: Config
    """It reads the rows from the run's folder, which gets a copy of them."""
    objects: bytes
    rows: Mapping[str, RowsFile]
    """Rows that were given as data, by the names of their files in that folder."""

    @property
    def files(self) -> Mapping[str, Path]:
        return {name: rows.path for name, rows in self.rows.items()}

    @property
    def tried(self) -> Config:
        """The configuration that reads the rows where they are before there is a folder."""
        return with_rows(self.config, self.files)


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of `Trainer` for the model, the rewards and the data. `source` are the options
    of the data.
    """

    model: str | Path | None
    data: Any
    source: Mapping[str, object]
    rewards: Weighted
    tools: Sequence[object]
    environment: object
    steps: int | None
    folder: str | Path | None
    config: str | Path | Tables | None

    def asked(self) -> CheckedRun:
        """Checks the arguments. Raises `ConfigError` with all their faults."""
        objects = Objects()
        rows: dict[str, RowsFile] = {}
        file: str | Path | None = None
        tables: Tables = {}
        if isinstance(self.config, Mapping):
            tables = self.config
        else:
            file = self.config
        environment = self._environment(objects)
        if self.data is not None:
            place, given_rows = self._place(objects)
            if given_rows is not None:
                rows[ROWS] = given_rows
            source = dict(self.source)
            if not isinstance(source.get("heldout"), NUMBER_OR_FILE):
                rows[HELDOUT_ROWS] = RowsFile(
                    _each(source["heldout"], argument="heldout"), argument="heldout"
                )
                source["heldout"] = HELDOUT_ROWS
            environment["sources"] = [place | source]
        elif self.source:
            raise ConfigError(
                f"{', '.join(self.source)} given without data; give data, or set it in "
                "environment.sources of the configuration."
            )
        own = {
            "run": {"steps": self.steps, "folder": self.folder},
            "model": {"path": self.model},
            "environment": environment,
        }
        note = to_terminal if file is not None and is_stored(Path(file)) else None
        config = load_config(file, table=_laid_over(tables, own), note=note)
        config = with_rows(config, {name: config.run.folder / name for name in rows})
        packed = objects.packed()
        model_sizes(config.model)
        check_teacher(config)
        return CheckedRun(config, packed, rows)

    def _environment(self, objects: Objects) -> dict[str, object]:
        rewards = [_reward(given, objects) for given in self.rewards]
        tools = [objects.entry(tool, role="tool") for tool in self.tools]
        entry = None
        if self.environment is not None:
            entry = objects.entry(self.environment, role="environment")
        return {"entry": entry, "rewards": rewards or None, "tools": tools or None}

    def _place(self, objects: Objects) -> tuple[dict[str, object], RowsFile | None]:
        """Names the place of the rows: a file or folder, a function, or this process."""
        data = self.data
        if isinstance(data, str | Path):
            is_entry = isinstance(data, str) and ENTRY.fullmatch(data) is not None
            if is_entry and not Path(data).exists():
                return {"entry": str(data)}, None
            return {"path": str(data)}, None
        if callable(data) and not hasattr(data, "__getitem__"):
            return {"entry": objects.entry(data, role="data")}, None
        return {"path": ROWS, "name": Path(ROWS).stem}, RowsFile(_each(data))


def with_rows(config: Config, files: Mapping[str, Path]) -> Config:
    """The configuration whose first source has these files, by their names in a run's folder."""
    first, *others = config.environment.sources
    options = {"path": files.get(ROWS), "heldout": files.get(HELDOUT_ROWS)}
    found = {name: path for name, path in options.items() if path is not None}
    sources = (first.model_copy(update=found), *others)
    environment = config.environment.model_copy(update={"sources": sources})
    return config.model_copy(update={"environment": environment})


def _each(data: Any, *, argument: str = "data") -> Iterator[object]:
    """Every row. A torch dataset has rows by number, and need not end by itself. Raises
    `ConfigError` if these are no rows.
    """
    if isinstance(data, Mapping):
        keys = ", ".join(map(str, cast("Mapping[object, object]", data)))
        raise ConfigError(
            f"{argument} is a dict with {keys:.80}: give a list of dicts, one for each row; of a "
            "DatasetDict, one of its splits."
        )
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise ConfigError(
            f"{argument} is {type(data).__name__} {data!r:.80}, expected rows: a list of dicts, a "
            "Dataset, a path or an iterator."
        )
    if hasattr(data, "__iter__"):
        return iter(data)
    return (data[number] for number in range(len(data)))


def _reward(given: object, objects: Objects) -> Mapping[str, object]:
    if isinstance(given, Mapping):  # a section as it stands in a file
        section = dict(cast("Mapping[str, object]", given))
        return section | {"entry": objects.entry(section.get("entry"), role="reward")}
    function, weight = given if isinstance(given, tuple) and len(given) == 2 else (given, 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(
            f"the weight of reward {function!r:.80} is {weight!r}, expected a number: give pairs "
            "such as (correct, 1.0)."
        )
    return {"entry": objects.entry(function, role="reward"), "weight": weight}


def _laid_over(tables: Tables, own: Tables) -> Tables:
    """The sections of a configuration under the program's own options. Options that are None were
    not given.
    """
    sections: dict[str, Any] = dict(tables)
    for section, options in own.items():
        given = {name: value for name, value in options.items() if value is not None}
        under: Any = sections.get(section, {})
        # a value that is no table stays as it is, to be refused
        if given and isinstance(under, Mapping):
            sections[section] = {**under, **given}
    return sections
