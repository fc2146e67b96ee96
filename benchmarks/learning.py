"""Does learning suffer from age? The demo task, synchronous, one step off and asynchronous, with
and without the correction.

    python benchmarks/learning.py --write-docs
        all runs
    python benchmarks/learning.py --seeds 0 --steps 10 --only synchronous async-4
        a look at it

Every run is a `midflight train` of `configs/demo.toml` from one model, which is warm already (made
once, kept under --folder), with the same steps, batches and learning rates; runs differ in their
mode, the correction and the seed (tasks, their order, sampling). They go one after the other, seed
by seed, each with both cores and in a folder of its own. The same command again goes on where it
was interrupted. Table, check and picture are made of what lies in the runs' folders.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from harness.arguments import Arguments
from harness.pages import replace_between
from harness.planned_runs import make_missing, planned_runs
from harness.processes import ROOT
from harness.report import Report
from harness.rounds import standard_error
from harness.run_tables import (
    AGES,
    OTHERS,
    SCORES,
    TIMES,
    Columns,
    Outcome,
    Recipe,
    mean_of,
    table_of,
    write_picture,
)
from harness.runs import DEMO, SMALL, train, train_command

MODES = {
    # Its trainer works alone, so it gets both cores; in the other modes they are the engine's and
    # the rollouts' as well.
    "synchronous": ("rollout.max_staleness=0", "trainer.threads=2"),
    # At most one batch is admitted for each version beyond those taken. `drain` commits a version
    # when no answer is under way, so an answer has one version and the next batch is generated
    # under it alone, beside the step that begins with it: every token but those of the first batch
    # is of age 1. One batch in flight keeps the first version, which may start two, from decoding
    # both.
    "one-step-off": (
        "rollout.max_staleness=1",
        "rollout.pause_mode=drain",
        "rollout.max_in_flight=128",
    ),
    "async-1": ("rollout.max_staleness=1",),
    "async-4": ("rollout.max_staleness=4",),
    "async-8": ("rollout.max_staleness=8",),
}
UNCORRECTED = "-uncorrected"
COLUMNS: Columns = {
    **SCORES,
    "seconds of training": mean_of(lambda o: o.training_seconds, 1),
    **TIMES,
    **AGES,
    "ESS": mean_of(lambda o: o.ess, 3),
    "divergence": lambda found: f"{statistics.mean(o.divergence for o in found):.1g}",
    **OTHERS,
}
WITHIN = 2.0
"""Standard errors of the difference that count as noise."""


def recipes() -> list[Recipe]:
    """Those with the correction first."""
    made: list[Recipe] = []
    for mode, settings in MODES.items():
        made.append(Recipe(mode, DEMO, "with the default correction", mode, settings=settings))
    for mode, settings in MODES.items():
        own = (*settings, "correction.weight=off")
        made.append(Recipe(f"{mode}{UNCORRECTED}", DEMO, "without", mode, settings=own))
    return made


def main() -> None:
    arguments = Arguments(__doc__)
    arguments.option("--steps", 60, smoke=2, help="optimiser steps of every run")
    arguments.option("--seeds", [0, 1, 2], smoke=[0])
    arguments.option("--only", [], smoke=["async-1"], metavar="NAME", help="rows of the table")
    arguments.option(
        "--write-docs", False, help="put the table into NOTES.md, the picture into docs/"
    )
    arguments.option("--folder", Path("runs/learning"), smoke=Path("runs/smoke/learning"))
    arguments.option("--set", [], smoke=[*SMALL], metavar="OPTION", help="of every run")
    arguments.gone("--resume-from", "the same command goes on where it was interrupted")
    arguments.gone("--config", "name the options that differ by --set")
    options = arguments.parse()
    report = Report(options)
    folder = options.folder.absolute()
    settings = [
        f"model.path={folder / 'model' / 'start'}",
        "warm_start.target_accuracy=none",
        "trainer.checkpoint_every=0",
        "run.restarts=0",
        # Seeds of requests come of the run's name and seed: with one name, all modes are scored on
        # the same tasks with the same luck.
        "run.name=learning",
        f"run.steps={options.steps}",
        *options.set,
    ]
    planned = planned_runs(
        recipes(), seeds=options.seeds, only=options.only, folder=folder, settings=settings
    )
    outcomes = make_missing(
        planned, report, prepare=lambda run: make_first_model(folder, options.set)
    )
    shown = "\n".join([table_of(outcomes, COLUMNS), "", *check(outcomes)])
    report.say(f"\n{shown}")
    report.keep("table", shown)
    write_picture(outcomes, folder / "learning.svg")
    if options.write_docs:
        replace_between(ROOT / "benchmarks" / "NOTES.md", "learning", shown)
        write_picture(outcomes, ROOT / "docs" / "images" / "learning.svg")
    report.close()


def make_first_model(folder: Path, settings: Sequence[str]) -> None:
    """What all runs start from: the demo's model after the demo's warm start. It is made once."""
    if not (folder / "model" / "start" / "config.json").exists():
        print(f"making the model to start from in {folder / 'model'}", flush=True)
        command = train_command(DEMO, ["run.steps=1", *settings], folder=folder / "model")
        train([*command, "--overwrite"], said=folder / "model.txt")


# --- The claim ------------------------------------------------------------------------------------


def check(outcomes: Sequence[Outcome]) -> list[str]:
    """The claim; and what chance alone does: synchronous runs with and without a correction, which
    has nothing to correct there.
    """
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.recipe.name, []).append(outcome)
    lines: list[str] = []
    for name in ("async-4", f"synchronous{UNCORRECTED}"):
        if name in found and "synchronous" in found:
            words = difference(found[name], found["synchronous"])
            lines.append(f"- {name} less synchronous: {words}")
    return lines


def difference(its: Sequence[Outcome], others: Sequence[Outcome]) -> str:
    gap = statistics.mean(o.after for o in its) - statistics.mean(o.after for o in others)
    noise = math.hypot(noise_of(its), noise_of(others))
    verdict = "within noise" if abs(gap) <= WITHIN * noise else "NOT within noise"
    own = statistics.mean(o.training_seconds for o in its)
    wall = own / statistics.mean(o.training_seconds for o in others)
    return (
        f"{gap:+.3f} held out, {gap / noise:+.1f} times the noise of {noise:.3f}: **{verdict}**, "
        f"in **{wall:.2f}** of the wall time."
    )


def noise_of(found: Sequence[Outcome]) -> float:
    """Standard error of the mean over seeds; never below that of the held-out tasks alone, which
    few seeds may miss by luck.
    """
    score = statistics.mean(o.after for o in found)
    tasks = sum(o.num_heldout for o in found)
    variance = max(score * (1 - score), 1 / tasks)
    return max(standard_error([o.after for o in found]), math.sqrt(variance / tasks))


if __name__ == "__main__":
    main()
