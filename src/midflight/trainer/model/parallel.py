"""What makes a model fit and go fast: sharding over ranks, recomputed activations, lower precision, compiled layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from midflight.errors import ConfigError
from midflight.trainer.model.policy import Reader
from midflight.trainer.model.ranks import Ranks


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, by the names that the architecture gives for them. `ConfigError` if there are none."""
    names = set(cast("list[str] | None", getattr(model, "_no_split_modules", None)) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} does not say what its layers are, so it cannot be split. "
            "Set trainer.ranks = 1, trainer.activation_checkpointing = false and trainer.compile = false."
        )
    return found


def recompute_activations(model: PreTrainedModel) -> None:
    """Each layer keeps its input only and computes the rest again in the backward. Values and gradients stay the same to the bit."""
    for layer in decoder_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles the feed-forward part of every layer, in place: names stay. Not the attention: its rows have other lengths in every micro-batch."""
    for layer in decoder_layers(model):
        for child in layer.children():
            if not any(type(inner).__name__.endswith("Attention") for inner in child.modules()):
                child.compile(dynamic=True)


def shard(reader: Reader, ranks: Ranks, *, compute_dtype: torch.dtype | None) -> None:
    """FSDP2 (Zhao et al. 2023, 2304.11277): each rank keeps its share of every parameter, and gathers a layer when it is used.

    Gradients are summed over the ranks in full precision, not averaged: each rank has its share of one loss.
    """
    if ranks.size == 1:
        return
    device = next(reader.parameters()).device
    mesh = init_device_mesh(device.type, (ranks.size,))
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=next(reader.parameters()).dtype if compute_dtype else None)
    for layer in decoder_layers(reader.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(reader, mesh=mesh, mp_policy=precision)
    for module in _sharded(reader):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def forget_gathered(reader: Reader) -> None:
    """After a forward without a backward: the outermost weights are still gathered, and `parameters()` are those, not this rank's shares."""
    if isinstance(reader, FSDPModule):
        for module in _sharded(reader):
            module.reshard()


def precision(reader: Reader, compute_dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """The forward's precision beside weights of a higher one. A sharded model has its own way (`shard`)."""
    if compute_dtype is None or isinstance(reader, FSDPModule):
        return nullcontext()
    return torch.autocast(next(reader.parameters()).device.type, dtype=compute_dtype)


def _sharded(reader: Reader) -> Iterator[FSDPModule]:
    return (module for module in reader.modules() if isinstance(module, FSDPModule))
