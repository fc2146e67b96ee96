"""What an open viewer costs a run: `python dashboard.py`.

Runs of `configs/demo.toml` take turns, with nobody looking and with a headless Chromium that has
the run's own `/dashboard` open from the first step on. Rates are of training alone: from step 5 to
the last. The browser would be on somebody else's machine; here it takes the same cores, though at
idle priority, so the rates say what both cost together, and the CPU seconds what the viewer's
process alone costs. Without Chromium a plain client opens the page once, which keeps the viewer
less busy.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from smoke import SETTINGS, options_of

CONFIG = Path(__file__).parents[1] / "configs" / "demo.toml"
CHROMIUM = os.environ.get("MIDFLIGHT_CHROMIUM") or shutil.which("chromium")
FIRST = 5


def steps_per_second(folder: Path, *, steps: int, seen: bool, smoke: bool) -> tuple[float, float]:
    """And the viewer's CPU seconds as a share of those of all other processes of the run, from its
    start on, 0 to 1.
    """
    sets = [f"run.steps={steps}", "warm_start.target_accuracy=0.05", "evaluation.eval_every=0"]
    words = [word for each in (*sets, *(SETTINGS if smoke else ())) for word in ("--set", each)]
    run = subprocess.Popen(
        [sys.executable, "-m", "midflight", "train", CONFIG, "--folder", folder, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    browser = None
    before = 0.0
    spent = (0.0, 0.0)
    try:
        while run.poll() is None:
            if seen and browser is None and any(line["kind"] == "step" for line in journal(folder)):
                before = cpu_seconds(run.pid)[1]
                browser = look(folder)
            spent = max(spent, cpu_seconds(run.pid))
            time.sleep(0.2)
    finally:
        run.wait()
        if browser is not None:
            browser.terminate()
            browser.wait()
    at = {line["step"]: line["seconds"] for line in journal(folder) if line["kind"] == "step"}
    viewer, rest = spent
    return (steps - FIRST) / (at[steps] - at[FIRST]), viewer / (rest - before)


def journal(folder: Path) -> list[dict[str, Any]]:
    """Whole lines only: it may be written at this moment."""
    path = folder / "metrics.jsonl"
    return (
        [
            json.loads(line)
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        if path.is_file()
        else []
    )


def look(folder: Path) -> subprocess.Popen[bytes]:
    """A browser on the run's dashboard; where there is none, a client that opens the page and then
    sleeps.
    """
    endpoint = json.loads((folder / "endpoint.json").read_text())
    address = f"{endpoint['url']}/dashboard?token={endpoint['control_token']}"
    if CHROMIUM is None:
        urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor()
        ).open(address).read()
        return subprocess.Popen(["sleep", "3600"])
    profile = tempfile.mkdtemp(dir=folder.parent)
    words = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--remote-debugging-port=0",
    ]
    idle = lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # noqa: E731
    return subprocess.Popen(
        [CHROMIUM, *words, address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=idle,
    )


def cpu_seconds(launcher: int) -> tuple[float, float]:
    """Of the viewer beside a run, and of the run's other processes that live."""
    viewer = rest = 0.0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            words = (process / "cmdline").read_text()
        except OSError:
            continue  # it has ended
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        if int(process.name) == launcher or int(fields[1]) == launcher:
            viewer, rest = (
                (viewer + used, rest) if "midflight.view" in words else (viewer, rest + used)
            )
    return viewer, rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    options = options_of(parser, rounds=1, steps=8)
    rates: dict[bool, list[float]] = {False: [], True: []}
    shares: list[float] = []
    for number in range(options.rounds):
        for seen in (False, True) if number % 2 == 0 else (True, False):
            with tempfile.TemporaryDirectory() as made:
                rate, share = steps_per_second(
                    Path(made) / "run", steps=options.steps, seen=seen, smoke=options.smoke
                )
            rates[seen].append(rate)
            shares += [share] if seen else []
            print(
                (
                    f"round {number + 1}, {'open' if seen else 'shut'}: {rate:.3f} steps a second, "
                    f"viewer {100 * share:.1f} % of CPU"
                ),
                flush=True,
            )
    shut = statistics.median(rates[False])
    opened = statistics.median(rates[True])
    print(
        f"{'Chromium' if CHROMIUM else 'one visit'}: open {opened:.3f}, shut {shut:.3f} steps a "
        f"second: {100 * (1 - opened / shut):.1f} % slower with the browser on these cores; the "
        f"viewer takes {100 * statistics.median(shares):.1f} % of the run's CPU seconds"
    )


if __name__ == "__main__":
    main()
