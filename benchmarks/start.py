"""How soon a run begins.

    python benchmarks/start.py [--rounds 3]
    python benchmarks/start.py --parts rows

**demo**: seconds of `midflight --help`; of `midflight train configs/demo.toml` until its first
line, and from the end of its warm start until the first step of the optimiser is in the journal,
held-out tasks in between. Then which processes have loaded torch. It exits with 1 where one is
late, or where a process has torch that computes nothing. The warm start itself is short here: it
ends at an accuracy of 0.05.

**rows**: how soon 200 rows of one's own are trained on. Two files are written, rows and a
configuration of at most ten lines, and `midflight train` is started on them. Seconds are from its
start until the first step of the optimiser is in the journal, the look at all rows and the making
of a model included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness.arguments import Arguments
from harness.processes import ended_cpu_seconds, environment, family, output_of, parent_of, words_of
from harness.report import Report, make_parts
from harness.runs import DEMO, SMALL, train_command, training, wait_for_step

HELP_SECONDS = 0.3
LINE_SECONDS = 2.0
STEP_SECONDS = 10.0
CHILD = "midflight.run.launcher.child"
COMPUTES = {"trainer", "engine"}
"""Processes that may have torch."""


# --- The demo -------------------------------------------------------------------------------------


def demo(options: argparse.Namespace, report: Report) -> bool:
    """Returns whether everything was in time."""
    helped = statistics.median(help_seconds() for _ in range(3 * options.rounds))
    report.say(f"midflight --help: {helped:.2f} s (at most {HELP_SECONDS})")
    lines: list[float] = []
    steps: list[float] = []
    torch: dict[str, bool] = {}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as place:
            line, step = start_seconds(Path(place), torch, smoke=options.smoke)
        report.say(f"first line after {line:.2f} s, first step {step:.2f} s after the warm start")
        lines.append(line)
        steps.append(step)
    line = statistics.median(lines)
    step = statistics.median(steps)
    report.say(
        f"medians: first line {line:.2f} s (at most {LINE_SECONDS}), first step {step:.2f} s (at "
        f"most {STEP_SECONDS})"
    )
    loaded = [name for name, has in sorted(torch.items()) if has]
    others = [name for name, has in sorted(torch.items()) if not has]
    report.say(f"torch is loaded by: {', '.join(loaded)}; not by: {', '.join(others)}")
    needless = [name for name, has in torch.items() if has and name not in COMPUTES]
    late = helped > HELP_SECONDS or line > LINE_SECONDS or step > STEP_SECONDS
    return not late and not needless


def help_seconds() -> float:
    began = time.perf_counter()
    output_of([sys.executable, "-m", "midflight", "--help"])
    return time.perf_counter() - began


def start_seconds(place: Path, torch: dict[str, bool], *, smoke: bool) -> tuple[float, float]:
    """Returns the seconds until the first line, and from the end of the warm start to the first
    step. `torch` gets the name of each process, and whether it has loaded torch.
    """
    folder = place / "run"
    said = place / "said"
    settings = ["warm_start.target_accuracy=0.05"]
    if smoke:
        settings += SMALL
    began = time.time()
    first_line = 0.0

    def look(launcher: int) -> None:
        nonlocal first_line
        if not first_line and said.stat().st_size:
            first_line = said.stat().st_mtime
        look_for_torch(launcher, torch)

    with training(train_command(DEMO, settings, folder=folder), said=said) as run:
        while not first_line:
            if run.poll() is not None:
                raise SystemExit("the run ended before its first line")
            look(run.pid)
            time.sleep(0.01)
        wait_for_step(run, folder, look=look)
        stepped = time.time()
    warm = (folder / "start" / "config.json").stat().st_mtime
    return first_line - began, stepped - warm


def look_for_torch(launcher: int, torch: dict[str, bool]) -> None:
    """Adds the launcher and its children that live now to what was seen."""
    for pid in family(launcher):
        words = words_of(pid)
        if launcher not in (pid, parent_of(pid)) or len(words) < 4 or "midflight" not in words[2]:
            continue  # it has not begun, or is git, which is asked for the commit
        name = "launcher"
        if pid != launcher:
            name = words[3] if words[2] == CHILD else words[-2].rpartition(".")[2]
        try:
            has_torch = "libtorch" in Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue  # it has ended
        torch[name] = torch.get(name, False) or has_torch


# --- Rows of one's own ----------------------------------------------------------------------------

RUN = """\
[run]
folder = "run"
[[environment.sources]]
path = "rows.jsonl"
answer = "answer"
"""
ROWS = 200
TINY = ("model.hidden_size=32", "model.num_layers=1", "rollout.groups_per_step=2")


def rows(options: argparse.Namespace, report: Report) -> None:
    report.say(f"{len(RUN.splitlines())} lines of TOML, {ROWS} rows")
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as place:
            before = ended_cpu_seconds()
            seconds = rows_seconds(Path(place), smoke=options.smoke)
            used = ended_cpu_seconds() - before
            report.say(f"first step after {seconds:.1f} s; {used:.1f} s of CPU until all had ended")


def rows_seconds(place: Path, *, smoke: bool) -> float:
    """Returns the time until the first step."""
    lines: list[str] = []
    for number in range(ROWS):
        more = number % 7
        question = f"Ann has {number} nuts and finds {more}. How many?"
        lines.append(json.dumps({"question": question, "answer": number + more}))
    (place / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (place / "run.toml").write_text(RUN)
    command = train_command("run.toml", TINY if smoke else ())
    began = time.monotonic()
    with training(command, said=place / "said", environ=environment(), cwd=place) as run:
        wait_for_step(run, place / "run")
        return time.monotonic() - began


PARTS = {"demo": demo, "rows": rows}


def main() -> None:
    arguments = Arguments(__doc__, rounds=3)
    arguments.option("--parts", ["demo"], smoke=[*PARTS], choices=[*PARTS])
    arguments.gone("--times", "use --rounds")
    options = arguments.parse()
    make_parts(options, PARTS)


if __name__ == "__main__":
    main()
