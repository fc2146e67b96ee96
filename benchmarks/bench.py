"""What each station reaches, beside what was committed: runs the benchmarks of `figures.toml`, in
about 20 minutes on two quiet cores.

    python benchmarks/bench.py [--only WORD] [--within 0.8]

Figures are ratios of two sides of one run, so that they hold on other machines too. It ends with
status 1 where one is below `--within` of the committed one, or was not measured.
docs/performance.md says what they mean.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from harness.arguments import Arguments
from harness.processes import BENCHMARKS, environment
from harness.report import Report


def figures_of(command: str, *, smoke: bool) -> dict[str, float]:
    """What a benchmark measures; nothing where it fails, which it says itself."""
    script, *words = command.split()
    if smoke:
        words = ["--smoke"]
    with tempfile.TemporaryDirectory() as place:
        found = Path(place) / "found.json"
        asked = [sys.executable, str(BENCHMARKS / script), *words, "--json", str(found)]
        done = subprocess.run(asked, capture_output=True, text=True, env=environment())
        if done.returncode:
            print(f"`{command}` failed:\n{done.stderr[-2000:]}", file=sys.stderr)
            return {}
        return json.loads(found.read_text())["figures"]


def compare(options: argparse.Namespace, report: Report) -> bool:
    """Returns whether every figure is as good as it was."""
    table = report.table("figure", "committed", "now", "now / committed")
    good = True
    for entry in tomllib.loads((BENCHMARKS / "figures.toml").read_text())["commands"]:
        command: str = entry["command"]
        if options.only not in command:
            continue
        needed = entry.get("needs")
        if needed is not None and not Path(needed).exists():
            table.row(f"{command.split()[0]} is left out: no {needed}", "", "", "")
            continue
        measured = figures_of(command, smoke=options.smoke)
        for name, committed in entry["figures"].items():
            now = measured.get(name)
            if now is None:
                table.row(name, f"{committed:g}", "not measured", "")
                good = False
                continue
            table.row(name, f"{committed:g}", f"{now:.3g}", f"{now / committed:.2f}")
            good = good and now >= options.within * committed
    return good


def main() -> None:
    arguments = Arguments(__doc__)
    arguments.option("--only", "", smoke="rollouts.py", help="commands that have this in them")
    arguments.option(
        "--within", 0.8, help="of the committed figure, from which on one is as good as it was"
    )
    options = arguments.parse()
    report = Report(options)
    began = time.monotonic()
    good = compare(options, report)
    report.say(f"\n{(time.monotonic() - began) / 60:.1f} minutes")
    report.close()
    raise SystemExit(0 if good or options.smoke else 1)


if __name__ == "__main__":
    main()
