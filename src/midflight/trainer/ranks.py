"""The processes that share a step. One is the usual case, and then nothing here does anything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


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
