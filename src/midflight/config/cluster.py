"""The options of the machines that the parts of a run live on. Nothing here imports Ray."""

from pathlib import Path
from typing import Literal

from midflight.config.section import NonNegative, Positive, Seconds, Section


class ClusterSection(Section):
    """On a Ray cluster (`pip install 'midflight[ray]'`) each part has a seat with the resources
    named here.
    """

    kind: Literal["local", "ray"] = "local"
    """All on this machine, or on a Ray cluster."""
    address: str = "auto"
    """Address, such as `10.0.0.5:6379` or `ray://...`. `auto` finds this machine's cluster, `start`
    starts one here.
    """
    token_file: Path | None = None
    """File of Ray's authentication token, such as `~/.ray/auth_token`."""
    engine: dict[str, NonNegative] | None = None
    """Resources of an engine's seat, such as `{ GPU = 4, CPU = 8 }`. Default: by `[engine]`."""
    trainer: dict[str, NonNegative] | None = None
    """Resources of a trainer rank's seat. Default: by `[trainer]`."""
    rollout: dict[str, NonNegative] | None = None
    """Resources of a gateway's seat. Default: a CPU for it and for each worker."""
    engines_min: Positive | None = None
    """Engines that need a seat at the start; others join later. Default: all."""
    lost_seconds: Seconds = 20.0
    """A machine's parts count as dead after so long without news."""
    autoscaler: bool = False
    """Wait for machines of an autoscaler or queue; else a small cluster is refused."""
    wait_seconds: Seconds = 1800.0
    """How long the run waits for a seat before it ends."""
    variables: tuple[str, ...] = ()
    """Environment variables that parts on other machines get too, such as `HF_HOME`."""
