"""Finds, checks and describes runs from their folders alone, without asking the processes that make
them.
"""

import re
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, cast

from midflight.archive.holder import holder_of
from midflight.archive.journal import JOURNAL, JournalReader, read_folder
from midflight.errors import NoRun, RunGone
from midflight.observe.figures import figures
from midflight.observe.readable import duration, number
from midflight.observe.summary import Summary, summary_of
from midflight.trajectories.pairs import STORE
from midflight.types import Json

CONFIG = "config.toml"
MAX_DEPTH = 3
"""The depth of a search in folders: `runs/team/name` is found from the folder of `runs`, and no
whole disk is read.
"""


class RunCondition(StrEnum):
    """The folder of a run shows one of these conditions."""

    RUNNING = "running"
    """A living process holds the folder."""
    FINISHED = "finished"
    """It made its model, or its last step."""
    STOPPED = "stopped"
    """It ended in order before its last step. Its folder can be read, and `--resume` goes on from
    the last checkpoint.
    """
    CRASHED = "crashed"
    """The process that held the folder died without giving it back."""


COLUMNS = ("run", "state", "steps", "reward", "held out", "time", "started")
"""The columns of a table of runs."""


@dataclass(frozen=True, slots=True)
class RunDescription:
    """A run with its figures, as tables and pages show it."""

    name: str
    condition: RunCondition
    max_steps: int | None
    """The number of steps that were asked for, or None if the configuration does not say."""
    reward: float | None
    """Mean reward of the training rollouts since the step before the last."""
    started: str
    """The local time of the last start."""
    summary: Summary

    @property
    def steps(self) -> str:
        """`2 of 4`."""
        made = f"{self.summary.steps:,}"
        return made if self.max_steps is None else f"{made} of {self.max_steps:,}"

    @property
    def heldout(self) -> float | None:
        """Mean reward on the held-out tasks of the first source, in its last evaluation."""
        source = self.summary.sources.get(self.summary.primary or "")
        return None if source is None else source.heldout_newest

    def cells(self) -> tuple[str, ...]:
        """The run in a line of a table, under `COLUMNS` without the first."""
        return (
            self.condition.value,
            self.steps,
            number(self.reward),
            number(self.heldout),
            duration(self.summary.seconds),
            self.started,
        )

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yields label and text of everything that a page says of the run in numbers."""
        yield "state", self.condition.value
        yield "steps", self.steps
        yield "version", str(self.summary.version)
        yield "reward, last step", number(self.reward)
        yield from figures(self.summary)


@dataclass(frozen=True)
class ArchivedRun:
    """One run. `slug` tells it from the other runs that are looked at, in addresses and as a
    label.
    """

    folder: Path
    slug: str

    @cached_property
    def readings(self) -> JournalReader:
        """The reader of the run's journal. It is kept, so that each call reads only new lines."""
        return read_folder(self.folder)

    def journal(self) -> JournalReader:
        """Returns the journal with the lines that were appended until now. Raises `RunGone` if the
        run was deleted.
        """
        self.readings.refresh()
        return self.readings

    def config(self) -> Mapping[str, Any]:
        """All options by section, as the run wrote them down at its last start. It is empty if the
        run has not written them yet.
        """
        try:
            return tomllib.loads((self.folder / CONFIG).read_text())
        except FileNotFoundError:
            if not self.folder.is_dir():
                raise RunGone(
                    f"{self.folder} is not there any more: the run was deleted or moved while it "
                    "was looked at."
                ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):
            pass  # it is being written, or a user wrote it
        return {}

    def describe(self) -> RunDescription:
        past = self.journal().past
        config = self.config().get("run", {})
        summary = summary_of(self.folder, past)
        rewards = [line.reward for line in past.steps if line.reward is not None]
        max_steps = cast("int | None", config.get("steps"))
        return RunDescription(
            name=str(config.get("name") or self.folder.name),
            condition=self.condition(summary.steps, max_steps),
            max_steps=max_steps,
            reward=rewards[-1] if rewards else None,
            started=_started(self.folder),
            summary=summary,
        )

    @property
    def is_live(self) -> bool:
        """True if a process makes the run now."""
        holder = holder_of(self.folder)
        return holder is not None and holder.lives

    def condition(self, step: int, steps: int | None) -> RunCondition:
        """Returns the condition of a run that has made `step` of `steps`, by its lock and its
        files.
        """
        holder = holder_of(self.folder)
        if holder is not None:
            return RunCondition.RUNNING if holder.lives else RunCondition.CRASHED
        if (self.folder / "model").exists() or (self.folder / "adapter").exists():
            return RunCondition.FINISHED
        if steps is not None and step >= steps:
            return RunCondition.FINISHED
        return RunCondition.STOPPED


def open_run(folder: Path) -> ArchivedRun:
    """The run in a folder. Raises `NoRun` if it holds none."""
    return open_runs([folder])[0]


def open_runs(folders: Sequence[Path]) -> tuple[ArchivedRun, ...]:
    """The runs in these folders, in this order, without duplicates. Raises `NoRun` with the first
    folder that is missing or holds no run, and with the remedy.
    """
    distinct = list(dict.fromkeys(folder.resolve() for folder in folders))
    for folder in distinct:
        _check(folder)
    return tuple(
        ArchivedRun(folder, slug) for folder, slug in zip(distinct, _slugs(distinct), strict=True)
    )


def runs_under(folder: Path) -> tuple[ArchivedRun, ...]:
    """The run in the folder itself, or else the runs below it in the order of their paths. Raises
    `NoRun` if there is no such folder.
    """
    if not folder.is_dir():
        raise NoRun(f"{folder} is not a folder; give one that holds runs, such as runs/.")
    return open_runs(sorted(_found(folder, MAX_DEPTH)))


def is_run(folder: Path) -> bool:
    return (folder / JOURNAL).is_file() or (folder / STORE).is_file()


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise NoRun(
            f"{folder} is not a folder; `midflight runs DIR` lists the runs below a folder."
        )
    if not is_run(folder):
        within = sorted(_found(folder, MAX_DEPTH))[:5]
        names = [found.relative_to(folder).as_posix() for found in within]
        below = f" There are runs below it: {', '.join(names)}." if names else ""
        raise NoRun(f"{folder} is no run: it has neither {JOURNAL} nor {STORE}.{below}")


def _found(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        # A folder that is being deleted holds nothing.
        with suppress(PermissionError, FileNotFoundError):
            for inner in folder.iterdir():
                if inner.is_dir() and not inner.name.startswith(".") and not inner.is_symlink():
                    yield from _found(inner, depth - 1)


def _slugs(folders: Iterable[Path]) -> list[str]:
    """The name of each folder, as a part of an address. It has a number if an earlier folder has
    the same name.
    """
    taken: dict[str, int] = {}
    found: list[str] = []
    for folder in folders:
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.name).strip("-.") or "run"
        taken[slug] = taken.get(slug, 0) + 1
        found.append(slug if taken[slug] == 1 else f"{slug}-{taken[slug]}")
    return found


def _started(folder: Path) -> str:
    holder = holder_of(folder)
    if holder is not None:
        return holder.since
    for name in (CONFIG, JOURNAL, STORE):
        with suppress(OSError):
            written = time.localtime((folder / name).stat().st_mtime)
            return time.strftime("%Y-%m-%d %H:%M:%S", written)
    return ""


# --- Configurations -------------------------------------------------------------------------------


def flat(config: Mapping[str, Any], before: str = "") -> dict[str, Json]:
    """Every option by its dotted name. A table in a list has its number in the name:
    `environment.sources.0.weight`.
    """
    found: dict[str, Json] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(cast("Mapping[str, Any]", value), f"{before}{name}.")
        elif _is_list_of_tables(value):
            tables = {str(number): table for number, table in enumerate(value)}
            found |= flat(tables, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found


def _is_list_of_tables(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(each, Mapping) for each in cast("list[object]", value))


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Json]]:
    """The options that differ, each with its value in every configuration, or None if it is unset.
    The folder of a run is no difference.
    """
    flats = [flat(config) for config in configs]
    names = dict.fromkeys(chain.from_iterable(flats))
    found: dict[str, list[Json]] = {}
    for name in names:
        values = [one.get(name) for one in flats]
        if name != "run.folder" and any(value != values[0] for value in values):
            found[name] = values
    return found
