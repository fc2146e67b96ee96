"""Does learning suffer from age? The demo task, synchronous, one step off and asynchronous, with
and without the correction.

    python benchmarks/learning.py --write-docs
        all runs
    python benchmarks/learning.py --seeds 0 --steps 10 --only synchronous async-4
        a look at it
    python benchmarks/learning.py --resume-from runs/learning/results.jsonl
        goes on where it was interrupted

Every run is a `midflight train` of `configs/demo.toml` from one model, which is warm already (made
once, kept under --folder), with the same steps, batches and learning rates; runs differ in their
mode, the correction and the seed (tasks, their order, sampling). They go one after the other, each
with both cores, seed by seed, so that a machine that drifts drifts under all modes. What a run gave
is a line of `results.jsonl` at once; tables, check and picture are made of that file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness.arguments import Arguments
from harness.pages import markdown, panels, replace_between, style
from harness.processes import ROOT, cpu_seconds, family
from harness.report import Report
from harness.rounds import standard_error
from harness.runs import DEMO, SMALL, train, train_command, training

from midflight.observe.history import JournalHistory, read_journal
from midflight.observe.lines import StepLine

MODES: Mapping[str, tuple[str, ...]] = {
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
CORRECTIONS: Mapping[str, tuple[str, ...]] = {"default": (), "off": ("correction.weight=off",)}
CPU_INTERVAL_SECONDS = 0.5
PICTURE = Path("images/learning.svg")
COLORS = {
    "synchronous": "#444b54",
    "one-step-off": "#8b3a8b",
    "async-1": "#2563a8",
    "async-4": "#2e8b57",
    "async-8": "#c2571a",
}
WINDOW = 9
"""Steps of the moving mean in the picture."""
WITHIN = 2.0
"""Standard errors of the difference that count as noise."""
Kind = tuple[str, str]
"""Mode and correction."""


@dataclass(frozen=True)
class Result:
    """One run. Seconds are of the phase between the evaluations before and after; `ess`,
    `divergence` are means over steps.
    """

    mode: str
    correction: str
    seed: int
    steps: int
    before: float
    after: float
    """Mean reward on held-out tasks of the first source."""
    num_heldout: int
    wall_seconds: float
    cpu_seconds: float
    """Of all processes."""
    mean_age: float
    """Over trained tokens."""
    max_age: int
    ess: float
    """Effective sample size of the weights used, over the number of tokens."""
    divergence: float
    """KL divergence between the policy that begins a step and the one that sampled its tokens."""
    peak_memory_mb: float
    trained_tokens: int
    generated_tokens: int
    curve: Sequence[tuple[float, float]]
    """Seconds, and mean reward of the rollouts of the first source that ended since the point
    before.
    """

    def __str__(self) -> str:
        return (
            f"{self.mode}/{self.correction} seed {self.seed}: held out {self.before:.3f} -> "
            f"{self.after:.3f}, {self.wall_seconds:.1f} s, {self.cpu_seconds:.1f} CPU s, age "
            f"{self.mean_age:.2f} (at most {self.max_age}), ess {self.ess:.3f}"
        )


@dataclass(frozen=True)
class Plan:
    """One run that is to be made."""

    mode: str
    correction: str
    seed: int


Runs = Mapping[Kind, Sequence[Result]]


def main() -> None:
    options = _options()
    results = options.resume_from or options.folder / "results.jsonl"
    if options.smoke:
        results.unlink(missing_ok=True)
    if results.exists() and options.resume_from is None:
        raise SystemExit(
            f"{results} holds runs already: go on with them by --resume-from {results}, or move "
            "the file away."
        )
    report = Report(options)
    done = {(r.mode, r.correction, r.seed) for r in read_results(results, steps=options.steps)}
    missing: list[Plan] = []
    for plan in plans_of(options.seeds, options.only):
        if (plan.mode, plan.correction, plan.seed) not in done:
            missing.append(plan)
    for number, plan in enumerate(missing, start=1):
        result = run(options, plan, first_model(options))
        with results.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        report.say(f"{number}/{len(missing)} {result}")
    runs = grouped(read_results(results, steps=options.steps))
    shown = f"{table_of(runs)}\n\n" + "\n".join(check(runs))
    report.say(f"\n{shown}")
    report.keep("table", shown)
    if options.write_docs:
        page = ROOT / "docs" / "benchmarks.md"
        replace_between(page, "learning", f"![Reward over wall time]({PICTURE})\n\n{shown}")
        draw(runs, page.parent / PICTURE)
    report.close()


def _options() -> argparse.Namespace:
    kinds = f"of {', '.join(MODES)}; of {', '.join(CORRECTIONS)}"
    arguments = Arguments(__doc__)
    arguments.option("--steps", 60, smoke=2, help="optimiser steps of every run")
    arguments.option("--seeds", [0, 1, 2], smoke=[0])
    arguments.option(
        "--only", [], smoke=["async-1/default"], metavar="MODE[/CORRECTION]", help=kinds
    )
    arguments.option(
        "--resume-from",
        None,
        type=Path,
        metavar="FILE",
        help="results so far: their runs are not run again, new ones are added",
    )
    arguments.option("--write-docs", False, help="put table and picture into docs/")
    arguments.option("--folder", Path("runs/learning"), smoke=Path("runs/smoke/learning"))
    arguments.option("--config", DEMO)
    arguments.option("--set", [], smoke=[*SMALL], metavar="OPTION", help="of every run")
    return arguments.parse()


def plans_of(seeds: Sequence[int], only: Sequence[str]) -> list[Plan]:
    """Seed by seed. Each seed starts elsewhere in the same cycle, so that no mode always follows a
    full machine or an idle one.
    """
    kinds = [kind for kind in all_kinds() if not only or kind[0] in only or "/".join(kind) in only]
    shift = max(1, len(kinds) // max(1, len(seeds)))
    plans: list[Plan] = []
    for number, seed in enumerate(seeds):
        for at in range(len(kinds)):
            mode, correction = kinds[(at + number * shift) % len(kinds)]
            plans.append(Plan(mode, correction, seed))
    return plans


def all_kinds() -> list[Kind]:
    """In the order of the modes, those with the correction first."""
    kinds: list[Kind] = []
    for correction in CORRECTIONS:
        for mode in MODES:
            kinds.append((mode, correction))
    return kinds


def read_results(path: Path, *, steps: int) -> list[Result]:
    """Of a file that need not exist. `SystemExit` if its runs had another number of steps."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [Result(**json.loads(line)) for line in lines]
    for result in found:
        if result.steps != steps:
            raise SystemExit(
                f"{path} holds runs of {result.steps} steps, and {steps} were asked for: pass "
                "--steps, or choose another file."
            )
    return found


# --- One run --------------------------------------------------------------------------------------


def first_model(options: argparse.Namespace) -> Path:
    """What all runs start from: the demo's model after the demo's warm start. It is made once."""
    folder = options.folder / "model"
    if not (folder / "start" / "config.json").exists():
        print(f"making the model to start from in {folder}", flush=True)
        command = train_command(options.config, ["run.steps=1", *options.set], folder=folder)
        train([*command, "--overwrite"], said=options.folder / "model.txt")
    return folder / "start"


def run(options: argparse.Namespace, plan: Plan, model: Path) -> Result:
    folder = options.folder / "run"
    settings = [
        f"model.path={model}",
        "warm_start.target_accuracy=none",
        "trainer.checkpoint_every=0",
        "run.restarts=0",
        # Seeds of requests come of the run's name and seed: with one name, all modes are scored on
        # the same tasks with the same luck.
        "run.name=learning",
        f"run.steps={options.steps}",
        f"run.seed={plan.seed}",
        *CORRECTIONS[plan.correction],
        *MODES[plan.mode],
        *options.set,
    ]
    said = options.folder / "run.txt"
    command = [*train_command(options.config, settings, folder=folder), "--overwrite"]
    with training(command, said=said) as process:
        cpu = cpu_readings(process)
    if process.returncode:
        shown = said.read_text()[-3000:]
        raise SystemExit(f"{plan} ended with {process.returncode}:\n{shown}")
    return result_of(plan, folder, cpu)


def cpu_readings(process: subprocess.Popen[bytes]) -> list[tuple[float, float]]:
    """Time of day, and CPU seconds that the processes of the run have used until then. Returns when
    the run has ended.
    """
    readings: list[tuple[float, float]] = []
    while process.poll() is None:
        used = sum(cpu_seconds(pid) for pid in family(process.pid))
        readings.append((time.time(), used))
        time.sleep(CPU_INTERVAL_SECONDS)
    return readings


def result_of(plan: Plan, folder: Path, cpu: Sequence[tuple[float, float]]) -> Result:
    summary = json.loads((folder / "summary.json").read_text())
    history = read_journal(folder / "metrics.jsonl")
    began, ended = phase_of(history)
    # The journal's clock began when its last line, which is of the last evaluation, was written,
    # less what that line says.
    origin = (folder / "metrics.jsonl").stat().st_mtime - history.evaluations[-1].seconds
    times, spent = zip(*cpu, strict=True)
    used_before, used_after = np.interp([origin + began, origin + ended], times, spent)
    ages = history.trained_ages
    mean_age = sum(age * count for age, count in ages.items()) / sum(ages.values())
    return Result(
        mode=plan.mode,
        correction=plan.correction,
        seed=plan.seed,
        steps=len(history.steps),
        before=summary["heldout_before"],
        after=summary["heldout_after"],
        num_heldout=summary["sources"][summary["primary"]]["num_heldout"],
        wall_seconds=round(ended - began, 3),
        cpu_seconds=round(float(used_after - used_before), 2),
        mean_age=round(mean_age, 4),
        max_age=summary["max_token_staleness"],
        ess=mean_reading(history.steps, "rho/ess"),
        divergence=mean_reading(history.steps, "rho/k3"),
        peak_memory_mb=summary["peak_memory_mb"],
        trained_tokens=summary["trained_tokens"],
        generated_tokens=summary["generated_tokens"],
        curve=curve_of(history.steps, summary["primary"], began),
    )


def phase_of(history: JournalHistory) -> tuple[float, float]:
    """From the end of the evaluation before the first step to the end of the last step, on the
    journal's clock.
    """
    began = max(line.seconds for line in history.evaluations if line.step == 0)
    return began, history.steps[-1].seconds


def mean_reading(steps: Sequence[StepLine], key: str) -> float:
    readings = [(line.trainer or {}).get(key) for line in steps]
    return statistics.fmean(value for value in readings if value is not None)


def curve_of(steps: Sequence[StepLine], source: str, began: float) -> list[tuple[float, float]]:
    """Seconds since the phase began, and the mean reward of the rollouts that ended since the line
    before.
    """
    curve: list[tuple[float, float]] = []
    for line in steps:
        reward = (line.reward_by_source or {}).get(source)
        if reward is not None:
            curve.append((round(line.seconds - began, 3), round(reward, 4)))
    return curve


# --- Table and check ------------------------------------------------------------------------------


def grouped(results: Sequence[Result]) -> Runs:
    found: dict[Kind, list[Result]] = {}
    for kind in all_kinds():
        its = [result for result in results if (result.mode, result.correction) == kind]
        if its:
            found[kind] = its
    return found


def table_of(runs: Runs) -> str:
    headings = ("mode", "correction", "held out before", "after", "wall s", "CPU s", "age: mean")
    rows = [[*kind, *cells(found)] for kind, found in runs.items()]
    return markdown((*headings, "max", "ESS", "divergence", "peak MB"), rows)


def cells(found: Sequence[Result]) -> list[str]:
    before = [r.before for r in found]
    after = [r.after for r in found]
    wall = [r.wall_seconds for r in found]
    return [
        f"{statistics.mean(before):.3f} ± {standard_error(before):.3f}",
        f"**{statistics.mean(after):.3f}** ± {standard_error(after):.3f}",
        f"{statistics.mean(wall):.1f} ± {standard_error(wall):.1f}",
        f"{statistics.mean(r.cpu_seconds for r in found):.1f}",
        f"{statistics.mean(r.mean_age for r in found):.2f}",
        str(max(r.max_age for r in found)),
        f"{statistics.mean(r.ess for r in found):.3f}",
        f"{statistics.mean(r.divergence for r in found):.1g}",
        f"{max(r.peak_memory_mb for r in found):,.0f}",
    ]


def check(runs: Runs) -> list[str]:
    """The claim; and what chance alone does: synchronous runs with and without a correction, which
    has nothing to correct there.
    """
    synchronous = ("synchronous", "default")
    lines: list[str] = []
    for kind in (("async-4", "default"), ("synchronous", "off")):
        if kind in runs and synchronous in runs:
            words = difference(runs[kind], runs[synchronous])
            lines.append(f"- {'/'.join(kind)} less {'/'.join(synchronous)}: {words}")
    return lines


def difference(its: Sequence[Result], others: Sequence[Result]) -> str:
    gap = statistics.mean(r.after for r in its) - statistics.mean(r.after for r in others)
    noise = math.hypot(noise_of(its), noise_of(others))
    verdict = "within noise" if abs(gap) <= WITHIN * noise else "NOT within noise"
    own = statistics.mean(r.wall_seconds for r in its)
    wall = own / statistics.mean(r.wall_seconds for r in others)
    return (
        f"{gap:+.3f} held out, {gap / noise:+.1f} times the noise of {noise:.3f}: **{verdict}**, "
        f"in **{wall:.2f}** of the wall time."
    )


def noise_of(found: Sequence[Result]) -> float:
    """Standard error of the mean over seeds; never below that of the held-out tasks alone, which
    few seeds may miss by luck.
    """
    score = statistics.mean(r.after for r in found)
    tasks = sum(r.num_heldout for r in found)
    variance = max(score * (1 - score), 1 / tasks)
    return max(standard_error([r.after for r in found]), math.sqrt(variance / tasks))


# --- Picture --------------------------------------------------------------------------------------


def draw(runs: Runs, picture: Path) -> None:
    """Reward over wall time: mean of the seeds, and the band from the lowest to the highest, to
    where the first of them ended.
    """
    with panels(picture, len(CORRECTIONS), size=(10, 4), sharex=True) as axes:
        titles = ("with the default correction", "without")
        for place, correction, title in zip(axes, CORRECTIONS, titles, strict=True):
            for (mode, its), found in runs.items():
                if its == correction:
                    draw_mode(place, mode, found)
            style(place, title)
            place.set_xlabel("seconds of training")
        axes[0].set_ylabel("reward, spelling backward")
        axes[0].legend(frameon=False, loc="lower right")


def draw_mode(axes: Any, mode: str, found: Sequence[Result]) -> None:
    curves = [np.array(result.curve) for result in found]
    begin = max(curve[0, 0] for curve in curves)
    times = np.linspace(begin, min(curve[-1, 0] for curve in curves), 120)
    smooth = [np.interp(times, curve[:, 0], moving_mean(curve[:, 1])) for curve in curves]
    rewards = np.stack(smooth)
    axes.plot(times, rewards.mean(0), color=COLORS[mode], linewidth=1.8, label=mode)
    low = rewards.min(0)
    axes.fill_between(times, low, rewards.max(0), color=COLORS[mode], alpha=0.15, linewidth=0)


def moving_mean(values: np.ndarray) -> np.ndarray:
    """Mean over `WINDOW` steps around each, fewer at the ends."""
    weights = np.ones(min(WINDOW, len(values)))
    counts = np.convolve(np.ones(len(values)), weights, "same")
    return np.convolve(values, weights, "same") / counts


if __name__ == "__main__":
    main()
