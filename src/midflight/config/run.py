"""The options of a run as a whole."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from midflight.config.section import Count, Fraction, Positive, Seconds, Section


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
