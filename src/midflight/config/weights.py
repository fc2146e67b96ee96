"""The options of the handover of weights, with their checks."""

from collections.abc import Iterator
from typing import Literal

from midflight.config.section import Positive, Seconds, Section


class WeightsSection(Section):
    transport: Literal["auto", "shared_memory", "pull", "direct"] = "auto"
    """How bytes reach the engines: shared_memory on one machine, pull between machines, direct into
    the workers of vLLM and SGLang. auto chooses; `--dry-run` says which, and why.
    """
    server_engine: bool = True
    """Where `direct` goes from GPU to GPU, the server's own transfer engine receives, vLLM's by NCCL
    and SGLang's by a process group: beside running answers, if its GPUs have room for the weights
    twice, else in the pause. Untested on a GPU. false, or on one GPU: our plugin receives beside
    running answers, on one machine by CUDA IPC; over host memory if the trainer has several ranks.
    """
    every: Positive = 1
    """Steps from one published version to the next, at most `rollout.max_staleness` + 1. Larger
    trains on older tokens.
    """
    stage_seconds: Seconds = 60.0
    """Deadline of staging on one engine; past it the engine is quarantined. Larger is for models
    whose bytes take longer.
    """
    commit_seconds: Seconds = 30.0
    """Deadline of the commit, the pause included."""
    commit: Literal["rolling", "barrier"] = "rolling"
    """rolling: one engine after the other (one of each 64), so that the others generate. barrier:
    all at once, so that no two versions are served together.
    """
    delta: bool = False
    """Send only the changes since the version before, and every 16th version whole. It is for
    engines behind a slow network.
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
