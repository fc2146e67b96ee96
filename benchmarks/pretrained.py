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
with all cores. Table and picture are made of what lies in their folders, see
`pretrained_report.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shlex
import shutil
import sys
import tomllib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from pretrained_model import CALCULATOR, MODEL, ROOT, SMALL, SUMS, make_tiny, midflight  # noqa: E402
from pretrained_report import (  # noqa: E402
    UNTRAINED,
    USED,
    Outcome,
    Recipe,
    read_outcome,
    report,
    shortfalls,
    write_docs,
    write_picture,
)
from smoke import options_of  # noqa: E402

from midflight.archive.runs import RunCondition, differences, open_run  # noqa: E402
from midflight.config import load_config  # noqa: E402
from midflight.config.dump import as_toml  # noqa: E402
from midflight.config.sections import Config  # noqa: E402
from midflight.errors import MidflightError, NoRun  # noqa: E402
from midflight.run.launcher.folder import can_go_on  # noqa: E402

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
    "ages": tuple(
        age(max_staleness, panel) for panel in (CORRECTED, UNCORRECTED) for max_staleness in AGES
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
        return [word for setting in self.settings for word in ("--set", setting)]

    def __str__(self) -> str:
        return f"{self.recipe.name}, seed {self.seed}"


def main() -> None:
    options = _options()
    try:
        if options.smoke:
            make_tiny(options.model)
        planned = _planned(options)
        missing = [run for run in planned if not _is_finished(run)]
        if missing and not options.model.exists():
            raise SystemExit(
                f"there is no model in {options.model}: midflight fetch-model smollm2-135m "
                f"{options.model}"
            )
        for number, run in enumerate(missing, start=1):
            print(f"\n{number}/{len(missing)} {run}, in {run.folder}", flush=True)
            _make(run, options.model)
            print(read_outcome(run.recipe, run.seed, run.folder).line, flush=True)
    except MidflightError as error:
        raise SystemExit(str(error)) from None
    outcomes = [read_outcome(run.recipe, run.seed, run.folder) for run in planned]
    _show(outcomes, options)


def _show(outcomes: Sequence[Outcome], options: argparse.Namespace) -> None:
    picture = options.folder / f"{options.table}.svg"
    write_picture(outcomes, picture)
    print(f"\n{report(outcomes)}\n\npicture: {picture}")
    if options.write_docs:
        write_docs(options.table, outcomes, ROOT / "docs")
    if options.check and (short := shortfalls(outcomes)):
        raise SystemExit("\n".join(short))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=TABLES, default="tasks", help="which runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rows of the table")
    parser.add_argument("--model", type=Path, default=MODEL, help="a model folder, or a GGUF file")
    parser.add_argument("--folder", type=Path, default=Path("runs/pretrained"))
    parser.add_argument("--set", nargs="+", default=[], metavar="OPTION", help="of every run")
    parser.add_argument(
        "--check",
        action="store_true",
        help="ends with status 1 where a task's score rises by less than is promised",
    )
    parser.add_argument(
        "--write-docs", action="store_true", help="puts table and picture into docs/"
    )
    smoke = Path("runs/smoke/pretrained")
    options = options_of(parser, model=smoke / "model", folder=smoke, set=list(SMALL))
    options.model, options.folder = options.model.absolute(), options.folder.absolute()
    return options


def _planned(options: argparse.Namespace) -> list[PlannedRun]:
    """Seed by seed, so that a table with all its rows is there early."""
    recipes = {recipe.name: recipe for recipe in TABLES[options.table]}
    if unknown := [name for name in options.only if name not in recipes]:
        raise SystemExit(
            f"there is no {unknown[0]!r} in the table of {options.table}; there are "
            f"{', '.join(recipes)}."
        )
    chosen = [
        recipe for name, recipe in recipes.items() if not options.only or name in options.only
    ]
    return [_with_seed(recipe, seed, options) for seed in options.seeds for recipe in chosen]


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
    if other := differences([there, wanted]):
        name, (was, asked) = next(iter(other.items()))
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
    began = _children_seconds()
    try:
        yield
    finally:
        before = json.loads(place.read_text())["cpu_seconds"] if place.exists() else 0.0
        if place.parent.is_dir():
            place.write_text(
                json.dumps({"cpu_seconds": round(before + _children_seconds() - began, 1)}) + "\n"
            )


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
