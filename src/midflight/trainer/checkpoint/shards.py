"""Tensors as shards on disk, in the safetensors layout of torch.distributed.checkpoint: one file for each rank, read by any number of ranks.

DCP's planners know which part of a tensor is here and which parts of which files make up another layout. Its collectives are left out: they
pickle on sockets (G10), and each rank knows its own parts without asking. So is its writer: that copies everything twice, and
holds the interpreter's lock for seconds per GB, so that a write in the background would stop the training it should not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""And dtypes, by name."""


def write_shards(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """What this rank holds of each tensor (of a DTensor its shard), with its place in the whole."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors))
    items = planner.create_local_plan().items
    parts: dict[str, Any] = {item.index.fqn: planner.resolve_data(item) for item in items}
    places = {item.index.fqn: {"saved_offsets": list(item.tensor_data.chunk.offsets)} for item in items if item.tensor_data}
    save_file({name: part.contiguous() for name, part in parts.items()}, path, metadata={"DCP_SHARDING_INFO": json.dumps(places)})


class Shards:
    """The tensors in the files of a folder. Opening it reads headers only."""

    def __init__(self, folder: Path) -> None:
        """`ValueError` if parts of a tensor are missing; what safetensors raises, if a file is none."""
        self._reader = HuggingFaceStorageReader(str(folder))
        self._metadata = self._reader.read_metadata()
        self.tensors = {
            name: found for name, found in self._metadata.state_dict_metadata.items() if isinstance(found, TensorStorageMetadata)
        }
        """Whole shapes and dtypes by name."""
        for name, found in self.tensors.items():
            if sum(prod(chunk.sizes) for chunk in found.chunks) < prod(found.size):
                raise ValueError(f"parts of tensor {name!r} are missing")

    def named(self, prefix: str) -> Shapes:
        """Shapes and dtypes by what follows `prefix` in the name."""
        return {
            name[len(prefix) :]: (tuple(found.size), found.properties.dtype)
            for name, found in self.tensors.items()
            if name.startswith(prefix)
        }

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Overwrites each tensor (of a DTensor the shard that is here) with the one of its name. Reads no more than that takes."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner(dict(into), self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
