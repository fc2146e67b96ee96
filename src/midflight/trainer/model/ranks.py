"""The processes that share a step. One is the usual case, and then nothing here does anything."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

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
        """Of torch's default process group; alone where there is none."""
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
