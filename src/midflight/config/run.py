"""The options of a run as a whole."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from midflight.config.section import Count, Fraction, Positive, Seconds, Section

_KEPT = re.compile(r"([1-9][0-9]{0,5})(h|d|MB|GB|TB)")
_SECONDS = {"h": 3_600, "d": 86_400}
_BYTES = {"MB": 2**20, "GB": 2**30, "TB": 2**40}


class KeptTrajectories(NamedTuple):
    """Bounds on the tokens that a run keeps. One of them is None."""

    max_bytes: int | None
    max_seconds: int | None


class RunSection(Section):
    name: str = "run"
    """Label; runs of the same name and seed sample alike."""
    folder: Path = Path("runs/run")
    """The folder for everything that the run writes."""
    store_folder: Path | None = None
    """Absolute path of a local folder for the store, needed where `folder` lies on a network."""
    keep_trajectories: str = "all"
    """Tokens kept after training: `all`, those of a time (`12h`, `30d`), or of a size (`500GB`,
    `2TB`).
    """
    share_with_group: str = ""
    """A group of this machine that may read the run's folder too."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds weights, task order and sampling."""
    steps: Positive = 100
    """Optimiser steps of reinforcement learning."""
    stop_at_reward: Fraction | None = None
    """Ends earlier once the mean reward of 20 steps reaches this."""
    restarts: Count = 2
    """Restarts of a part in a row before the run fails; ten minutes give one back."""
    stall_seconds: Seconds = 120.0
    """A part that hangs this long is started again; some tasks have longer limits."""
    stop_seconds: Seconds = 5.0
    """Time for parts to end before they are killed."""

    @property
    def kept_trajectories(self) -> KeptTrajectories | None:
        """The bounds of `keep_trajectories`. None if all are kept."""
        found = _KEPT.fullmatch(self.keep_trajectories)
        if found is None:
            return None
        number = int(found[1])
        if found[2] in _BYTES:
            return KeptTrajectories(number * _BYTES[found[2]], None)
        return KeptTrajectories(None, number * _SECONDS[found[2]])


def run_contradictions(run: RunSection) -> Iterator[str]:
    if run.keep_trajectories != "all" and run.kept_trajectories is None:
        yield (
            f"run.keep_trajectories is {run.keep_trajectories!r}; write 'all', a time such as "
            "'12h' or '30d', or a size such as '500GB' or '2TB'"
        )
