"""This checkout beside another one: what the same work costs in CPU seconds, alternately, in one
run.

    git worktree add ../before COMMIT
    python benchmarks/against.py ../before [--rounds 5] \\
        [--benchmarks engine training handover overlap gateway] [--streams 16]

Every round runs the benchmarks of both checkouts, each with its own sources and its own scripts, in
turn. A ratio below 1 means that this checkout is cheaper; of rates, of which more is better, the
inverse is compared. Medians of the rounds, with the lowest and the highest ratio of a round: on
shared cores one round says little. The mean of their ratios has its 95 % interval.

What decodes beside a handover costs more than the handover, and another amount in each round: with
`--streams 0` nothing does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.arguments import Arguments
from harness.processes import BENCHMARKS, ROOT, TICKS, environment, output_of
from harness.report import Report
from harness.rounds import Ratio, alternate
from training import SHAPES, UNMEASURED, write

CPU_CLOCK = (
    "import runpy, sys, time; time.perf_counter = time.process_time; sys.argv = "
    "sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Runs a script of one process and one thread that measures rates, so that they are rates of CPU
seconds.
"""
HANDOVERS = 12
"""Versions that are handed over in a round. Their mean counts parts of a tick."""
Costs = dict[str, float]
"""The cost of each thing that a run measured, in a unit of its own."""


@dataclass(frozen=True)
class Checkout:
    root: Path
    folder: Path
    """Its benchmarks write there."""
    smoke: Sequence[str] = ()
    streams: int = 16
    """Answers that are decoded beside a handover."""

    def run(self, script: str, *arguments: object, by: Sequence[str] = ()) -> str:
        """What the script prints. `by` stands between the interpreter and the script."""
        path = self.root / "benchmarks" / script
        return self._output([sys.executable, *by, path, *arguments, *self.smoke])

    def run_steps(self, folder: Path, out: Path, steps: int) -> None:
        """The trainer's steps on a batch, by whichever program the checkout has for it."""
        program: list[object] = ["-m", "sides.trainer_steps"]
        if not (self.root / "benchmarks" / "sides" / "trainer_steps.py").exists():
            program = [self.root / "benchmarks" / "training_ours.py"]
        self._output([sys.executable, *program, folder, out, steps])

    @property
    def engine_side(self) -> str:
        """The name that `engine.py` of the checkout has for the embedded engine."""
        script = (self.root / "benchmarks" / "engine.py").read_text()
        return "engine" if 'SIDES = ("engine"' in script else "plain"

    def _output(self, command: Sequence[object]) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = [str(self.root / part) for part in ("src", "benchmarks")]
        environ = environment() | {"PYTHONPATH": os.pathsep.join(paths)}
        return output_of(command, environ=environ, cwd=self.folder)


def engine(checkout: Checkout) -> Costs:
    words = ("--sides", checkout.engine_side, "--threads", 1, "--rounds", 2)
    printed = checkout.run("engine.py", *words, by=("-c", CPU_CLOCK))
    rows = re.findall(r"^\| (\d+) \| 1 \| ([\d,]+) \(", printed, re.MULTILINE)
    costs: Costs = {}
    for running, rate in rows:
        costs[f"{running} running, CPU us/token"] = 1e6 / float(rate.replace(",", ""))
    return costs


def training(checkout: Checkout) -> Costs:
    """Both train on what this checkout wrote."""
    costs: Costs = {}
    for shape in SHAPES[-1:] if checkout.smoke else SHAPES[:2]:
        folder = checkout.folder / shape.name
        out = checkout.folder / f"{shape.name}.json"
        folder.mkdir(parents=True, exist_ok=True)
        write(shape, folder)
        checkout.run_steps(folder, out, UNMEASURED + 5)
        seconds = json.loads(out.read_text())["cpu"][UNMEASURED:]
        costs[f"{shape.name}, CPU s/step"] = statistics.median(seconds)
    return costs


def handover(checkout: Checkout) -> Costs:
    out = checkout.folder / "handover.json"
    # 100 million weights: the kernel counts in ticks of 10 ms, and a small version takes four
    size = ("--hidden-size", 1024, "--layers", 8)
    words = ("--engines", "embedded", "--transports", "shared_memory", "--rounds", HANDOVERS)
    streams = () if checkout.smoke else ("--in-flight", checkout.streams)
    checkout.run("handover.py", *words, *size, *streams, "--json", out)
    found: Any = json.loads(out.read_text())
    samples: Any = found if isinstance(found, list) else found["samples"]
    # the kernel counts in ticks, of which the smallest handover takes none
    used: list[float] = [max(sample["total_cpu"], 1 / TICKS) for sample in samples]
    return {"shared_memory, CPU ms": 1e3 * statistics.fmean(used)}


def overlap(checkout: Checkout) -> Costs:
    """Both start from one model, which the first run makes: another one gives longer or shorter
    answers, which is other work.
    """
    start = checkout.folder / "overlap" / "model" / "start"
    shared = checkout.folder.parent / "overlap-start"
    if shared.exists():
        shutil.rmtree(start, ignore_errors=True)
        shutil.copytree(shared, start)
    words = ("--rounds", 1, "--steps", 30, "--sync-steps", 5, "--warmup", 5)
    printed = checkout.run("overlap.py", *words, "--folder", checkout.folder / "overlap")
    if not shared.exists():
        shutil.copytree(start, shared)
    line = r"^(?:\| )?(synchronous|asynchronous) .* ([\d.]+)(?: \|)?$"
    costs: Costs = {}
    for name, seconds in re.findall(line, printed, re.MULTILINE):
        costs[f"{name}, CPU s/step"] = float(seconds)
    return costs


def gateway(checkout: Checkout) -> Costs:
    printed = checkout.run("gateway.py", "--seconds", 4, "--rounds", 1, "--sessions", 0)
    line = next(line for line in printed.splitlines() if re.match(r"(\| )?midflight\b", line))
    _, _, rate, _, cpu, streamed, streamed_cpu, _ = map(float, re.findall(r"[\d.]+", line))
    return {
        "ms of a request, 32 at once": 1e3 / rate,
        "CPU us/request": cpu,
        "us of a streamed token": 1e6 / streamed,
        "CPU us/token": streamed_cpu,
    }


MEASURES: dict[str, Callable[[Checkout], Costs]] = {
    "engine": engine,
    "training": training,
    "handover": handover,
    "overlap": overlap,
    "gateway": gateway,
}


def main() -> None:
    arguments = Arguments(__doc__, rounds=5)
    arguments.option(
        "other", ROOT, nargs="?", help="root of the other checkout; default: this one again"
    )
    arguments.option("--benchmarks", [*MEASURES], smoke=["engine", "handover"], choices=[*MEASURES])
    arguments.option("--folder", Path("runs/against"))
    arguments.option("--streams", 16, help="answers that are decoded beside a handover")
    options = arguments.parse()
    smoke = ("--smoke",) if options.smoke else ()
    folder = options.folder.resolve()
    before = Checkout(options.other.resolve(), folder / "before", smoke, options.streams)
    now = Checkout(BENCHMARKS.parent, folder / "now", smoke, options.streams)
    report = Report(options)
    table = report.table("what", "before", "now", "now / before", "of a round", "mean")
    for name in options.benchmarks:
        measure = MEASURES[name]
        sides = {"before": partial(measure, before), "now": partial(measure, now)}
        found = alternate(sides, rounds=options.rounds)
        for what in found["now"][0]:
            old = [costs[what] for costs in found["before"]]
            new = [costs[what] for costs in found["now"]]
            ratios = [a / b for a, b in zip(new, old, strict=True)]
            table.row(
                f"{name}: {what}",
                f"{statistics.median(old):.3f}",
                f"{statistics.median(new):.3f}",
                f"{statistics.median(new) / statistics.median(old):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                Ratio.of(new, old),
            )
    report.close()


if __name__ == "__main__":
    main()
