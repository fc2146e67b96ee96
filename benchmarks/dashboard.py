"""What an open viewer costs a run: `python dashboard.py`.

Runs of `configs/demo.toml` take turns, with nobody looking and with a headless Chromium that has the run's own `/dashboard` open from the
first step on. The browser runs at idle priority, as on somebody else's machine; the viewer's process, which is the run's cost, does not.
Rates are of training alone: from step 5 to the last. Without Chromium a plain client opens the page once, which keeps it less busy.
"""

import argparse
import json
import os
import resource
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


def steps_per_second(folder: Path, *, steps: int, seen: bool, smoke: bool) -> float:
    sets = [f"run.steps={steps}", "warm_start.target_accuracy=0.05", "evaluation.eval_every=0"]
    words = [word for each in (*sets, *(SETTINGS if smoke else ())) for word in ("--set", each)]
    run = subprocess.Popen(
        [sys.executable, "-m", "midflight", "train", CONFIG, "--folder", folder, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    browser = None
    try:
        while run.poll() is None:
            if seen and browser is None and any(line["kind"] == "step" for line in journal(folder)):
                browser = look(folder)
            time.sleep(0.2)
    finally:
        run.wait()
        if browser is not None:
            browser.terminate()
            browser.wait()
    at = {line["step"]: line["seconds"] for line in journal(folder) if line["kind"] == "step"}
    return (steps - FIRST) / (at[steps] - at[FIRST])


def journal(folder: Path) -> list[dict[str, Any]]:
    """Whole lines only: it may be written at this moment."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.is_file() else []


def look(folder: Path) -> subprocess.Popen[bytes]:
    """A browser on the run's dashboard; where there is none, a client that opens the page and then sleeps."""
    endpoint = json.loads((folder / "endpoint.json").read_text())
    address = f"{endpoint['url']}/dashboard?token={endpoint['control_token']}"
    if CHROMIUM is None:
        urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor()).open(address).read()
        return subprocess.Popen(["sleep", "3600"])
    profile = tempfile.mkdtemp(dir=folder.parent)
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--remote-debugging-port=0"]
    idle = lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # noqa: E731
    return subprocess.Popen([CHROMIUM, *words, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=idle)


def cpu_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    options = options_of(parser, rounds=1, steps=8)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for number in range(options.rounds):
        for seen in (False, True) if number % 2 == 0 else (True, False):
            with tempfile.TemporaryDirectory() as made:
                rates[seen].append(steps_per_second(Path(made) / "run", steps=options.steps, seen=seen, smoke=options.smoke))
            print(f"round {number + 1}, {'open' if seen else 'shut'}: {rates[seen][-1]:.3f} steps a second", flush=True)
    shut, opened = statistics.median(rates[False]), statistics.median(rates[True])
    print(
        f"{'Chromium' if CHROMIUM else 'one visit'}: open {opened:.3f}, shut {shut:.3f} steps a second: {100 * (1 - opened / shut):.1f} % slower"
    )


if __name__ == "__main__":
    main()
