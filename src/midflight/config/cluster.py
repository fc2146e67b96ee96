"""The options of the machines that the parts of a run live on. Nothing here imports Ray."""

from pathlib import Path
from typing import Literal

from midflight.config.section import NonNegative, Positive, Seconds, Section


class ClusterSection(Section):
    """The places of a run's parts. On a Ray cluster (`pip install 'midflight[ray]'`) each part has
    a seat, with the resources that are named here.
    """

    kind: Literal["local", "ray"] = "local"
    """`local`: all on this machine. `ray`: on the machines of a Ray cluster."""
    address: str = "auto"
    """The address of the cluster, such as `10.0.0.5:6379` or `ray://...`. `auto` finds the cluster
    of this machine, and `start` starts one on this machine alone.
    """
    token_file: Path | None = None
    """Path of the file with Ray's authentication token, such as `~/.ray/auth_token`. A cluster
    without a token runs whatever anyone sends to it.
    """
    engine: dict[str, NonNegative] | None = None
    """The resources of one engine's seat, such as `{ GPU = 4, CPU = 8 }`. Default: by
    `engine.device`, `engine.threads` and the tensor-parallel size.
    """
    trainer: dict[str, NonNegative] | None = None
    """The resources of one trainer rank's seat. Default: by `trainer.device` and
    `trainer.threads`.
    """
    rollout: dict[str, NonNegative] | None = None
    """The resources of the seat of a gateway and its agents. Default: a CPU for the gateway, and
    one for each process of agents.
    """
    engines_min: Positive | None = None
    """The run starts when so many engines have a seat; the others join when there are machines.
    Default: all of `engine.count`.
    """
    lost_seconds: Seconds = 20.0
    """The parts of a machine count as dead after so long without news from it."""
    autoscaler: bool = False
    """Machines come when a seat is waited for, as with an autoscaler or a queue. Else a cluster
    that is too small is refused.
    """
    wait_seconds: Seconds = 1800.0
    """The run waits so long for a seat that it needs; then it ends."""
    variables: tuple[str, ...] = ()
    """Environment variables of the launcher that the parts get on other machines too, such as
    `HF_HOME`.
    """
