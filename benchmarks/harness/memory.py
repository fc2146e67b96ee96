"""The memory of each process of a run, beside what the dry run estimates for it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.processes import family, words_of
from midflight.cli.configurations import config_of_file
from midflight.config.derived import model_sizes
from midflight.config.memory import memory_estimate
from midflight.run.launcher.checks.check import Plan
from midflight.run.launcher.checks.table import trial
from midflight.run.launcher.checks.tasks import longest_prompt

SHARED = Path("/dev/shm")
CHILD = "midflight.run.launcher.child"
KINDS = {"trainer": "trainer", "engine": "engines", "rollout": "rollout", "worker": "workers"}
"""The words of children's command lines, and what the estimate calls them."""


class MemoryPeaks:
    """The peak of each kind of process, in bytes: proportional set sizes, of several of a kind
    their sum.

    Published versions count apart, as the blocks of their files in shared memory, because they
    belong to no process.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, str] = {}
        self.peaks: dict[str, int] = defaultdict(int)

    def look(self, launcher: int) -> None:
        """Reads what the processes of the run hold now."""
        now: dict[str, int] = defaultdict(int)
        members = family(launcher)
        for pid in members:
            kind = "launcher" if pid == launcher else self._kind(pid)
            if kind:
                now[kind] += _held(pid, without_shared=kind == "trainer")
        for path in SHARED.glob("*.weights"):
            if _owner(path) in members:
                now["shared memory"] += _blocks(path)
        for kind, num_bytes in now.items():
            self.peaks[kind] = max(self.peaks[kind], num_bytes)

    def _kind(self, pid: int) -> str:
        """Empty for what is none of the run's parts, and for one that has not begun yet."""
        if not self._kinds.get(pid):
            words = words_of(pid)
            self._kinds[pid] = ""
            if CHILD in words[:-1]:
                self._kinds[pid] = KINDS.get(words[words.index(CHILD) + 1], "")
        return self._kinds[pid]


def _held(pid: int, *, without_shared: bool) -> int:
    """`without_shared`: the trainer maps what it publishes; an engine's pages of this kind are what
    it has fetched.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0
    found: dict[str, int] = {}
    for line in lines:
        words = line.split()
        found[words[0].rstrip(":")] = 1024 * int(words[1])
    shared = found.get("Pss_Shmem", 0) if without_shared else 0
    return found.get("Pss", 0) - shared


def _owner(path: Path) -> int:
    """The process that publishes the file."""
    named = re.search(r"-(\d+)-[^-]*\.weights$", path.name)
    return int(named[1]) if named else 0


def _blocks(path: Path) -> int:
    try:
        return 512 * path.stat().st_blocks
    except OSError:
        return 0


@dataclass(frozen=True)
class Estimate:
    """What the dry run says of a kind of process, in bytes."""

    least: int
    most: int

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.least + other.least, self.most + other.most)

    def share_of(self, measured: int) -> float:
        """1 within the estimate, else the multiple of its nearer end."""
        if measured > self.most:
            return measured / self.most
        if measured < self.least:
            return measured / self.least
        return 1.0


def estimated(config: Path, settings: Sequence[str], folder: Path) -> dict[str, Estimate]:
    """What the dry run says of each kind of process, with the longest prompt of the run's tasks.
    Engines and a teacher are one kind, because their command lines are alike.
    """
    checked = config_of_file(config, list(settings), folder)
    plan = Plan(checked)
    trial(plan)
    longest = longest_prompt(plan.loaded.survey)
    found: dict[str, Estimate] = {}
    for item in memory_estimate(checked, model_sizes(checked.model), longest_prompt=longest):
        kind = "engines" if item.where == "teacher" else item.where
        own = Estimate(item.least_bytes, item.num_bytes)
        found[kind] = found[kind] + own if kind in found else own
    return {kind: estimate for kind, estimate in found.items() if estimate.most}
