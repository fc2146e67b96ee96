"""How soon 200 rows of one's own are trained on: `python first_step.py`.

Two files are written, rows and a configuration of at most ten lines, and `midflight train` is
started on them. Seconds are from its start until the first step of the optimiser is in the journal,
the look at all rows and the making of a model included.
"""

from __future__ import annotations

import argparse
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from smoke import options_of

ROWS = "".join(
    f'{{"question": "Ann has {i} nuts and finds {i % 7}. How many?", "answer": {i + i % 7}}}\n'
    for i in range(200)
)
RUN = """\
[run]
folder = "run"
[[environment.sources]]
path = "rows.jsonl"
answer = "answer"
"""
PATIENCE_SECONDS = 600.0


def seconds_to_first_step(folder: Path, *more: str) -> float:
    """Until the first step. Ends the run then."""
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "run.toml").write_text(RUN)
    began = time.monotonic()
    with (folder / "said").open("wb") as said:
        run = subprocess.Popen(
            [sys.executable, "-m", "midflight", "train", "run.toml", *more],
            cwd=folder,
            stdout=said,
            stderr=said,
        )
        try:
            while (
                not (journal := folder / "run" / "metrics.jsonl").is_file()
                or '"kind":"step"' not in journal.read_text()
            ):
                if run.poll() is not None or time.monotonic() - began > PATIENCE_SECONDS:
                    raise SystemExit(f"there was no step:\n{(folder / 'said').read_text()}")
                time.sleep(0.05)
            return time.monotonic() - began
        finally:
            run.send_signal(signal.SIGINT)
            run.wait()


def cpu_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    options = options_of(parser, times=1)
    smaller = (
        (
            "--set",
            "model.hidden_size=32",
            "--set",
            "model.num_layers=1",
            "--set",
            "rollout.groups_per_step=2",
        )
        if options.smoke
        else ()
    )
    print(f"{len(RUN.splitlines())} lines of TOML, {len(ROWS.splitlines())} rows")
    for _ in range(options.times):
        with tempfile.TemporaryDirectory() as folder:
            before = cpu_seconds()
            seconds = seconds_to_first_step(Path(folder), *smaller)
            print(
                (
                    f"first step after {seconds:.1f} s; {cpu_seconds() - before:.1f} s of CPU "
                    "until all had ended"
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
