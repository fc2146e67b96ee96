"""The options of the handover of weights, with their checks."""

from collections.abc import Iterator
from typing import Literal

from midflight.config.section import Positive, Seconds, Section


class WeightsSection(Section):
    transport: Literal["auto", "shared_memory", "pull", "direct"] = "auto"
    """How bytes reach the engines (docs/weight-sync.md#publishing)."""
    server_engine: bool = True
    """With `direct` between GPUs the server's own engine receives, else our plugin
    (docs/scale.md#by-the-servers-own-engines). Untested on a GPU.
    """
    every: Positive = 1
    """Steps between published versions, at most `rollout.max_staleness` + 1; larger trains on older
    tokens.
    """
    stage_seconds: Seconds = 60.0
    """Deadline for staging on an engine, past which it is quarantined."""
    commit_seconds: Seconds = 30.0
    """Deadline of the commit, the pause included."""
    commit: Literal["rolling", "barrier"] = "rolling"
    """rolling: one engine after the other. barrier: all at once, so that one version is served."""
    delta: bool = False
    """Send only what changed, for engines behind a slow network."""


def weights_contradictions(weights: WeightsSection, *, max_staleness: int) -> Iterator[str]:
    every = weights.every
    if every - 1 <= max_staleness:
        return
    yield (
        f"weights.every ({every}) leaves the last step before a publication tokens that are "
        f"{every - 1} versions old, and rollout.max_staleness is {max_staleness}; lower "
        f"weights.every to at most {max_staleness + 1}, or raise rollout.max_staleness"
    )
