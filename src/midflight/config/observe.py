"""The options of what a run shows, with their checks."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

from midflight.config.section import Port, Section
from midflight.entries import ENTRY
from midflight.errors import nearest


class ObserveSection(Section):
    trackers: tuple[str, ...] = ()
    """`tensorboard`, `wandb`, `mlflow`, `trackio`, `otel` (traces), each an extra, or your
    `module:Class` (docs/metrics.md).
    """
    project: str = "midflight"
    """The project under which trackers list the run."""
    samples: bool = False
    """The terminal shows the last rollout."""
    view_port: Port = 0
    """Port of the viewer on loopback (`midflight[view]`); 0 takes a free one."""
    log_format: Literal["plain", "json"] = "plain"
    """Logs as text, or as one JSON object a line."""


TRACKERS = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "otel": "opentelemetry.exporter.otlp.proto.http",
}
"""The package that each known tracker needs. The extra of the same name installs it."""


def observe_contradictions(observe: ObserveSection) -> Iterator[str]:
    names = observe.trackers
    for name in names:
        if name not in TRACKERS and not ENTRY.fullmatch(name):
            what = f"there are {', '.join(TRACKERS)}, and `module:Class` of your own"
            yield (
                f"observe.trackers names {name!r}, which is no tracker: "
                f"{what}.{nearest(name, TRACKERS)}"
            )
        elif name in TRACKERS and not _is_installed(TRACKERS[name]):
            yield (
                f"observe.trackers names {name!r}, and the package {TRACKERS[name]} is not "
                f"installed; pip install 'midflight[{name}]'"
            )
    if len(set(names)) < len(names):
        yield (
            f"observe.trackers names one twice ({', '.join(names)}), and would tell it "
            "everything twice; name each once"
        )


def _is_installed(package: str) -> bool:
    """True if there is such a package with a file. A folder that a tracker wrote here would be
    found too, but as a package without a file.
    """
    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # a package around it is missing
        return False
    return found is not None and found.origin is not None
