"""What is small of a trainer's state, and the names of what is large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from torch import Tensor, nn
from torch.optim import AdamW

from midflight.models.names import named_tensors
from midflight.trainer.optimizer import named_parameters
from midflight.trainer.trainer import Fork, Trainer
from midflight.types import Version

FORMAT = 2
"""1 was one file each for weights, optimiser and generators, whole on one rank."""

WEIGHTS, MOMENTS, GENERATORS, CRITIC = "model/", "optimizer/", "rng/", "critic/"
"""Tensors are named `model/<name>`, `optimizer/<moment>/<parameter>` and `rng/<rank>/<device>`; those of a critic, whose names are of what it
trains, `critic/model/<parameter>` and `critic/optimizer/<moment>/<parameter>`."""


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


def parts_of(trainer: Trainer) -> Iterator[tuple[str, dict[str, Tensor], nn.Module, AdamW]]:
    """The policy, and the critic if there is one: prefix of its names, weights by name, what is trained, and its optimiser."""
    yield "", named_tensors(trainer.model), trainer.model, trainer.optimizer
    if trainer.critic is not None:
        weights = {name: parameter.detach() for name, parameter in named_parameters(trainer.critic.model)}
        yield CRITIC, weights, trainer.critic.model, trainer.critic.optimizer


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
