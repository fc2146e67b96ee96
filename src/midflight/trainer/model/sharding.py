"""Layers that are spread over ranks, and the precision that a forward computes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from midflight.trainer.model.first_rank import FirstRanksModel
from midflight.trainer.model.layers import decoder_layers
from midflight.trainer.model.policy import TokenModel
from midflight.trainer.model.ranks import Ranks


def shard(
    reader: TokenModel,
    ranks: Ranks,
    *,
    compute_dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """FSDP2 (Zhao et al. 2023, 2304.11277): each rank keeps its share of every parameter on the
    `device`, and gathers a layer when it is used.

    Gradients are summed over the ranks in full precision, not averaged: each rank has its share of
    one loss.

    Every rank may have the whole reader, with equal weights. Or only the first has it, in host
    memory too, and the parameters of the others are on the meta device: then it gives each its
    rows.
    """
    if ranks.size == 1:
        return
    like = next(reader.parameters())
    source: FirstRanksModel | None = None
    if ranks.largest(int(like.is_meta)):
        source = FirstRanksModel(reader, ranks, device=device)
    mesh = init_device_mesh(device.type, (ranks.size,))
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=like.dtype if compute_dtype else None
    )
    for part in (*decoder_layers(reader.model), reader):
        if source is not None:
            source.make_room(part)
        fully_shard(part, mesh=mesh, mp_policy=precision)
    for module in _sharded(reader):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if source is not None:
        source.fill()


def forget_gathered(reader: TokenModel) -> None:
    """Makes `parameters()` this rank's shares again after a forward without a backward, which
    leaves the outermost weights gathered.
    """
    if isinstance(reader, FSDPModule):
        for module in _sharded(reader):
            module.reshard()


def precision(reader: TokenModel, compute_dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """A context in which a forward computes in `compute_dtype`, below the precision of the weights.
    A sharded model needs none: `shard` gave it its precision.
    """
    if compute_dtype is None or isinstance(reader, FSDPModule):
        return nullcontext()
    return torch.autocast(next(reader.parameters()).device.type, dtype=compute_dtype)


def _sharded(reader: TokenModel) -> Iterator[FSDPModule]:
    return (module for module in reader.modules() if isinstance(module, FSDPModule))
