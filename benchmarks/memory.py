"""The memory of each process of a run beside what the dry run estimates for it.

    python benchmarks/memory.py [--model FOLDER] [--runs recipe default tiny] \\
        [--steps 4] [--answer 256] [--set OPTION ...]

| run | what it is |
|---|---|
| recipe | `--model` learns sums: 8 groups of 8, answers of at most 20 tokens, `max_staleness = 2` |
| default | `--model` with every default (16 groups of 8, 64 slots, a context by the machine's memory), answers of at most `--answer` tokens |
| tiny | `configs/demo.toml`, without its warm start |

*measured* is the peak of a process' proportional set size while the run went on, looked at four
times a second; of several of a kind their sum. Published versions are left out of it, because they
belong to no process: they are the blocks of their file in shared memory. *worst* is what the dry
run shows; it holds for the longest rows that the run can have, so a run whose answers are short
takes less.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from smoke import SETTINGS, options_of

from midflight.cli.configurations import config_of_file
from midflight.config.derived import model_sizes
from midflight.config.memory import MemoryItem, memory_estimate, total_bytes
from midflight.observe.memory import PROC, descendants
from midflight.run.launcher.checks.check import Plan
from midflight.run.launcher.checks.table import trial
from midflight.run.launcher.checks.tasks import longest_prompt

DEMO = Path(__file__).parents[1] / "configs" / "demo.toml"
SHARED = Path("/dev/shm")
LOOK_SECONDS = 0.25
KINDS = {"trainer": "trainer", "engine": "engines", "rollout": "rollout", "worker": "workers"}
"""The words of children's command lines, and what the estimate calls them."""
SUMS = """\
[run]
steps = {steps}
[model]
path = "{model}"
[environment]
max_tokens = {answer}
[[environment.rewards]]
entry = "midflight.rewards:number_match"
[[environment.sources]]
dataset = "chain_sum"
size = 2000
heldout = 16
prompt = "What is {{expression}}? Answer with the number only."
content = "expression"
options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 2 }}
[trainer]
learning_rate = 2e-5
"""
RECIPE = [
    "rollout.groups_per_step=8",
    "rollout.group_size=8",
    "rollout.max_staleness=2",
    "environment.max_tokens=20",
]


class Looked:
    """The peak of each kind of process, in bytes."""

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._kinds: dict[int, str] = {}
        self.peaks: dict[str, int] = defaultdict(int)

    def look(self) -> None:
        now: dict[str, int] = defaultdict(int)
        members = descendants(self._launcher)
        for pid in members:
            kind = self._kind(pid)
            if kind:
                now[kind] += _held(pid, without_shared=kind == "trainer")
        now["shared memory"] = sum(
            _blocks(path) for path in SHARED.glob("*.weights") if _owner(path) in members
        )
        for kind, num_bytes in now.items():
            self.peaks[kind] = max(self.peaks[kind], num_bytes)

    def _kind(self, pid: int) -> str:
        """Empty for what is none of the run's parts, and for one that has not begun yet."""
        if pid == self._launcher:
            return "launcher"
        if not self._kinds.get(pid):
            try:
                words = (PROC / str(pid) / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                return ""
            child = "midflight.run.launcher.child"
            self._kinds[pid] = (
                KINDS.get(words[words.index(child) + 1], "") if child in words[:-1] else ""
            )
        return self._kinds[pid]


L = TypeVar("L", bound=Looked)


def _held(pid: int, *, without_shared: bool) -> int:
    """`without_shared`: the trainer maps what it publishes; an engine's pages of this kind are what
    it has fetched.
    """
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0
    found = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
    return found.get("Pss", 0) - (found.get("Pss_Shmem", 0) if without_shared else 0)


def _owner(path: Path) -> int:
    named = re.search(r"-(\d+)-[^-]*\.weights$", path.name)
    return int(named[1]) if named else 0


def _blocks(path: Path) -> int:
    try:
        return 512 * path.stat().st_blocks
    except OSError:
        return 0


def train(
    config: Path, overrides: Sequence[str], folder: Path, *, said: Path, looking: Callable[[int], L]
) -> L:
    """Makes a run in `folder`; what it prints goes into the file `said`. `looking` makes what looks
    at the processes from the launcher's pid.

    Waits for the run, and ends it with whatever ends the wait. `SystemExit` where it fails.
    """
    words = [word for override in overrides for word in ("--set", override)]
    command = [
        sys.executable,
        "-m",
        "midflight",
        "train",
        str(config),
        *words,
        "--folder",
        str(folder),
    ]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with said.open("wb") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        try:
            looked = looking(run.pid)
            while run.poll() is None:
                looked.look()
                time.sleep(LOOK_SECONDS)
        finally:
            run.terminate()
            run.wait()
    if run.returncode:
        raise SystemExit(
            f"the run of {config.name} ended with {run.returncode}:\n{said.read_text()[-3000:]}"
        )
    return looked


def estimated(
    config: Path, overrides: Sequence[str], folder: Path
) -> tuple[tuple[MemoryItem, ...], int | None]:
    """What the dry run says that the run takes, with the longest prompt of its tasks in tokens."""
    checked = config_of_file(config, list(overrides), folder)
    plan = Plan(checked)
    trial(plan)
    longest = longest_prompt(plan.loaded.survey)
    return memory_estimate(checked, model_sizes(checked.model), longest_prompt=longest), longest


def table(name: str, config: Path, overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="midflight-") as folder:
        run = Path(folder) / "run"
        items, longest = estimated(config, overrides, run)
        found = train(config, overrides, run, said=Path(folder) / "said", looking=Looked).peaks
    print(f"\n{name}: {', '.join(overrides) or 'as it is'}; prompts of at most {longest} tokens\n")
    print("| process | worst, MB | measured, MB | measured / worst |\n|---|---|---|---|")
    for where, own in groupby(items, lambda item: item.where):
        if estimate := total_bytes(list(own)):
            print(
                (
                    f"| {where} | {estimate / 1e6:,.0f} | {found[where] / 1e6:,.0f} | "
                    f"{found[where] / estimate:.2f} |"
                ),
                flush=True,
            )
    print(
        f"| together | {total_bytes(items) / 1e6:,.0f} | {sum(found.values()) / 1e6:,.0f} | "
        f"{sum(found.values()) / total_bytes(items):.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of the model of `recipe` and `default`")
    parser.add_argument("--runs", nargs="+", choices=("recipe", "default", "tiny"))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--answer", type=int, default=256, help="most tokens of an answer of `default`"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="OPTION")
    options = options_of(parser, runs=["tiny"], steps=2, set=list(SETTINGS))
    runs = options.runs or (["recipe", "default", "tiny"] if options.model else ["tiny"])
    if options.model is None and runs != ["tiny"]:
        parser.error("recipe and default need a --model")
    with tempfile.TemporaryDirectory(prefix="midflight-") as folder:
        sums = Path(folder) / "sums.toml"
        sums.write_text(
            SUMS.format(
                steps=options.steps,
                model=options.model and options.model.absolute(),
                answer=options.answer,
            )
        )
        for name in runs:
            if name == "tiny":
                table(
                    name,
                    DEMO,
                    [f"run.steps={options.steps}", "warm_start.target_accuracy=none", *options.set],
                )
            else:
                table(name, sums, [*(RECIPE if name == "recipe" else []), *options.set])


if __name__ == "__main__":
    main()
