"""Ranks over gloo, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def in_processes(rank: Callable[..., None], size: int, folder: Path) -> None:
    """Calls `rank`, a function of a module, with the folder in so many processes that have met. Returns when all have ended."""
    multiprocessing.set_forkserver_preload([rank.__module__])  # imports once for all ranks
    mp.start_processes(_met, args=(size, str(folder), rank), nprocs=size, start_method="forkserver")


def _met(number: int, size: int, folder: str, rank: Callable[..., None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=size)
    try:
        rank(Path(folder))
    finally:
        dist.destroy_process_group()
