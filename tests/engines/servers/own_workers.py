"""Workers of a stub of a server whose own transfer engine receives, one for each GPU: its engine in each, which meets by gloo in the place of
NCCL, and our loader's own code beside it.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from midflight.engines.servers.command import INSIDE

sys.path.append(str(INSIDE))
import midflight_direct

CPU = torch.device("cpu")
SECONDS = timedelta(seconds=5)


class Refusal(Exception):
    """What a server answers with an error."""


class Shards(nn.Module):
    """A worker's share of a model: columns of what adds to the stream, rows of other matrices, and all of a vector."""

    def __init__(self, whole: Mapping[str, Tensor], rank: int, count: int, device: torch.device) -> None:
        super().__init__()
        self._rank, self._count, self._device = rank, count, device
        self.shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        self.held = {name: name.replace(".", "_") for name in whole}
        for name, tensor in whole.items():
            self.register_parameter(self.held[name], nn.Parameter(self.share(name, tensor).clone().to(device), requires_grad=False))

    def share(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() < 2:
            return tensor
        return tensor.chunk(self._count, dim=int(name.endswith(("o_proj.weight", "down_proj.weight"))))[self._rank]

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name not in self.held:
                raise Refusal(f"there is no parameter {name}")
            if tuple(tensor.shape) != self.shapes[name]:
                raise Refusal(f"{name} has shape {tuple(tensor.shape)}")
            share = self.share(name, tensor).float()
            place = self._parameters[self.held[name]]
            assert place is not None
            if place.is_meta:
                self._parameters[self.held[name]] = nn.Parameter(share.clone(), requires_grad=False)
            else:
                place.data.copy_(share)

    def opens(self) -> dict[str, nn.Parameter]:
        """Takes all numbers out, and returns the parameters that had them."""
        served = dict(self._parameters)
        for name, parameter in served.items():
            self._parameters[name] = nn.Parameter(torch.empty(parameter.shape, device="meta"), requires_grad=False)
        return served

    def closes(self, served: dict[str, nn.Parameter]) -> None:
        """Puts what was loaded where the numbers were before, because recorded graphs hold the addresses."""
        for name, parameter in served.items():
            served[name].data.copy_(self._parameters[name].data)
            self._parameters[name] = parameter


class Worker:
    """A server's engine in one worker, and our loader beside it."""

    def __init__(self, whole: Mapping[str, Tensor], rank: int, count: int, device: torch.device) -> None:
        self.model = Shards(whole, rank, count, device)
        self.update = midflight_direct.OwnUpdate(self.model)
        self.target: Any = self.model
        """The model that the update loads."""
        self.fails_at: int | None = None
        """The number of the bucket that it cannot load, of an update."""
        self._number = 0
        self._rank, self._device = rank, device
        self._group: Any = None
        self._bucket_bytes: float = math.inf
        self._served: dict[str, nn.Parameter] | None = None

    def init(self, info: dict[str, Any], keys: Sequence[str]) -> None:
        """`keys` are the names that stand before those of the store, from left to right."""
        store: Any = TCPStore(info["master_address"], info["master_port"], timeout=SECONDS, wait_for_workers=False)
        for key in keys:
            store = PrefixStore(key, store)
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = SECONDS
        self._group = ProcessGroupGloo(store, info["rank_offset"] + self._rank, info["world_size"], options)
        self._bucket_bytes = info.get("packed_buffer_size_bytes", math.inf)

    def state(self) -> dict[str, object]:
        return {**midflight_direct.NOTHING_ORDERED, **self.update.state()}

    def shutdown(self) -> None:
        self._group = None

    def stage(self, served: str) -> None:
        self.update.clear(served)
        self.update.stage(midflight_direct.beside(self.model))
        self.place(self.update.beside)

    def place(self, model: Any) -> None:
        """The buckets of an update come into this model from now on."""
        self.target = model
        self._number = 0

    def start(self) -> None:
        self._served = self.target.opens()
        self._number = 0

    def receive(self, info: dict[str, Any]) -> None:
        pack: list[tuple[str, list[int], torch.dtype]] = []
        size = 0
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            pack.append((name, shape, getattr(torch, dtype)))
            size += math.prod(shape) * pack[-1][2].itemsize
            if size > self._bucket_bytes:
                self._bucket(pack, size)
                pack, size = [], 0
        if pack:
            self._bucket(pack, size)

    def _bucket(self, pack: list[tuple[str, list[int], torch.dtype]], size: int) -> None:
        bucket = torch.empty(size, dtype=torch.uint8, device=self._device)
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([bucket], options).wait()
        self._number += 1
        if self.fails_at == self._number - 1:
            raise Refusal("out of memory")
        parts = bucket.split([math.prod(shape) * dtype.itemsize for _, shape, dtype in pack])
        weights = [(name, part.view(dtype).view(shape)) for part, (name, shape, dtype) in zip(parts, pack, strict=True)]
        self.update.arrive(weights)
        self.target.load_weights(weights)

    def finish(self) -> None:
        assert self._served is not None
        self.target.closes(self._served)
        self._served = None
        self.target = self.model


class OwnWorkers:
    """The workers of a server, each of which is a process."""

    def __init__(self, whole: Mapping[str, Tensor], *, workers: int, device: torch.device = CPU) -> None:
        self.all = [Worker(whole, rank, workers, device) for rank in range(workers)]

    def hold(self, whole: Mapping[str, Tensor]) -> bool:
        """Whether each worker has its share of these numbers, and where they were at first."""
        for worker in self.all:
            for name, tensor in whole.items():
                found = worker.model.get_parameter(worker.model.held[name])
                if found.is_meta or not torch.equal(found.data.cpu(), worker.model.share(name, tensor).cpu().float()):
                    return False
        return True

    def each(self, deed: Callable[[Worker], object]) -> list[object]:
        """Of all workers at once. Where one fails there is its error."""
        found = dict[int, object]()

        def run(rank: int) -> None:
            try:
                found[rank] = deed(self.all[rank])
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.all))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in range(len(self.all))]
