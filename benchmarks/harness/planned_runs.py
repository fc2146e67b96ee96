"""Runs of recipes, made one after the other, each in a folder of its own.

The same command again goes on where it was interrupted: a run that has finished is not made again,
and one that had a checkpoint is resumed from it.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.pretrained import midflight
from harness.processes import ended_cpu_seconds
from harness.report import Report
from harness.run_tables import UNTRAINED, USED, Outcome, Recipe, read_outcome
from harness.runs import sets
from midflight.archive.runs import RunCondition, differences, open_run
from midflight.config import load_config
from midflight.config.dump import as_toml
from midflight.config.sections import Config
from midflight.errors import NoRun
from midflight.run.launcher.folder import can_go_on


@dataclass(frozen=True)
class PlannedRun:
    """A recipe with a seed, and where it is made."""

    recipe: Recipe
    seed: int
    folder: Path
    settings: tuple[str, ...]
    config: Config
    """The recipe's, with the settings."""

    def __str__(self) -> str:
        return f"{self.recipe.name}, seed {self.seed}"


def planned_runs(
    recipes: Iterable[Recipe],
    *,
    seeds: Sequence[int],
    only: Sequence[str],
    folder: Path,
    settings: Sequence[str],
) -> list[PlannedRun]:
    """Seed by seed, so that a table with all its rows is there early. `settings` are those of every
    run. `SystemExit` where `only` names no recipe.
    """
    known = {recipe.name: recipe for recipe in recipes}
    for name in only:
        if name not in known:
            raise SystemExit(f"there is no {name!r} in the table; there are {', '.join(known)}.")
    planned: list[PlannedRun] = []
    for seed in seeds:
        for name in only or known:
            recipe = known[name]
            own = (*recipe.settings, *settings, f"run.seed={seed}")
            config = load_config(recipe.config, own)
            planned.append(PlannedRun(recipe, seed, folder / f"{name}-{seed}", own, config))
    return planned


def make_missing(
    planned: Sequence[PlannedRun], report: Report, *, prepare: Callable[[PlannedRun], object]
) -> list[Outcome]:
    """Makes the runs that are not finished, and returns what all of them found. `prepare` is called
    before each that is made.
    """
    missing = [run for run in planned if not _is_finished(run)]
    for number, run in enumerate(missing, start=1):
        report.say(f"\n{number}/{len(missing)} {run}, in {run.folder}")
        _make(run, prepare)
        report.say(read_outcome(run.recipe, run.seed, run.folder).line)
    return [read_outcome(run.recipe, run.seed, run.folder) for run in planned]


def _is_finished(run: PlannedRun) -> bool:
    """Returns whether it was made, with these settings. `SystemExit` where another run lies in its
    folder.
    """
    try:
        there = open_run(run.folder)
    except NoRun:
        return False
    if there.describe().condition is not RunCondition.FINISHED:
        return False
    wanted = tomllib.loads(as_toml(run.config))
    for name, (was, asked) in differences([there.config(), wanted]).items():
        raise SystemExit(
            f"{run.folder} holds a finished run with {name} = {was}, and {asked} is asked for: "
            "move it away, or choose another --folder."
        )
    return True


def _make(run: PlannedRun, prepare: Callable[[PlannedRun], object]) -> None:
    """Makes the run, or what is missing of it. Waits for it."""
    begins = "--resume"
    if not can_go_on(run.folder):
        begins = "--overwrite"
        for name in (USED, UNTRAINED):
            (run.folder / name).unlink(missing_ok=True)
    prepare(run)
    words = [str(run.recipe.config), *sets(run.settings), "--folder", str(run.folder), begins]
    with _processor_time(run.folder / USED):
        midflight("train", *words)
    # gigabytes of a model of the size that people know, from which nobody goes on
    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    # by its tokenizer the viewer reads the conversations
    for weights in (run.folder / "start").glob("*.safetensors"):
        weights.unlink()


@contextmanager
def _processor_time(place: Path) -> Generator[None]:
    """Adds to what the file says the processor time of the processes that are started within it and
    end.
    """
    began = ended_cpu_seconds()
    try:
        yield
    finally:
        before = json.loads(place.read_text())["cpu_seconds"] if place.exists() else 0.0
        used = round(before + ended_cpu_seconds() - began, 1)
        if place.parent.is_dir():
            place.write_text(json.dumps({"cpu_seconds": used}) + "\n")
