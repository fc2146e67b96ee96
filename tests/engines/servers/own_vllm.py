"""A stub of vLLM's routes for its own weight transfer.

It refuses what vLLM 0.32.0 refuses: an order of calls, names, shapes. It cuts buckets as that does, and opens its model for other weights as
that does, so that an update that breaks off leaves it without numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tests.engines.servers.fakes import FakeVllm
from tests.engines.servers.own_workers import CPU, OwnWorkers, Refusal, Worker
from torch import Tensor

INIT = {"rank_offset", "world_size", "packed", "packed_buffer_size_bytes", "packed_num_buffers"}
RENDEZVOUS = ({"nccl_unique_id_b64"}, {"master_address", "master_port"})


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
        self._workers = OwnWorkers(whole, workers=workers, device=device)
        self.workers, self.holds = self._workers.all, self._workers.hold
        self.orders: list[str] = []
        self._met = self._active = False

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
        self._each(lambda worker: worker.init(info, ["nccl_id"]))
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
        """The first failure is that of all."""
        found = self._workers.each(deed)
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found
