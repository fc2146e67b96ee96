"""What is small of a trainer's state, and the names of what is large."""

from __future__ import annotations

import msgspec

from midflight.trainer.trainer import Fork
from midflight.types import Version

FORMAT = 2
"""1 was one file each for weights, optimiser and generators, whole on one rank."""

WEIGHTS, MOMENTS, GENERATORS = "model/", "optimizer/", "rng/"
"""Tensors are named `model/<name>`, `optimizer/<moment>/<parameter>` and `rng/<rank>/<device>`."""


class CheckpointState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `state.json` holds."""

    version: Version
    num_steps: int
    num_skipped: int
    lineage: tuple[Fork, ...]
    cursor: str
    """Opaque to the trainer: where the store was when these weights were final (DECISIONS 27)."""
    num_ranks: int
    """How many wrote it. Any number may read it."""
    format: int = FORMAT


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
