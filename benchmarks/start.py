"""How soon a run begins: `python start.py`.

Seconds of `midflight --help`; of `midflight train configs/demo.toml` until its first line, and from
the end of its warm start until the first step of the optimiser is in the journal, held-out tasks in
between. Then which processes have loaded torch. Exits with 1 where one is late, or where a process
has torch that computes nothing. The warm start itself is short here: it ends at an accuracy of
0.05.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from smoke import SETTINGS, options_of

CONFIG = Path(__file__).parents[1] / "configs" / "demo.toml"
COMMAND = (sys.executable, "-m", "midflight")
HELP_SECONDS = 0.3
LINE_SECONDS = 2.0
STEP_SECONDS = 10.0
COMPUTES = {"trainer", "engine"}
"""Processes that may have torch."""
PATIENCE_SECONDS = 600.0


def help_seconds() -> float:
    began = time.perf_counter()
    subprocess.run([*COMMAND, "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def run_seconds(folder: Path, *sets: str) -> tuple[float, float, dict[str, bool]]:
    """Until the first line; from the end of the warm start to the first step; and of each process
    whether it has loaded torch.
    """
    words = [
        word for each in ("warm_start.target_accuracy=0.05", *sets) for word in ("--set", each)
    ]
    began = time.time()
    said = list[float]()
    has_torch = dict[str, bool]()
    with subprocess.Popen(
        [*COMMAND, "train", CONFIG, "--folder", folder, *words], stdout=subprocess.PIPE, text=True
    ) as run:
        hearing = threading.Thread(target=hear, args=(run.stdout, said))
        hearing.start()
        try:
            while (
                not (journal := folder / "metrics.jsonl").is_file()
                or '"kind":"step"' not in journal.read_text()
            ):
                if run.poll() is not None or time.time() - began > PATIENCE_SECONDS:
                    raise SystemExit(f"there was no step within {time.time() - began:.0f} s")
                look(run.pid, has_torch)
                time.sleep(0.05)
            stepped = time.time()
        finally:
            run.send_signal(signal.SIGINT)
            hearing.join()
    return said[0] - began, stepped - (folder / "start" / "config.json").stat().st_mtime, has_torch


def hear(lines: Iterable[str], said: list[float]) -> None:
    """When each line came. Waits for them, and ends with the last."""
    said.extend(time.time() for _ in lines)


def look(launcher: int, has_torch: dict[str, bool]) -> None:
    """Adds the processes that live now, by their names, to what was seen."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if launcher not in (int(process.name), parent):
                continue
            words = (process / "cmdline").read_text().split("\0")
            if "midflight" not in words[2]:
                continue  # git, which is asked for the commit
            name = (
                "launcher"
                if parent != launcher
                else words[-2]
                if "midflight.run.launcher.child" not in words[2]
                else words[3]
            )
            has_torch[name.rpartition(".")[2]] = (
                has_torch.get(name.rpartition(".")[2], False)
                or "libtorch" in (process / "maps").read_text()
            )
        except (OSError, IndexError, ValueError):
            continue  # it has ended, or has not begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    options = options_of(parser, times=1)
    helped = statistics.median(help_seconds() for _ in range(3 * options.times))
    print(f"midflight --help: {helped:.2f} s (at most {HELP_SECONDS})", flush=True)
    lines = list[float]()
    steps = list[float]()
    torch = dict[str, bool]()
    for _ in range(options.times):
        with tempfile.TemporaryDirectory() as made:
            line, step, seen = run_seconds(Path(made) / "run", *(SETTINGS if options.smoke else ()))
        print(
            f"first line after {line:.2f} s, first step {step:.2f} s after the warm start",
            flush=True,
        )
        lines = [*lines, line]
        steps = [*steps, step]
        torch = torch | seen
    line = statistics.median(lines)
    step = statistics.median(steps)
    print(
        f"medians: first line {line:.2f} s (at most {LINE_SECONDS}), first step {step:.2f} s (at "
        f"most {STEP_SECONDS})"
    )
    print(
        "torch is loaded by: "
        + ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in sorted(torch.items()))
    )
    late = helped > HELP_SECONDS or line > LINE_SECONDS or step > STEP_SECONDS
    return int(
        (late or any(has for name, has in torch.items() if name not in COMPUTES))
        and not options.smoke
    )


if __name__ == "__main__":
    sys.exit(main())
