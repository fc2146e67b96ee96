"""A model that people know, trained by tables of runs: on two tasks, or on older and younger
tokens.

    python benchmarks/pretrained.py
        the tasks, one seed each: `make pretrained`
    python benchmarks/pretrained.py --seeds 0 1 2 --check
        three seeds, held against what is promised
    python benchmarks/pretrained.py --table ages --seeds 0 1 2
        what age costs, 18 runs: `make pretrained-compare`
    python benchmarks/pretrained.py --only sums
        one row of a table

Every run is a `midflight train` of a file of `configs/` in a folder of its own below `--folder`.
The same command again goes on where it was interrupted: a run that has finished is not made again,
and one that had a checkpoint is resumed from it. They go one after the other, seed by seed, each
with all cores. Table and picture are made of what lies in their folders.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.arguments import Arguments
from harness.pretrained import CALCULATOR, MODEL, SMALL, SUMS, midflight, require_model
from harness.processes import ROOT, ended_cpu_seconds
from harness.report import Report
from harness.run_tables import (
    UNTRAINED,
    USED,
    Outcome,
    Recipe,
    read_outcome,
    shortfalls,
    table_of,
    write_docs,
    write_picture,
)
from harness.runs import sets

from midflight.archive.runs import RunCondition, differences, open_run
from midflight.config import load_config
from midflight.config.dump import as_toml
from midflight.config.sections import Config
from midflight.errors import MidflightError, NoRun
from midflight.run.launcher.folder import can_go_on

SCORE = re.compile(r"^\S+: (\d\.\d+) \(", re.MULTILINE)
"""As `midflight evaluate` prints it."""
CORRECTED = "tokens weighted for their age"
UNCORRECTED = "trained as if they were fresh"
AGES = (0, 1, 4)


def age(max_staleness: int, panel: str) -> Recipe:
    """A row of the table of ages."""
    # The score still rises steeply then, so that a row which learns more slowly is seen to.
    settings = [f"rollout.max_staleness={max_staleness}", "run.steps=20"]
    if max_staleness == 0:
        # Engine and trainer wait for each other then, so each gets both cores.
        settings += ["engine.threads=2", "trainer.threads=2"]
    if panel == UNCORRECTED:
        settings.append("correction.weight=off")
    name = f"staleness-{max_staleness}" + ("" if panel == CORRECTED else "-uncorrected")
    return Recipe(name, SUMS, panel, f"max_staleness = {max_staleness}", settings=tuple(settings))


TABLES = {
    "tasks": (
        Recipe("sums", SUMS, "sums of two numbers", "sums", promised=0.4),
        Recipe(
            "calculator",
            CALCULATOR,
            "sums of three numbers, with a calculator",
            "calculator",
            promised=0.2,
        ),
    ),
    "ages": (
        *(age(max_staleness, CORRECTED) for max_staleness in AGES),
        *(age(max_staleness, UNCORRECTED) for max_staleness in AGES),
    ),
}


@dataclass(frozen=True)
class PlannedRun:
    """A recipe with a seed, and where it is made."""

    recipe: Recipe
    seed: int
    folder: Path
    settings: tuple[str, ...]
    config: Config
    """Of the recipe, with the settings."""

    @property
    def overrides(self) -> list[str]:
        """Words of a command line."""
        return sets(self.settings)

    def __str__(self) -> str:
        return f"{self.recipe.name}, seed {self.seed}"


def main() -> None:
    options = _options()
    report = Report(options)
    try:
        planned = _planned(options)
        missing = [run for run in planned if not _is_finished(run)]
        if missing:
            require_model(options.model, makes_tiny=options.smoke)
        for number, run in enumerate(missing, start=1):
            report.say(f"\n{number}/{len(missing)} {run}, in {run.folder}")
            _make(run, options.model)
            report.say(read_outcome(run.recipe, run.seed, run.folder).line)
    except MidflightError as error:
        raise SystemExit(str(error)) from None
    outcomes = [read_outcome(run.recipe, run.seed, run.folder) for run in planned]
    _show(outcomes, options, report)
    report.close()


def _show(outcomes: Sequence[Outcome], options: argparse.Namespace, report: Report) -> None:
    picture = options.folder / f"{options.table}.svg"
    write_picture(outcomes, picture)
    table = table_of(outcomes)
    report.say(f"\n{table}\n\npicture: {picture}")
    report.keep("table", table)
    if options.write_docs:
        write_docs(options.table, outcomes, ROOT / "docs")
    short = shortfalls(outcomes) if options.check else []
    if short:
        raise SystemExit("\n".join(short))


def _options() -> argparse.Namespace:
    smoke = Path("runs/smoke/pretrained")
    arguments = Arguments(__doc__)
    arguments.option("--table", "tasks", choices=TABLES, help="which runs")
    arguments.option("--seeds", [0])
    arguments.option("--only", [], metavar="NAME", help="rows of the table")
    arguments.option("--model", MODEL, smoke=smoke / "model", help="a model folder, or a GGUF file")
    arguments.option("--folder", Path("runs/pretrained"), smoke=smoke)
    arguments.option("--set", [], smoke=[*SMALL], metavar="OPTION", help="of every run")
    arguments.option(
        "--check",
        False,
        help="end with status 1 where a task's score rises by less than is promised",
    )
    arguments.option("--write-docs", False, help="put table and picture into docs/")
    options = arguments.parse()
    options.model = options.model.absolute()
    options.folder = options.folder.absolute()
    return options


def _planned(options: argparse.Namespace) -> list[PlannedRun]:
    """Seed by seed, so that a table with all its rows is there early."""
    recipes = {recipe.name: recipe for recipe in TABLES[options.table]}
    for name in options.only:
        if name not in recipes:
            raise SystemExit(
                f"there is no {name!r} in the table of {options.table}; there are "
                f"{', '.join(recipes)}."
            )
    planned: list[PlannedRun] = []
    for seed in options.seeds:
        for name in options.only or recipes:
            planned.append(_with_seed(recipes[name], seed, options))
    return planned


def _with_seed(recipe: Recipe, seed: int, options: argparse.Namespace) -> PlannedRun:
    own = (f"model.path={options.model}", f"run.seed={seed}")
    settings = (*recipe.settings, *own, *options.set)
    return PlannedRun(
        recipe,
        seed,
        options.folder / f"{recipe.name}-{seed}",
        settings,
        load_config(recipe.config, settings),
    )


# --- One run --------------------------------------------------------------------------------------


def _is_finished(run: PlannedRun) -> bool:
    """Whether it was made, with these settings. `SystemExit` where another run lies in its
    folder.
    """
    if _condition(run.folder) is not RunCondition.FINISHED:
        return False
    there = open_run(run.folder).config()
    wanted = tomllib.loads(as_toml(run.config))
    for name, (was, asked) in differences([there, wanted]).items():
        raise SystemExit(
            f"{run.folder} holds a finished run with {name} = {was}, and {asked} is asked for: "
            "move it away, or choose another --folder."
        )
    return True


def _condition(folder: Path) -> RunCondition | None:
    """What became of the run there; none where there is none."""
    try:
        return open_run(folder).describe().condition
    except NoRun:
        return None


def _make(run: PlannedRun, model: Path) -> None:
    """Makes the run, or what is missing of it. Waits for it."""
    resumes = can_go_on(run.folder)
    if not resumes:
        for name in (USED, UNTRAINED):
            (run.folder / name).unlink(missing_ok=True)
    if run.config.warm_start.data is not None and not (run.folder / UNTRAINED).exists():
        _score_untrained(run, model)
    with _processor_time(run.folder / USED):
        begins = "--resume" if resumes else "--overwrite"
        midflight(
            "train", str(run.recipe.config), *run.overrides, "--folder", str(run.folder), begins
        )
    # gigabytes of a model of this size, from which nobody goes on
    for name in ("checkpoints", "start"):
        shutil.rmtree(run.folder / name, ignore_errors=True)


def _score_untrained(run: PlannedRun, model: Path) -> None:
    """Keeps the score before the warm start, which the run itself does not take."""
    print(f"{run}: the score before its warm start", flush=True)
    folder = run.folder.with_name(f"{run.folder.name}-untrained")
    words = [
        "evaluate",
        str(model),
        "--config",
        str(run.recipe.config),
        *run.overrides,
        "--folder",
        str(folder),
    ]
    said = midflight(*words, keeps=True)
    found = SCORE.search(said)
    if found is None:
        raise SystemExit(f"midflight {shlex.join(words)} said no score:\n{said}")
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / UNTRAINED).write_text(json.dumps({"score": float(found[1])}) + "\n")


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


if __name__ == "__main__":
    main()
