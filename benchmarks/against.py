"""This checkout beside another one: what the same work costs in CPU seconds, alternately, in one
run.

    git worktree add ../before COMMIT
    python benchmarks/against.py ../before [--rounds 5] \\
        [--benchmarks engine training handover overlap gateway]

Every round runs the benchmarks of both checkouts, each with its own sources and its own scripts,
the second of them first in every other round. A ratio below 1 means that this checkout is cheaper;
requests per second are higher is better, and their ratio is turned round for that. Medians of the
rounds, with the lowest and the highest ratio of a round: on shared cores one round says little. Of
5, 10 or 20 rounds also the mean of their ratios with its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from smoke import options_of
from training import SHAPES, UNMEASURED, write

HERE = Path(__file__).resolve().parent
STUDENT = {4: 2.776, 9: 2.262, 19: 2.093}
"""The 97.5 % point of Student's t, by degrees of freedom: of 5, 10 and 20 rounds."""
CPU_CLOCK = (
    "import runpy, sys, time; time.perf_counter = time.process_time; sys.argv = "
    "sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Runs a script of one process and one thread that measures rates, so that they are rates of CPU
seconds.
"""
Costs = dict[str, float]
"""Of one run: cost for each thing measured, in a unit of its own."""


@dataclass(frozen=True)
class Checkout:
    root: Path
    folder: Path
    """For what its benchmarks write."""
    smoke: Sequence[str] = ()

    def run(self, script: str, *arguments: object, by: Sequence[str] = ()) -> str:
        """What the script prints. `by` stands between the interpreter and the script."""
        command = [sys.executable, *by, self.root / "benchmarks" / script, *arguments, *self.smoke]
        paths = os.pathsep.join(str(self.root / part) for part in ("src", "benchmarks"))
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(
                f"{script} of {self.root} ended with {done.returncode}:\n{done.stderr[-3000:]}"
            )
        return done.stdout


def engine(checkout: Checkout) -> Costs:
    """An older script has other options, and another table."""
    newer = "--sides" in (checkout.root / "benchmarks" / "engine.py").read_text()
    words = ("--sides", "plain", "--threads", 1, "--rounds", 2) if newer else ()
    pattern = r"^\| (\d+) \| 1 \| ([\d,]+) \(" if newer else r"^ +(\d+) +(\d+) +\d+ +[\d.]+$"
    rows = re.findall(
        pattern, checkout.run("engine.py", *words, by=("-c", CPU_CLOCK)), re.MULTILINE
    )
    return {
        f"{running} running, CPU us/token": 1e6 / float(rate.replace(",", ""))
        for running, rate in rows
    }


def training(checkout: Checkout) -> Costs:
    """Both train on what this checkout wrote."""
    costs: Costs = {}
    for shape in SHAPES[-1:] if checkout.smoke else SHAPES[:2]:
        folder = checkout.folder / shape.name
        out = checkout.folder / f"{shape.name}.json"
        folder.mkdir(parents=True, exist_ok=True)
        write(shape, folder)
        Checkout(checkout.root, checkout.folder).run(
            "training_ours.py", folder, out, UNMEASURED + 5
        )
        costs[f"{shape.name}, CPU s/step"] = statistics.median(
            json.loads(out.read_text())["cpu"][UNMEASURED:]
        )
    return costs


def handover(checkout: Checkout) -> Costs:
    out = checkout.folder / "handover.json"
    checkout.run("handover.py", "--engines", "embedded", "--rounds", 5, "--json", out)
    samples = json.loads(out.read_text())
    ways = sorted({sample["way"] for sample in samples})
    return {
        f"{way}, CPU ms": 1e3
        * statistics.median(s["total_cpu"] for s in samples if s["way"] == way)
        for way in ways
    }


def overlap(checkout: Checkout) -> Costs:
    steps = ("--steps", 30, "--sync-steps", 5, "--warmup", 5)
    printed = checkout.run(
        "overlap.py", "--rounds", 1, *steps, "--folder", checkout.folder / "overlap"
    )
    rows = re.findall(r"^(synchronous|asynchronous) .* ([\d.]+)$", printed, re.MULTILINE)
    return {f"{name}, CPU s/step": float(seconds) for name, seconds in rows}


def gateway(checkout: Checkout) -> Costs:
    printed = checkout.run("gateway.py", "--seconds", 4, "--rounds", 1, "--sessions", 0)
    found = re.search(
        r"^midflight +\S+ +\S+ +(\d+) +\S+ +(\d+) +(\d+) +([\d.]+) ", printed, re.MULTILINE
    )
    assert found, printed
    rate, cpu, streamed, streamed_cpu = map(float, found.groups())
    return {
        "ms of a request, 32 at once": 1e3 / rate,
        "CPU us/request": cpu,
        "us of a streamed token": 1e6 / streamed,
        "CPU us/token": streamed_cpu,
    }


BENCHMARKS: dict[str, Callable[[Checkout], Costs]] = {
    "engine": engine,
    "training": training,
    "handover": handover,
    "overlap": overlap,
    "gateway": gateway,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "other", type=Path, nargs="?", default=HERE.parent, help="root of the other checkout"
    )
    parser.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/against"))
    options = options_of(parser, rounds=1, benchmarks=["engine", "handover"])
    smoke = ("--smoke",) if options.smoke else ()
    sides = [
        Checkout(options.other.resolve(), options.folder.resolve() / "before", smoke),
        Checkout(HERE.parent, options.folder.resolve() / "now", smoke),
    ]
    for name in options.benchmarks:
        rounds: list[list[Costs]] = []
        for number in range(options.rounds):
            found = {
                side.folder.name: BENCHMARKS[name](side)
                for side in (sides if number % 2 else sides[::-1])
            }
            rounds.append([found["before"], found["now"]])
            print(
                f"{name}: round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True
            )
        report(name, rounds)


def report(name: str, rounds: list[list[Costs]]) -> None:
    for what in rounds[0][1]:
        before = statistics.median(found[0][what] for found in rounds)
        now = statistics.median(found[1][what] for found in rounds)
        ratios = [new[what] / old[what] for old, new in rounds]
        ratio = f"{now / before:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(
            f"{name + ': ' + what:45} {before:10.3f} -> {now:10.3f}   {ratio}{interval(ratios)}",
            flush=True,
        )


def interval(ratios: Sequence[float]) -> str:
    """The 95 % interval of the ratios' geometric mean; empty where they are too few."""
    degrees = len(ratios) - 1
    if degrees not in STUDENT:
        return ""
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    width = STUDENT[degrees] * statistics.stdev(logs) / math.sqrt(len(logs))
    low = math.exp(middle - width)
    high = math.exp(middle + width)
    return f"   mean {math.exp(middle):.3f}, 95 % from {low:.3f} to {high:.3f}"


if __name__ == "__main__":
    main()
