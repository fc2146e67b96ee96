"""From the death of a trainer to its next step: beside engines and gateway that stay, and where the
whole ring starts again.

A run of `configs/demo.toml` whose trainer is killed some times, and then its rollout process, after
which all parts start again, as they all did for a lost trainer too. Numbers are medians of the
seconds from the kill to the end of the next step.

    python benchmarks/lost_trainer.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from smoke import SETTINGS, options_of

DEMO = Path(__file__).parents[1] / "configs" / "demo.toml"
OURS = (
    "run.steps=100000",
    "run.restarts=100",
    "trainer.checkpoint_every=2",
    "warm_start.target_accuracy=0.0",
    "evaluation.eval_every=0",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    options = options_of(parser, rounds=1, sets=list(SETTINGS))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        sets = [word for one in (*OURS, *options.sets) for word in ("--set", one)]
        command = subprocess.Popen(
            [sys.executable, "-m", "midflight", "train", DEMO, "--folder", run, *sets],
            stdout=subprocess.DEVNULL,
        )
        try:
            wait_for_step(command, run, above=3)
            print("| killed | seconds to the next step |\n|---|---|")
            for part, words in (
                ("trainer", "the trainer: engines, gateway and agents stay"),
                ("rollout", "the gateway: all parts start again"),
            ):
                print(
                    (
                        f"| {words} | "
                        f"{statistics.median(lost(command, run, part) for _ in range(options.rounds)):.1f} |"
                    ),
                    flush=True,
                )
        finally:
            command.send_signal(signal.SIGINT)
            command.wait(30)


def lost(launcher: subprocess.Popen[bytes], run: Path, part: str) -> float:
    before = newest(run)
    began = time.monotonic()
    os.kill(pid_of(launcher.pid, part), signal.SIGKILL)
    wait_for_step(launcher, run, above=before + 1)  # numbers go on above all that there were
    seconds = time.monotonic() - began
    wait_for_step(launcher, run, above=newest(run) + 3)
    return seconds


def pid_of(launcher: int, part: str) -> int:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
            parent = int(entry.with_name("stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == launcher and part.encode() in words:
            return int(entry.parent.name)
    raise SystemExit(f"the run has no process {part}")


def newest(run: Path) -> int:
    """Version of the last step in the journal."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return max(
        (line["version"] for line in map(json.loads, lines) if line["kind"] == "step"), default=-1
    )


def wait_for_step(launcher: subprocess.Popen[bytes], run: Path, *, above: int) -> None:
    while newest(run) <= above:
        if launcher.poll() is not None:
            raise SystemExit(
                f"the run ended with exit status {launcher.returncode}; what it said is above"
            )
        time.sleep(0.02)


if __name__ == "__main__":
    main()
