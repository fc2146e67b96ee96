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

Every run is a `midflight train` of a file of `configs/` in a folder of its own below `--folder`,
one after the other, seed by seed, each with all cores. The same command again goes on where it was
interrupted. Table and picture are made of what lies in the runs' folders.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from harness.arguments import Arguments
from harness.pages import mean_and_error, replace_between
from harness.planned_runs import PlannedRun, make_missing, planned_runs
from harness.pretrained import CALCULATOR, MODEL, SMALL, SUMS, midflight, require_model
from harness.processes import ROOT
from harness.report import Report
from harness.run_tables import (
    AGES,
    OTHERS,
    SCORES,
    TIMES,
    UNTRAINED,
    Columns,
    Outcome,
    Recipe,
    shortfalls,
    table_of,
    write_picture,
)
from harness.runs import sets

from midflight.errors import MidflightError

SCORE = re.compile(r"^\S+: (\d\.\d+) \(", re.MULTILINE)
"""The score as `midflight evaluate` prints it."""
CORRECTED = "tokens weighted for their age"
UNCORRECTED = "trained as if they were fresh"
STALENESS = (0, 1, 4)


def age(max_staleness: int, panel: str) -> Recipe:
    """A row of the table of ages."""
    # The score still rises steeply then, so that a row which learns more slowly is seen to.
    settings = [
        f"rollout.max_staleness={max_staleness}",
        "run.steps=20",
        "trainer.schedule=constant",
    ]
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
        *(age(max_staleness, CORRECTED) for max_staleness in STALENESS),
        *(age(max_staleness, UNCORRECTED) for max_staleness in STALENESS),
    ),
}
ON_PAGE = {
    "tasks": (
        "before the warm start",
        "held out before",
        "after",
        "minutes",
        "rollouts of several versions",
    ),
    "ages": ("after", "age: mean"),
}
"""The columns of each table that its readers decide by; the command prints all of them."""


def main() -> None:
    options = _options()
    report = Report(options)
    settings = [f"model.path={options.model}", *options.set]
    try:
        planned = planned_runs(
            TABLES[options.table],
            seeds=options.seeds,
            only=options.only,
            folder=options.folder,
            settings=settings,
        )
        outcomes = make_missing(planned, report, prepare=lambda run: _prepare(run, options))
    except MidflightError as error:
        raise SystemExit(str(error)) from None
    _show(outcomes, options, report)
    report.close()


def _show(outcomes: Sequence[Outcome], options: argparse.Namespace, report: Report) -> None:
    picture = options.folder / f"{options.table}.svg"
    write_picture(outcomes, picture)
    table = table_of(outcomes, columns_of(outcomes))
    report.say(f"\n{table}\n\npicture: {picture}")
    report.keep("table", table)
    if options.write_docs:
        write_docs(options.table, outcomes, ROOT / "docs")
    short = shortfalls(outcomes) if options.check else []
    if short:
        raise SystemExit("\n".join(short))


def columns_of(outcomes: Sequence[Outcome]) -> Columns:
    """The score before a warm start has a column, where there was one."""
    columns = {**SCORES, **TIMES, **AGES, **OTHERS}
    if all(outcome.untrained is None for outcome in outcomes):
        return columns
    return {"before the warm start": _untrained, **columns}


def _untrained(found: Sequence[Outcome]) -> str:
    scores = [outcome.untrained for outcome in found if outcome.untrained is not None]
    return mean_and_error(scores, 3) if scores else ""


def write_docs(table: str, outcomes: Sequence[Outcome], docs: Path) -> None:
    """Replaces what stands between the table's two comments in pretrained.md, and draws its
    picture.
    """
    picture = Path("images") / f"pretrained-{table}.svg"
    columns = columns_of(outcomes)
    shown_columns = {name: cell for name, cell in columns.items() if name in ON_PAGE[table]}
    rows = table_of(outcomes, shown_columns)
    shown = f"![Held-out score and reward over time]({picture})\n\n{rows}"
    replace_between(docs / "pretrained.md", table, shown)
    write_picture(outcomes, docs / picture)


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


def _prepare(run: PlannedRun, options: argparse.Namespace) -> None:
    """Keeps the score before a warm start, which the run itself does not take."""
    require_model(options.model, makes_tiny=options.smoke)
    place = run.folder / UNTRAINED
    if run.config.warm_start.data is None or place.exists():
        return
    print(f"{run}: the score before its warm start", flush=True)
    folder = run.folder.with_name(f"{run.folder.name}-untrained")
    words = ["evaluate", str(options.model), "--config", str(run.recipe.config)]
    words += [*sets(run.settings), "--folder", str(folder)]
    said = midflight(*words, keeps=True)
    found = SCORE.search(said)
    if found is None:
        raise SystemExit(f"midflight {shlex.join(words)} said no score:\n{said}")
    run.folder.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps({"score": float(found[1])}) + "\n")


if __name__ == "__main__":
    main()
