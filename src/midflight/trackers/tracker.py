"""The port of trackers, ours and a user's own. A tracker is made from its name, which changes
nothing: `open` is the first call that does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from midflight.entries import load_entry
from midflight.errors import ConfigError
from midflight.trackers.spans import RolloutSpan
from midflight.types import Json


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker is opened for."""

    name: str
    """`run.name`."""
    project: str
    """`observe.project`, under which a service lists the run."""
    folder: Path
    """The run's folder. A tracker's files on this machine go into a folder of its own there, which
    `--overwrite` removes: `folder / NAME`, or `trackers`.
    """
    config: Mapping[str, Json]
    """Every option by its key, such as `rollout.max_staleness`."""
    id: str | None = None
    """The value that `open` returned at the first start of a run that goes on, or an empty text if
    it returned None. It is None at the first start.
    """


class Tracker:
    """Derive from this and override the methods that the service can show. Methods that are not
    overridden do nothing.

    All methods are called from one thread of a process of its own, in which the tracker may wait
    and fail: neither reaches the run. `step` is the number of the optimiser step. Steps that a
    resumed run makes again are sent again only if `rewind` removed the first ones.
    """

    def open(self, run: TrackedRun) -> str | None:
        """Begins a run, or goes on with it if `run.id` is given. Returns the key by which the run
        is found again, if that takes more than its folder.
        """

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        """Shows numbers by the names in docs/metrics.md. Evaluations come with the step after which
        they were begun, perhaps behind later steps.
        """

    def histogram(
        self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        """Shows a histogram: `counts[i]` values lie between `edges[i]` and `edges[i + 1]`."""

    def table(
        self,
        step: int,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str | float | None]],
    ) -> None:
        """Shows samples of the model's answers, a row for each."""

    def picture(self, name: str, png: Path) -> None:
        """Shows a plot of the whole run, when it has ended."""

    def spans(self, rollouts: Sequence[RolloutSpan]) -> None:
        """Shows the rollouts that have ended since the last call, each with its parts. It is called
        only for trackers that override it, also with rollouts that a crash undid.
        """

    def rewind(self, step: int) -> bool:
        """The run goes on after `step`, and the records of later steps are lost. Returns True if
        they were removed from the service, so that these steps can be sent again.
        """
        return False

    def flush(self) -> None:
        """Makes the records so far visible. It is called about once a second while there are new
        ones.
        """

    def close(self, summary: Mapping[str, float | str]) -> None:
        """Ends the run. `summary` has the numbers and texts of `summary.json`; it is empty if there
        is no such file.
        """


KNOWN = {
    "tensorboard": "TensorBoard",
    "wandb": "WeightsAndBiases",
    "mlflow": "MLflow",
    "trackio": "Trackio",
    "otel": "OpenTelemetry",
}
"""The trackers of `services`: the class of each by its name."""


def make_tracker(name: str) -> Tracker:
    """The tracker of this name, or an instance of the user's class at `module:Class`. Raises
    `ConfigError` with the remedy if there is none.
    """
    if name in KNOWN:
        services = import_module("midflight.trackers.services")
        return cast("type[Tracker]", getattr(services, KNOWN[name]))()
    found = load_entry(name, option="observe.trackers", such_as="my_tracker:MyTracker")
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise ConfigError(
            f"observe.trackers names {name!r}, which is no class derived from "
            "midflight.trackers.Tracker; derive it from that."
        )
    try:
        return found()
    except Exception as error:
        raise ConfigError(
            f"observe.trackers names {name!r}, which cannot be made: {type(error).__name__}: "
            f"{error}. It is made without arguments; what it needs of the run comes with open(run)."
        ) from error
