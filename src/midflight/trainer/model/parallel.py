"""What makes a model fit and go fast: ranks that share a step, sharding, recomputed activations, lower precision, compiled layers; and
the forwards over a step's predictions, of which each rank makes its share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from midflight.errors import ConfigError
from midflight.trainer.model.microbatch import Index, MicroBatch, Predictions, num_oversized, share_of, split
from midflight.trainer.model.policy import TokenModel

PATIENCE = timedelta(days=7)
"""A rank may wait this long for another, which may be at its warm start. A death is noticed at once, by its connection."""


def join(meeting: str, *, rank: int, size: int) -> None:
    """Makes this process one of `size`, which meet through a file that all of them see. Waits until all have come."""
    device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else None
    if device is not None:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device is not None else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=PATIENCE)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among those that train together. Every method is a collective: all ranks call it, in the same order."""

    rank: int = 0
    size: int = 1

    @classmethod
    def joined(cls) -> Ranks:
        """This process's place in torch's default process group; a single rank where there is none."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else cls()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sums in place over the ranks, and returns it. Arrays that each rank filled in part, and left 0 elsewhere, become whole."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: int) -> int:
        if self.size == 1:
            return value
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)


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


def shard(reader: TokenModel, ranks: Ranks, *, compute_dtype: torch.dtype | None) -> None:
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


def forget_gathered(reader: TokenModel) -> None:
    """After a forward without a backward: the outermost weights are still gathered, and `parameters()` are those, not this rank's shares."""
    if isinstance(reader, FSDPModule):
        for module in _sharded(reader):
            module.reshard()


def precision(reader: TokenModel, compute_dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """The forward's precision beside weights of a higher one. A sharded model has its own way (`shard`)."""
    if compute_dtype is None or isinstance(reader, FSDPModule):
        return nullcontext()
    return torch.autocast(next(reader.parameters()).device.type, dtype=compute_dtype)


def _sharded(reader: TokenModel) -> Iterator[FSDPModule]:
    return (module for module in reader.modules() if isinstance(module, FSDPModule))


Forward = tuple[MicroBatch, bool, Float[Tensor, " k"], "Float[Tensor, ' k'] | None"]


class Passes:
    """Runs a reader over predictions. Collective: all ranks call with the same predictions, and take as many forwards."""

    def __init__(
        self, reader: TokenModel, ranks: Ranks, *, budget: int, temperature: float, compute_dtype: torch.dtype | None, device: torch.device
    ) -> None:
        """`budget`: tokens of a micro-batch."""
        self.reader = reader
        self._ranks, self._budget, self._temperature, self._device = ranks, budget, temperature, device
        self._compute_dtype = compute_dtype

    def forwards(self, predictions: Predictions, chosen: Index, *, trains: bool, with_entropy: bool = False) -> Iterator[Forward]:
        """This rank's micro-batches of the `chosen` predictions (ascending): each with its log-probabilities (of a critic values), and entropies if asked.

        Gathering layers takes all ranks, so one that has fewer micro-batches than another does some for nothing, marked as not its own.
        """
        mine = share_of(predictions, chosen, rank=self._ranks.rank, size=self._ranks.size)
        micros = list(split(predictions, mine, budget=self._budget, device=self._device))
        own, count = len(micros), self._ranks.largest(len(micros))
        if count > own:
            idle = next(split(predictions, chosen[:1], budget=self._budget, device=self._device))
            micros += [idle] * (count - own)
        for number, micro in enumerate(micros):
            with torch.set_grad_enabled(trains), precision(self.reader, self._compute_dtype):
                logprobs, entropy = self.reader(micro, temperature=self._temperature, with_entropy=with_entropy)
            yield micro, number < own, logprobs, entropy
        if not trains:  # a backward does it by itself
            forget_gathered(self.reader)

    def scores(self, predictions: Predictions, chosen: Index | None = None) -> Float[Tensor, " K"]:
        """Log-probabilities (of a critic values) of the chosen predictions, or of all, without gradient; whole on every rank, 0 where not chosen."""
        found = torch.zeros(len(predictions.targets), dtype=torch.float64, device=self._device)
        everything = np.arange(len(predictions.targets)) if chosen is None else chosen
        dtype = torch.float32
        for micro, is_mine, logprobs, _ in self.forwards(predictions, everything, trains=False):
            dtype = logprobs.dtype
            if is_mine:
                found[micro.predictions] = logprobs.double()
        return self._ranks.sum(found).to(dtype)

    def num_oversized(self, predictions: Predictions) -> int:
        return num_oversized(predictions, budget=self._budget)
