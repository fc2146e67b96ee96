"""What each station reaches, beside what was committed: runs the benchmarks of `figures.toml`, in
about 20 minutes on two quiet cores.

    python benchmarks/bench.py [--only WORD] [--within 0.8]

Figures are ratios of two sides of one run, so that they hold on other machines too. It ends with
status 1 where one is below `--within` of the committed one, or was not found in what its benchmark
printed. docs/performance.md says what they mean.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from smoke import options_of

HERE = Path(__file__).parent


def printed_by(command: str, *, smoke: bool) -> str:
    """What a benchmark says; nothing where it fails, which it says itself."""
    words = [
        sys.executable,
        str(HERE / command.split()[0]),
        *(["--smoke"] if smoke else command.split()[1:]),
    ]
    environ = os.environ | {
        "OMP_NUM_THREADS": "2" if "serving" in command else "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(words, capture_output=True, text=True, env=environ)
    if done.returncode:
        print(f"`{command}` failed:\n{done.stderr[-2000:]}", file=sys.stderr)
    return done.stdout


def line(name: str, figure: dict[str, Any], printed: str, *, within: float) -> tuple[str, bool]:
    """A line of the table, and whether the figure is as good as it was."""
    found = re.search(figure["pattern"], printed, re.MULTILINE)
    if found is None:
        return f"| {name} | {figure['found']:g} | not found | |", False
    now = float(found[1])
    was = float(figure["found"])
    return f"| {name} | {was:g} | {now:g} | {now / was:.2f} |", now >= within * was


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="commands that have this in them")
    parser.add_argument(
        "--within",
        type=float,
        default=0.8,
        help="of the committed figure, from which on a figure is as good as it was",
    )
    options = options_of(parser, only="single_turn")
    began = time.monotonic()
    good = True
    print("| figure | committed | now | now / committed |\n|---|---|---|---|", flush=True)
    for entry in tomllib.loads((HERE / "figures.toml").read_text())["commands"]:
        if options.only not in entry["command"]:
            continue
        if not Path(entry.get("needs", HERE)).exists():
            print(
                f"| {entry['command'].split()[0]} is left out: no {entry['needs']} | | | |",
                flush=True,
            )
            continue
        printed = printed_by(entry["command"], smoke=options.smoke)
        for name, figure in entry["figures"].items():
            said, as_good = line(name, figure, printed, within=options.within)
            print(said, flush=True)
            good &= as_good
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes")
    raise SystemExit(0 if good or options.smoke else 1)


if __name__ == "__main__":
    main()
