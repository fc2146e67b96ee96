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
    """Label of the run; part of every request seed, so two runs of the same name and seed sample
    alike.
    """
    folder: Path = Path("runs/run")
    """The folder for everything that the run writes."""
    store_folder: Path | None = None
    """Folder for the store on a local disk, an absolute path; each checkpoint gets a copy. Default:
    the run's folder, which may not lie on a network then.
    """
    keep_trajectories: str = "all"
    """The tokens of rollouts that are kept once training does not need them: `all`, those of a time
    (`12h`, `30d`), or the newest of a size (`500GB`, `2TB`; each of several gateways has an equal
    part). Rewards, accounts and digests always stay.
    """
    share_with_group: str = ""
    """A group of this machine whose users may read the run's folder, for `midflight view` and
    `join` by others. Default: only the user of the run may.
    """
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds weights, task order and sampling."""
    steps: Positive = 100
    """Optimiser steps of reinforcement learning."""
    stop_at_reward: Fraction | None = None
    """Ends before `steps` once the mean reward over the last 20 steps reaches this."""
    restarts: Count = 2
    """How often in a row each part may die and be started again before the run fails. A restart
    counts no more after ten minutes.
    """
    stall_seconds: Seconds = 120.0
    """A part that hangs is shown and started again after this, unless its task has a longer limit.
    """
    stop_seconds: Seconds = 5.0
    """Time a stopping run gives its parts before it kills them."""

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
