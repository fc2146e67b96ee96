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
is a line of `results.jsonl` at once; tables, check and picture are made of that file, see
`learning_report.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from learning_report import Result, read_results, report, write_docs  # noqa: E402
from overlap_runs import cpu_seconds  # noqa: E402
from smoke import SETTINGS, options_of  # noqa: E402

from midflight.observe.history import JournalHistory, read_journal  # noqa: E402
from midflight.observe.lines import StepLine  # noqa: E402
from midflight.observe.memory import descendants  # noqa: E402

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
AGED = {"aged-4": 4, "aged-8": 8}
"""By `max_staleness`. Rollouts are scored late, so that tokens are as old as it allows, which short
answers never become by themselves. What they learn is compared, not how long they take."""
LATE_SECONDS = 0.5
"""For each version of a full pipeline: more than a step takes, so that rollouts and not the cores
set the pace.
"""
CPU_INTERVAL_SECONDS = 0.5


@dataclass(frozen=True)
class Plan:
    """One run."""

    mode: str
    correction: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.mode}/{self.correction}"


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
    plans = _plans(options.seeds, options.only)
    done = {(r.mode, r.correction, r.seed) for r in read_results(results, steps=options.steps)}
    missing = [plan for plan in plans if (plan.mode, plan.correction, plan.seed) not in done]
    model = _model(options) if missing else None
    for number, plan in enumerate(missing, start=1):
        result = _run(options, plan, model)
        with results.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        print(f"{number}/{len(missing)} {_line(result)}", flush=True)
    found = read_results(results, steps=options.steps)
    print("\n" + report(found))
    if options.write_docs:
        write_docs(found, HERE.parent / "docs")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="optimiser steps of every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="MODE[/CORRECTION]",
        help=f"of {', '.join([*MODES, *AGED])}; of {', '.join(CORRECTIONS)}",
    )
    parser.add_argument(
        "--resume-from",
        type=Path,
        metavar="FILE",
        help="results so far: their runs are not run again, new ones are added",
    )
    parser.add_argument(
        "--write-docs", action="store_true", help="puts table and picture into docs/"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--config", type=Path, default=HERE.parent / "configs" / "demo.toml")
    parser.add_argument("--set", nargs="+", default=[], metavar="OPTION", help="of every run")
    return options_of(
        parser,
        steps=2,
        seeds=[0],
        only=["async-1/default"],
        set=SETTINGS,
        folder=Path("runs/smoke/learning"),
    )


def _plans(seeds: Sequence[int], only: Sequence[str]) -> list[Plan]:
    """Seed by seed. Each seed starts elsewhere in the same cycle, so that no mode always follows a
    full machine or an idle one.
    """
    kinds = [(mode, correction) for correction in CORRECTIONS for mode in [*MODES, *AGED]]
    kinds = [kind for kind in kinds if not only or kind[0] in only or "/".join(kind) in only]
    shift = max(1, len(kinds) // max(1, len(seeds)))
    return [
        Plan(*kinds[(at + number * shift) % len(kinds)], seed)
        for number, seed in enumerate(seeds)
        for at in range(len(kinds))
    ]


def _model(options: argparse.Namespace) -> Path:
    """What all runs start from: the demo's model after the demo's warm start."""
    start = options.folder / "model" / "start"
    if not (start / "config.json").exists():
        print(f"making the model to start from in {start}", flush=True)
        if _train(options.config, options.folder / "model", ("run.steps=1", *options.set)).wait():
            raise SystemExit(
                f"the model was not made; see {options.folder / 'model' / 'output.txt'}"
            )
    return start


def _train(
    config: Path, folder: Path, settings: Sequence[str], *, late: float = 0.0
) -> subprocess.Popen[bytes]:
    """`midflight train`, which writes its words to `output.txt`. `late` is how long a
    `delayed_environment` takes, in seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = [word for setting in settings for word in ("--set", setting)]
    surroundings = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        "MIDFLIGHT_DELAY_MEDIAN_SECONDS": str(late),
        "MIDFLIGHT_DELAY_SIGMA": "0",
    }
    with (folder / "output.txt").open("w") as output:
        command = [
            sys.executable,
            "-m",
            "midflight",
            "train",
            str(config),
            "--folder",
            str(folder),
            "--overwrite",
            *options,
        ]
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=surroundings)


# --- One run --------------------------------------------------------------------------------------


def _run(options: argparse.Namespace, plan: Plan, model: Path | None) -> Result:
    folder = options.folder / "run"
    always = (
        f"model.path={model}",
        "warm_start.target_accuracy=none",
        "trainer.checkpoint_every=0",
        "run.restarts=0",
    )
    # Seeds of requests come of the run's name and seed: with one name, all modes are scored on the
    # same tasks with the same luck.
    mine = (
        "run.name=learning",
        f"run.steps={options.steps}",
        f"run.seed={plan.seed}",
        *CORRECTIONS[plan.correction],
    )
    aged = AGED.get(plan.mode)
    mode, late = (
        (MODES[plan.mode], 0.0) if aged is None else (_aged(aged), LATE_SECONDS * (aged + 1))
    )
    process = _train(options.config, folder, (*always, *mine, *mode, *options.set), late=late)
    try:
        cpu = _cpu_readings(process)
    finally:
        process.terminate()  # does nothing to one that has ended
        process.wait()
    if process.returncode:
        raise SystemExit(
            f"{plan.name}, seed {plan.seed} ended with "
            f"{process.returncode}:\n{(folder / 'output.txt').read_text()[-3000:]}"
        )
    return _result(plan, folder, cpu)


def _aged(max_staleness: int) -> tuple[str, ...]:
    """As many rollouts at once as admission allows: the default of `max_in_flight` and
    `buffer_groups`.
    """
    return (
        f"rollout.max_staleness={max_staleness}",
        "rollout.max_in_flight=none",
        "rollout.buffer_groups=none",
        "environment.entry=delayed_environment:answer",
        # it blocks nothing, and counts the rollouts of a task in its process
        "environment.workers=0",
    )


def _cpu_readings(process: subprocess.Popen[bytes]) -> list[tuple[float, float]]:
    """Time of day, and CPU seconds that the processes of the run have used until then. Returns when
    the run has ended.
    """
    readings: list[tuple[float, float]] = []
    while process.poll() is None:
        readings.append((time.time(), sum(cpu_seconds(pid) for pid in descendants(process.pid))))
        time.sleep(CPU_INTERVAL_SECONDS)
    return readings


def _result(plan: Plan, folder: Path, cpu: Sequence[tuple[float, float]]) -> Result:
    summary = json.loads((folder / "summary.json").read_text())
    history = read_journal(folder / "metrics.jsonl")
    began, ended = _phase(history)
    # The journal's clock began when its last line, which is of the last evaluation, was written,
    # less what that line says.
    origin = (folder / "metrics.jsonl").stat().st_mtime - history.evaluations[-1].seconds
    times, spent = zip(*cpu, strict=True)
    used = np.interp([origin + began, origin + ended], times, spent)
    ages = history.trained_ages
    return Result(
        mode=plan.mode,
        correction=plan.correction,
        seed=plan.seed,
        steps=len(history.steps),
        before=summary["heldout_before"],
        after=summary["heldout_after"],
        num_heldout=summary["sources"][summary["primary"]]["num_heldout"],
        wall_seconds=round(ended - began, 3),
        cpu_seconds=round(float(used[1] - used[0]), 2),
        mean_age=round(sum(age * count for age, count in ages.items()) / sum(ages.values()), 4),
        max_age=summary["max_token_staleness"],
        ess=_mean(history.steps, "rho/ess"),
        divergence=_mean(history.steps, "rho/k3"),
        peak_memory_mb=summary["peak_memory_mb"],
        trained_tokens=summary["trained_tokens"],
        generated_tokens=summary["generated_tokens"],
        curve=_curve(history.steps, summary["primary"], began),
    )


def _phase(history: JournalHistory) -> tuple[float, float]:
    """From the end of the evaluation before the first step to the end of the last step, on the
    journal's clock.
    """
    return max(line.seconds for line in history.evaluations if line.step == 0), history.steps[
        -1
    ].seconds


def _mean(steps: Sequence[StepLine], key: str) -> float:
    values = [value for line in steps if (value := (line.trainer or {}).get(key)) is not None]
    return float(np.mean(values))


def _curve(steps: Sequence[StepLine], source: str, began: float) -> list[tuple[float, float]]:
    """Seconds since the phase began, and the mean reward of the rollouts that ended since the line
    before.
    """
    rewards = [
        (line.seconds - began, line.reward_by_source[source])
        for line in steps
        if line.reward_by_source and source in line.reward_by_source
    ]
    return [(round(seconds, 3), round(reward, 4)) for seconds, reward in rewards]


def _line(r: Result) -> str:
    return (
        f"{r.mode}/{r.correction} seed {r.seed}: held out {r.before:.3f} -> {r.after:.3f}, "
        f"{r.wall_seconds:.1f} s, {r.cpu_seconds:.1f} CPU s, age {r.mean_age:.2f} (at most "
        f"{r.max_age}), ess {r.ess:.3f}"
    )


if __name__ == "__main__":
    main()
