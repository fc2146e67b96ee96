"""The options of the handover of weights, with their checks."""

from collections.abc import Iterator
from typing import Literal

from midflight.config.section import Positive, Seconds, Section


class WeightsSection(Section):
    transport: Literal["auto", "shared_memory", "pull", "direct"] = "auto"
    """How bytes reach the engines: shared_memory on one machine, pull between machines, from any
    process that has them, direct by broadcast into the workers of vLLM and SGLang, which only swap
    in their pause. auto chooses by size and place, and `--dry-run` says which one it takes, and
    why.
    """
    every: Positive = 1
    """Steps from one version that is published to the next, at most `rollout.max_staleness` + 1.
    Every step makes a version, and ages count steps; larger hands over less often and trains on
    older tokens.
    """
    stage_seconds: Seconds = 60.0
    """Deadline of staging on one engine; past it the engine is quarantined. Larger is for models
    whose bytes take longer.
    """
    commit_seconds: Seconds = 30.0
    """Deadline of the commit, the pause included. Larger is for such models too."""
    commit: Literal["rolling", "barrier"] = "rolling"
    """rolling: one engine after the other, or one of each 64, so that the others generate; barrier:
    all at once, so that no two versions are ever served together. The latter is for those who
    compare with a synchronous loop.
    """
    delta: bool = False
    """Send only the changes since the version before, and every 16th version whole. These are fewer
    bytes where steps are small and the served precision is coarse. It is for engines behind a slow
    network.
    """


def weights_contradictions(weights: WeightsSection, *, max_staleness: int) -> Iterator[str]:
    every = weights.every
    if every - 1 <= max_staleness:
        return
    yield (
        f"weights.every ({every}) leaves the last step before a publication tokens that are "
        f"{every - 1} versions old, and rollout.max_staleness is {max_staleness}; lower "
        f"weights.every to at most {max_staleness + 1}, or raise rollout.max_staleness"
    )
