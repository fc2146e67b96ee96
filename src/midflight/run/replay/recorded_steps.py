"""The steps of a recorded run: their lines in the journal, and their batches, made again from the
store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from midflight.archive.store_reader import files_of
from midflight.buffer.groups import WaitingGroup
from midflight.buffer.staleness import Lineage
from midflight.config.sections import Config
from midflight.errors import NoRun
from midflight.observe.history import read_journal
from midflight.observe.lines import StepLine
from midflight.trajectories.packing import merged, pack
from midflight.trajectories.store import Store
from midflight.types import Batch, Group, PackedBatch, Version


class RecordedBatches(Protocol):
    """The batches of a run's steps."""

    def __call__(self, line: StepLine) -> PackedBatch: ...


def lines_of(folder: Path) -> Mapping[int, StepLine]:
    """The lines of all steps of a run, by the number of the step."""
    return {line.step: line for line in read_journal(folder / "metrics.jsonl").steps}


def line_of(folder: Path, step: int) -> StepLine:
    """The line of a step. Raises `NoRun` if there is none."""
    lines = lines_of(folder)
    if step not in lines:
        known = f"steps {min(lines)} to {max(lines)}" if lines else "no step"
        raise NoRun(f"{folder} has no step {step}; its journal has {known}.")
    return lines[step]


class StoredBatches:
    """Makes batches of a run's store, or stores."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._paths = files_of(folder)
        if not self._paths[0].is_file():
            raise NoRun(f"{folder} has no store: give the folder of a run that has trained.")
        self._folder = folder
        self._rules = config.rollout

    def __call__(self, line: StepLine) -> PackedBatch:
        """The batch of a step. Raises `NoRun` if its groups are not there."""
        parts = [self._part(path, line.version) for path in self._paths]
        if not any(len(part.rewards) for part in parts):
            raise NoRun(
                f"step {line.step} of {self._folder} has no groups in the store: it was skipped, or "
                "its rollouts were removed. Choose another step."
            )
        return parts[0] if len(parts) == 1 else merged(line.version - 1, parts)

    def _part(self, path: Path, version: Version) -> PackedBatch:
        store = Store(path, run=None)
        try:
            groups = store.groups_of_step(version)
            forks = store.forks()
        finally:
            store.close()
        train_version = version - 1
        left = [
            self._left(group, _lineage(forks, train_version), train_version) for group in groups
        ]
        return pack(Batch(0, train_version, tuple(left)))

    def _left(self, group: Group, lineage: Lineage, train_version: Version) -> Group:
        """The part of a group that the bound on age left to the step."""
        waiting = WaitingGroup.of(group, 0, lineage)
        floor = train_version - self._rules.max_staleness
        return waiting.at(floor, self._rules.stale_policy).group


def _lineage(forks: Sequence[tuple[Version, Version]], train_version: Version) -> Lineage:
    """The numbering of versions when that step was made."""
    lineage = Lineage()
    for checkpoint, version in forks:
        if version <= train_version:
            lineage = lineage.forked(checkpoint, version)
    return lineage
