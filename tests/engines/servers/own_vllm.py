"""A stub of vLLM's routes for its own weight transfer, with a worker for each GPU of the server.

It refuses what vLLM 0.32.0 refuses: an order of calls, names, shapes. It cuts buckets as that does, opens its model for other weights as
that does, so that an update that breaks off leaves it without numbers, and meets by gloo in the place of NCCL. What our loader does inside
vLLM's workers is the loader's own code.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tests.engines.servers.fakes import FakeVllm
from torch import Tensor, nn
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from midflight.engines.servers.command import INSIDE

sys.path.append(str(INSIDE))
import midflight_direct

CPU = torch.device("cpu")
INIT = {"rank_offset", "world_size", "packed", "packed_buffer_size_bytes", "packed_num_buffers"}
RENDEZVOUS = ({"nccl_unique_id_b64"}, {"master_address", "master_port"})
SECONDS = timedelta(seconds=5)


class Refusal(Exception):
    """What vLLM answers with status 500."""


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
            self._parameters[self.held[name]] = nn.Parameter(self.share(name, tensor).float().clone(), requires_grad=False)

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
    """vLLM's engine in one worker, and our loader beside it."""

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
        self._bucket_bytes = 0
        self._served: dict[str, nn.Parameter] | None = None

    def init(self, info: dict[str, Any]) -> None:
        self._store = TCPStore(info["master_address"], info["master_port"], timeout=SECONDS, wait_for_workers=False)
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = SECONDS
        self._group = ProcessGroupGloo(PrefixStore("nccl_id", self._store), info["rank_offset"] + self._rank, info["world_size"], options)
        self._bucket_bytes = info["packed_buffer_size_bytes"]

    def state(self) -> dict[str, object]:
        return {**midflight_direct.NOTHING_ORDERED, **self.update.state(), "stages": self.update.can_stage}

    def shutdown(self) -> None:
        self._group = self._store = None

    def stage(self, served: str) -> None:
        self.update.clear(served)
        self.target = midflight_direct.beside(self.model)
        self.update.stage(self.target)

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


class StubVllm(FakeVllm):
    """The server: `orders` are the calls of its own transfer, in order."""

    paths = (
        *FakeVllm.paths,
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    )

    def __init__(self, whole: Mapping[str, Tensor], *, workers: int, device: torch.device = CPU) -> None:
        super().__init__()
        self.label = "0"
        self.workers = [Worker(whole, rank, workers, device) for rank in range(workers)]
        self.orders: list[str] = []
        self._met = self._active = False

    def holds(self, whole: Mapping[str, Tensor]) -> bool:
        """Whether each worker has its share of these numbers, and where they were at first."""
        for worker in self.workers:
            for name, tensor in whole.items():
                found = worker.model.get_parameter(worker.model.held[name])
                if found.is_meta or not torch.equal(found.data.cpu(), worker.model.share(name, tensor).cpu().float()):
                    return False
        return True

    async def _answer(self, request: Request) -> Response:
        path, raw = request.url.path, await request.body()
        if path not in self.paths or (path == "/collective_rpc" and b"midflight_load" in raw):
            return await super()._answer(request)
        body = await request.json() if raw else {}
        deed = {
            "/init_weight_transfer_engine": lambda: self._init(body["init_info"]),
            "/shutdown_weight_transfer_engine": self._shutdown,
            "/start_weight_update": self._start,
            "/update_weights": lambda: self._update(body["update_info"]),
            "/finish_weight_update": lambda: self._finish(body),
            "/collective_rpc": lambda: self._rpc(**body),
        }.get(path)
        if deed is None:
            return await super()._answer(request)
        self.calls.append((path, body))
        if path != "/collective_rpc":
            self.orders.append(path.strip("/"))
        try:
            return JSONResponse(await asyncio.to_thread(deed) or {})
        except (Refusal, ValueError, RuntimeError) as error:
            return Response(str(error), status_code=500)

    def _init(self, info: dict[str, Any]) -> None:
        if info.keys() not in [INIT | rendezvous for rendezvous in RENDEZVOUS]:
            raise Refusal(f"init_info has {sorted(info)}")
        if not info["packed"] or info["world_size"] < info["rank_offset"] + len(self.workers):
            raise Refusal(f"{info}: the trainer's buckets are packed, and each worker is a rank")
        self._each(lambda worker: worker.init(info))
        self._met = True

    def _shutdown(self) -> None:
        if self._active:
            raise Refusal("Cannot release a trainer connection during a weight update")
        self._each(Worker.shutdown)
        self._met = False

    def _start(self) -> None:
        if self._active:
            raise Refusal("start_weight_update called while a weight update is already active")
        self._active = True
        self._each(Worker.start)

    def _update(self, info: dict[str, Any]) -> None:
        if not self._active or not self._met:
            raise Refusal("start_weight_update must be called before update_weights")
        if info.keys() != {"names", "dtype_names", "shapes"}:
            raise Refusal(f"update_info has {sorted(info)}")
        self._active = False
        try:
            self._each(lambda worker: worker.receive(info))
        except Exception:
            for worker in self.workers:
                worker.target = worker.model
            raise
        self._active = True

    def _finish(self, body: dict[str, Any]) -> None:
        if not self._active:
            raise Refusal("finish_weight_update called without a matching start_weight_update")
        self._each(Worker.finish)
        self._active = False
        self.label = body.get("weight_version") or self.label

    def _rpc(self, method: str, args: tuple[str, ...] = ()) -> object:
        deeds: dict[str, Callable[..., object]] = {
            "midflight_keep": lambda worker: worker.update.begin(*args),
            "midflight_stage": lambda worker: worker.stage(*args),
            "midflight_swap": lambda worker: worker.update.swap(*args),
            "midflight_take_back": lambda worker: worker.update.take_back(*args),
            "midflight_landed": lambda worker: worker.state(),
        }
        if method not in deeds:
            return {"results": ["True" for _ in self.workers]}
        return {"results": self._each(deeds[method])}

    def _each(self, deed: Callable[[Worker], object]) -> list[object]:
        """Of all workers at once, as each is a process. The first failure is that of all."""
        found, failed = dict[int, object](), list[Exception]()

        def run(rank: int) -> None:
            try:
                found[rank] = deed(self.workers[rank])
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return [found[rank] for rank in range(len(self.workers))]
