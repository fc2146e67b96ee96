"""Trials of what our plugin does inside a server's workers: a version comes straight from the trainer,
is swapped in, and taken back. The worker here is the plugin's own code around a model of
`transformers`.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from midflight.engines.servers.command import INSIDE
from midflight.models.names import named_tensors
from midflight.run.device_check.bench import (
    SMALL,
    TOLERANCE,
    Bench,
    Found,
    Wrong,
    most,
    plain_logprobs,
    requests,
    tried,
    within,
)
from midflight.run.device_check.report import DeviceTrial
from midflight.types import Meeting, TransferOrder, WorkerState
from midflight.weights.transports.broadcast import BroadcastPublisher
from midflight.weights.transports.direct import DirectFeed

BUCKET_BYTES = 2**16
"""It is small, so that the tensors of a small model take several."""


class BenchWorker:
    """Implements `ports.ServerWorkers`: one worker, which serves a model."""

    meets: Meeting = "plugin"

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        plugin = _plugin()

        def prepared(tensors: Iterable[tuple[str, Tensor]]) -> PreTrainedModel:
            ready = plugin.beside(model)
            own = named_tensors(ready)
            for name, tensor in tensors:
                own[name].copy_(tensor)
            return ready

        def swapped(ready: PreTrainedModel) -> PreTrainedModel:
            return plugin.exchange(model, ready)

        device = next(model.parameters()).device
        self.buffer = plugin.DoubleBuffer(prepared, swapped, device)

    async def states(self) -> Sequence[WorkerState]:
        return msgspec.convert([self.buffer.state()], tuple[WorkerState, ...])

    async def receive(self, order: TransferOrder) -> None:
        self.buffer.begin(msgspec.to_builtins(order), index=0, workers=1)


@cache
def _plugin() -> Any:
    """The module that runs in servers' workers."""
    path = INSIDE / "midflight_direct.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"{path} is a part of the package"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inside_workers(bench: Bench) -> Iterator[DeviceTrial]:
    """Yields the trial of a version that comes straight, and of taking it back."""
    yield tried(
        "a version comes beside the served one, is swapped in and taken back, to the bit",
        lambda: asyncio.run(_brought(bench)),
        remedy='set weights.transport = "shared_memory"',
    )


async def _brought(bench: Bench) -> Found:
    """The bytes come from this process's host memory: one GPU can be only one member of NCCL."""
    worker = BenchWorker(bench.model(SMALL))
    with BroadcastPublisher(bucket_bytes=BUCKET_BYTES) as publisher:
        feed = DirectFeed()
        for version, seed in ((1, 1), (2, 2)):
            coming = bench.model(SMALL, seed=seed)
            before = _copied(worker.model)
            await feed.bring(publisher.publish(version, named_tensors(coming)), worker)
            _check_equal(worker.model, before, "while the version came")
            worker.buffer.take(version)
            bench.wait()
            _check_equal(worker.model, _copied(coming), "after the swap")
            publisher.release(version)
    apart = _forward_apart(bench, worker.model)
    worker.buffer.take(1)
    bench.wait()
    _check_equal(worker.model, _copied(bench.model(SMALL, seed=1)), "after it was taken back")
    return Found(f"two versions, the forward of the second {apart}")


def _copied(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in named_tensors(model).items()}


def _check_equal(model: PreTrainedModel, expected: dict[str, Tensor], when: str) -> None:
    for name, tensor in named_tensors(model).items():
        if not torch.equal(tensor.cpu(), expected[name]):
            raise Wrong(f"{name} is not as it should be {when}")


def _forward_apart(bench: Bench, model: PreTrainedModel) -> str:
    (request,) = requests(SMALL, 1)
    row = request.input_ids
    half = len(row) // 2
    expected = plain_logprobs(bench.model(SMALL, seed=2), row[:half], row[half:])
    found = plain_logprobs(model, row[:half], row[half:])
    return within(most(found, expected), TOLERANCE, "nats apart at most")
