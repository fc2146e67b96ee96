"""A stub of vLLM's routes for our plugin, which receives versions in each worker while the server generates. What the plugin does there is its
own code, around a model of `transformers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tests.engines.servers.fakes import FakeVllm

from midflight.run.device_check.inside import BenchWorker


class PluginVllm(FakeVllm):
    paths = (
        *FakeVllm.paths,
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    )

    def __init__(self, workers: Sequence[BenchWorker]) -> None:
        super().__init__()
        self.label = "0"
        self.workers = workers
        self.orders: list[dict[str, Any]] = []
        self.fails_to_swap = False

    async def _answer(self, request: Request) -> Response:
        path, raw = request.url.path, await request.body()
        body = await request.json() if raw else {}
        try:
            if path == "/init_weight_transfer_engine":
                self.orders.append(body["init_info"]["order"])
                for index, worker in enumerate(self.workers):
                    worker.buffer.begin(self.orders[-1], index=index, workers=len(self.workers))
            elif path == "/update_weights":
                if self.fails_to_swap:
                    self.fails_to_swap = False
                    raise ValueError("out of memory")
                for worker in self.workers:
                    worker.buffer.take(body["update_info"]["version"])
            elif path == "/finish_weight_update":
                self.label = body.get("weight_version") or self.label
            elif body.get("method") == "midflight_landed":
                return JSONResponse({"results": [worker.buffer.state() for worker in self.workers]})
            elif body.get("method") == "midflight_let_go":
                self.calls.append((path, body))
                for worker in self.workers:
                    worker.buffer.let_go()
            else:
                return await super()._answer(request)
        except ValueError as error:
            return Response(str(error), status_code=500)
        return JSONResponse({})
