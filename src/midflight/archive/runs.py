"""Runs in their folders: found under a folder, checked, and described, without a word to the
processes that make them.
"""

import re
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from midflight.archive.holder import holder_of
from midflight.archive.journal import JOURNAL, Readings, read_folder
from midflight.errors import NoRun, RunGone
from midflight.trajectories.pairs import STORE
from midflight.types import Json

CONFIG = "config.toml"
SUMMARY = "summary.json"
MAX_DEPTH = 3
"""Folders below the one that is searched: `runs/team/name` is found from `runs` and from where it
lies, and no disk is read through.
"""


class RunCondition(StrEnum):
    """What became of a run, by what lies in its folder."""

    RUNNING = "running"
    """A living process holds the folder."""
    FINISHED = "finished"
    """It made its model, or its last step."""
    STOPPED = "stopped"
    """It ended in order before its last step; what there is can be read, and `--resume` goes on
    from the last checkpoint.
    """
    CRASHED = "crashed"
    """The process that held the folder died without giving it back."""


@dataclass(frozen=True, slots=True)
class RunDescription:
    """A run in a line of a table."""

    name: str
    condition: RunCondition
    step: int
    steps: int | None
    """That were asked for; none where the configuration does not say."""
    reward: float | None
    """Mean of the training rollouts since the step before the last."""
    heldout: float | None
    """Of the first source, in its last evaluation."""
    started: str
    """When the last start was, as local time."""
    seconds: float
    """That it had run for at its last line, over all its starts."""


@dataclass(frozen=True)
class ArchivedRun:
    """One run. `slug` tells it apart from the others that are looked at, in addresses and as a
    label.
    """

    folder: Path
    slug: str

    @cached_property
    def readings(self) -> Readings:
        """The same at each look: it reads only what is new."""
        return read_folder(self.folder)

    def journal(self) -> Readings:
        """With what was appended until now. `RunGone` where the run was deleted."""
        self.readings.refresh()
        return self.readings

    def config(self) -> Mapping[str, Any]:
        """All options by section, as the run wrote them down at its last start; empty where it did
        not yet.
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
            pass  # being written, or a user's own
        return {}

    def describe(self) -> RunDescription:
        past = self.journal().past
        config = self.config().get("run", {})
        last = past.steps[-1] if past.steps else None
        step = last.step if last else 0
        rewards = [line.reward for line in past.steps if line.reward is not None]
        scores = [
            line.mean_reward
            for line in past.evaluations
            if line.source == past.evaluations[0].source
        ]
        steps = cast("int | None", config.get("steps"))
        return RunDescription(
            name=str(config.get("name") or self.folder.name),
            condition=self.condition(step, steps),
            step=step,
            steps=steps,
            reward=rewards[-1] if rewards else None,
            heldout=scores[-1] if scores else None,
            started=_started(self.folder),
            seconds=past.seconds,
        )

    def condition(self, step: int, steps: int | None) -> RunCondition:
        """By lock and products, for a run that has made `step` of `steps`."""
        if (holder := holder_of(self.folder)) is not None:
            return RunCondition.RUNNING if holder.lives else RunCondition.CRASHED
        made = any((self.folder / name).exists() for name in ("model", "adapter"))
        return (
            RunCondition.FINISHED
            if made or (steps is not None and step >= steps)
            else RunCondition.STOPPED
        )


def open_run(folder: Path) -> ArchivedRun:
    """`NoRun` where the folder holds none."""
    return open_runs([folder])[0]


def open_runs(folders: Sequence[Path]) -> tuple[ArchivedRun, ...]:
    """Each folder a run, in this order, no folder twice. `NoRun` names one that is not there or
    holds none, and what to give instead.
    """
    distinct = list(dict.fromkeys(folder.resolve() for folder in folders))
    for folder in distinct:
        _check(folder)
    return tuple(
        ArchivedRun(folder, slug) for folder, slug in zip(distinct, _slugs(distinct), strict=True)
    )


def runs_under(folder: Path) -> tuple[ArchivedRun, ...]:
    """The folder itself where it is a run, else those below it, in order of their paths. `NoRun`
    where there is no such folder.
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
        within = [
            found.relative_to(folder).as_posix() for found in sorted(_found(folder, MAX_DEPTH))
        ]
        below = f" There are runs below it: {', '.join(within[:5])}." if within else ""
        raise NoRun(f"{folder} is no run: it has neither {JOURNAL} nor {STORE}.{below}")


def _found(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        # one that is being deleted holds nothing
        with suppress(PermissionError, FileNotFoundError):
            for inner in folder.iterdir():
                if inner.is_dir() and not inner.name.startswith(".") and not inner.is_symlink():
                    yield from _found(inner, depth - 1)


def _slugs(folders: Iterable[Path]) -> list[str]:
    """The name of each folder, as a part of an address; with its number where another has the
    same.
    """
    taken: dict[str, int] = {}
    found: list[str] = []
    for folder in folders:
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.name).strip("-.") or "run"
        taken[slug] = taken.get(slug, 0) + 1
        found.append(slug if taken[slug] == 1 else f"{slug}-{taken[slug]}")
    return found


def _started(folder: Path) -> str:
    if (holder := holder_of(folder)) is not None:
        return holder.since
    for name in (CONFIG, JOURNAL, STORE):
        with suppress(OSError):
            return time.strftime(
                "%Y-%m-%d %H:%M:%S", time.localtime((folder / name).stat().st_mtime)
            )
    return ""


# --- Configurations -------------------------------------------------------------------------------


def flat(config: Mapping[str, Any], before: str = "") -> dict[str, Json]:
    """Every option by its dotted name; tables of a list by their number:
    `environment.sources.0.weight`.
    """
    found: dict[str, Json] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(cast("Mapping[str, Any]", value), f"{before}{name}.")
        elif (
            isinstance(value, list)
            and value
            and all(isinstance(each, Mapping) for each in cast("list[object]", value))
        ):
            found |= flat(
                {str(at): each for at, each in enumerate(cast("list[object]", value))},
                f"{before}{name}.",
            )
        else:
            found[f"{before}{name}"] = value
    return found


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Json]]:
    """The options that are not the same in all, each with its value in every configuration; none
    where it is unset. Where each run lies is no difference.
    """
    flats = [flat(config) for config in configs]
    names = dict.fromkeys(name for one in flats for name in one)
    values = {name: [one.get(name) for one in flats] for name in names if name != "run.folder"}
    return {
        name: found for name, found in values.items() if any(value != found[0] for value in found)
    }
