"""A stub of SGLang's routes for its update by a process group, and of the orders that our plugin takes by names of groups.

It refuses what SGLang 0.5.23 refuses: an order of calls, names, shapes. As that does, it answers for its first worker only, waits for running
answers outside a pause where our plugin does not stand, and loads in place what our plugin does not lay beside.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tests.engines.servers.fakes import FakeSglang
from tests.engines.servers.own_workers import CPU, OwnWorkers, Refusal, Worker
from torch import Tensor

INIT = {"master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"}
UPDATE = {"names", "dtypes", "shapes", "group_name", "flush_cache"}
BESIDE = "midflight:beside:"


class StubSglang(FakeSglang):
    """The server: `orders` are the calls of its own transfer and the orders to our plugin, in order."""

    paths = (
        *FakeSglang.paths,
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/end_weight_update",
    )

    def __init__(self, whole: Mapping[str, Tensor], *, workers: int, device: torch.device = CPU) -> None:
        super().__init__()
        self.label = "0"
        self._workers = OwnWorkers(whole, workers=workers, device=device)
        self.workers, self.holds = self._workers.all, self._workers.hold
        self.orders: list[str] = []
        self._group = ""
        self._active = False
        self._num_running = 0

    async def _say(self, body: dict[str, object]) -> AsyncIterator[bytes]:
        self._num_running += 1
        try:
            async for said in super()._say(body):
                yield said
        finally:
            self._num_running -= 1

    async def _answer(self, request: Request) -> Response:
        path, raw = request.url.path, await request.body()
        body = await request.json() if raw else {}
        deed = {
            "/init_weights_update_group": lambda: self._init(body),
            "/destroy_weights_update_group": lambda: self._destroy(body["group_name"]),
            "/begin_weight_update": self._begin,
            "/update_weights_from_distributed": lambda: self._update(body),
            "/end_weight_update": self._end,
        }.get(path)
        if path == "/server_info":
            self.tells = {"internal_states": [{"midflight": [worker.state() for worker in self.workers]}]}
        if deed is None:
            return await super()._answer(request)
        self.calls.append((path, body))
        group = body.get("group_name", "")
        is_ours = path == "/update_weights_from_distributed" and group.startswith("midflight:")
        self.orders.append(":".join(group.split(":")[:2]) if is_ours else path.strip("/"))
        waits = path.endswith(("weight_update", "distributed")) and not is_ours
        while waits and self._going.is_set() and self._num_running:
            await asyncio.sleep(0.001)
        try:
            await asyncio.to_thread(deed)
        except (Refusal, ValueError, RuntimeError) as error:
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        return JSONResponse({"success": True, "message": "Success"})

    def _init(self, body: dict[str, Any]) -> None:
        if body.keys() != INIT:
            raise Refusal(f"the group has {sorted(body)}")
        if body["world_size"] < body["rank_offset"] + len(self.workers):
            raise Refusal(f"{body}: each worker is a rank")
        self._group = body["group_name"]
        self._first(lambda worker: worker.init(body, [self._group, f"{self._group}/", "cpu/"]))

    def _destroy(self, group: str) -> None:
        if group != self._group:
            raise Refusal("The group to be destroyed does not exist.")
        self._group = ""
        self._first(Worker.shutdown)

    def _begin(self) -> None:
        if self._active:
            raise Refusal("a weight-update session is already open; call end_weight_update() first")
        self._active = True
        self._first(self._keep)

    def _keep(self, worker: Worker) -> None:
        worker.update.begin(self.label)
        worker.place(worker.model)

    def _end(self) -> None:
        if not self._active:
            raise Refusal("no weight-update session is open; call begin_weight_update() first")
        self._active = False

    def _update(self, body: dict[str, Any]) -> None:
        if body.keys() - {"load_format", "weight_version"} != UPDATE:
            raise Refusal(f"an update has {sorted(body)}")
        group, label = body["group_name"], body.get("weight_version")
        if group == "midflight:stage":
            self._first(lambda worker: worker.stage(self.label))
        elif group == "midflight:swap":
            self._all(lambda worker: worker.update.swap(self.label))
        elif group == "midflight:own":
            self._all(lambda worker: worker.update.take_back(label, self.label))
        else:
            self._bucket(group, body)
        self.label = label or self.label

    def _bucket(self, group: str, body: dict[str, Any]) -> None:
        if group.removeprefix(BESIDE) != self._group:
            raise Refusal(f"Group {group} not in {[self._group]}")
        if not group.startswith(BESIDE) and not self._active:
            raise Refusal("update_weights_from_distributed must run between begin_weight_update() and end_weight_update()")
        if body["names"] and body["load_format"] != "flattened_bucket":
            raise Refusal(f"a bucket is flat, and this one is {body['load_format']}")
        self._first(lambda worker: worker.receive({**body, "dtype_names": body["dtypes"]}))

    def _first(self, deed: Callable[[Worker], object]) -> None:
        """What the first worker answers."""
        found, *_ = self._workers.each(deed)
        if isinstance(found, Exception):
            raise found

    def _all(self, deed: Callable[[Worker], object]) -> None:
        """What our plugin answers, whose workers tell each other."""
        failed = [one for one in self._workers.each(deed) if isinstance(one, Exception)]
        if failed:
            raise failed[0]
