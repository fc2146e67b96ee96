"""Saving in two parts: a quick copy between two steps, and its way to the disk while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from midflight.errors import ConfigError
from midflight.trainer.checkpoint.folders import begin, draft_of, finish, latest_checkpoint, sync
from midflight.trainer.checkpoint.shards import write_shards
from midflight.trainer.checkpoint.state import GENERATORS, MOMENTS, WEIGHTS, CheckpointState, parts_of, prefixed, shard_name
from midflight.trainer.optimizer import named_parameters
from midflight.trainer.trainer import Trainer


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A trainer's state at one instant, in memory of its own. With several ranks, this rank's shards of it."""

    state: CheckpointState
    rank: int
    tensors: Mapping[str, Tensor]

    def write(self, root: Path, *, keep: int, group: dist.ProcessGroup | None = None) -> None:
        """Puts the newest checkpoint under `root` and keeps `keep`. Blocking; returns on every rank when it is on disk.

        Every rank calls it, and waits for the others in `group`: one of gloo that nothing else uses, since training goes on in the
        meantime. A rank that dies ends the others' wait with an error.
        """
        draft = draft_of(root, self.state.version)
        if self.rank == 0:
            begin(root, self.state.version)
        self._meet(group)
        if not draft.is_dir():
            raise ConfigError(
                f"rank {self.rank} does not see {draft}, which rank 0 made. Put run.folder on a file system that all ranks share."
            )
        write_shards(draft / shard_name(self.rank), self.tensors)
        sync(draft / shard_name(self.rank))
        self._meet(group)
        if self.rank == 0:
            finish(root, self.state, keep=keep)
        self._meet(group)

    def _meet(self, group: dist.ProcessGroup | None) -> None:
        if self.state.num_ranks > 1:
            dist.barrier(group)


def stage(trainer: Trainer, *, cursor: str) -> Staged:
    """Copies what a checkpoint holds to CPU memory, between two steps; no rank waits for another. The trainer may step on when it returns.

    What every rank has whole is in the shards of rank 0.
    """
    ranks = trainer.ranks
    tensors: dict[str, Tensor] = {}
    for prefix, weights, model, optimizer in parts_of(trainer):
        tensors |= prefixed(prefix + WEIGHTS, weights) | prefixed(prefix + MOMENTS, _moments(model, optimizer))
    ours = {name: tensor for name, tensor in tensors.items() if ranks.is_first or isinstance(tensor, DTensor)}
    state = CheckpointState(trainer.version, trainer.num_steps, trainer.num_skipped, trainer.lineage, cursor, ranks.size)
    copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in ours.items()}
    return Staged(state, ranks.rank, copied | prefixed(f"{GENERATORS}{ranks.rank}/", _generators()))


def save_checkpoint(root: Path, trainer: Trainer, *, cursor: str, keep: int) -> Path:
    """Both parts at once, where nothing goes on meanwhile. Returns the checkpoint's folder."""
    stage(trainer, cursor=cursor).write(root, keep=keep)
    folder = latest_checkpoint(root)
    assert folder is not None, "it was just written"
    return folder


def _moments(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    state = optimizer.state
    return {f"{key}/{name}": value for name, p in named_parameters(model) if p in state for key, value in state[p].items()}


def _generators() -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found
