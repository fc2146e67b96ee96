"""Trials of versions that another process reads on the GPU that both share (CUDA IPC). That process is
a server's worker: the plugin's own code around a model of `transformers`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
import torch.multiprocessing as mp
from torch import Tensor

from midflight.models.names import in_dtype, named_tensors
from midflight.run.device_check.bench import Bench, BenchSize, Found, Wrong, not_tried, tried
from midflight.run.device_check.inside import BenchWorker
from midflight.run.device_check.report import DeviceTrial
from midflight.types import Meeting, TransferOrder, WeightManifest, WorkerState
from midflight.weights.device_digest import digests, lanes
from midflight.weights.transports.broadcast import BroadcastPublisher
from midflight.weights.transports.direct import DirectFeed

ANSWER_SECONDS = 60.0
"""The time that the other process may take for an answer, its start among them."""
VERSIONS = 4
"""The first is slower: memory is made for it."""


def by_handles(bench: Bench) -> Iterator[DeviceTrial]:
    """Yields the trial of each size."""
    what = "a version that another process reads on the same GPU (CUDA IPC)"
    if not bench.is_cuda:
        yield not_tried(what, f"{bench.device.type} has no such memory")
        return
    for size in bench.sizes:
        yield tried(
            f"{what}, {size.name}",
            partial(_handed_over, bench, size),
            remedy='set weights.transport = "shared_memory"',
        )


def _handed_over(bench: Bench, size: BenchSize) -> Found:
    return asyncio.run(_versions(bench, size))


async def _versions(bench: Bench, size: BenchSize) -> Found:
    """Hands versions over, each swapped in and compared, then takes the last but one back."""
    source = bench.model(size)
    publishing: list[float] = []
    bringing: list[float] = []
    made: list[Mapping[str, str]] = []
    num_bytes = 0
    feed = DirectFeed()
    with (
        _other_process(bench, size) as worker,
        BroadcastPublisher(device=bench.device, backend="handles") as publisher,
    ):
        for version in range(1, VERSIONS + 1):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.mul_(1.01)
            bench.wait()
            tensors = in_dtype(named_tensors(source), torch.bfloat16)
            manifest, seconds = _published(bench, publisher, version, tensors)
            publishing.append(seconds)
            began = time.perf_counter()
            await feed.bring(replace(manifest, receivers=1), worker)
            bringing.append(time.perf_counter() - began)
            if worker.orders[-1].bucket is None:
                why = feed.refusal or "the GPU gave no bucket, as the log says"
                raise Wrong(f"it came over host memory: {why}")
            publisher.release(version)
            num_bytes = sum(spec.num_bytes for spec in manifest.tensors)
            made.append(_digests(tensors))
            _check(await worker.served(version), made[-1], f"version {version}")
        _check(await worker.served(VERSIONS - 1), made[-2], "the version that was taken back")
    return Found(
        f"{num_bytes / 1e6:,.0f} MB: publish {min(publishing[1:]):.4f} s, "
        f"to the worker {min(bringing[1:]):.4f} s ({max(bringing):.3f} s the slowest), and back"
    )


def _published(
    bench: Bench, publisher: BroadcastPublisher, version: int, tensors: Mapping[str, Tensor]
) -> tuple[WeightManifest, float]:
    began = time.perf_counter()
    manifest = publisher.publish(version, tensors)
    bench.wait()
    return manifest, time.perf_counter() - began


def _digests(tensors: Mapping[str, Tensor]) -> Mapping[str, str]:
    """The digest of each tensor, computed where it is."""
    flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]
    found = digests([lanes(part) for part in flat], [len(part) for part in flat])
    return dict(zip(tensors, found, strict=True))


def _check(found: Mapping[str, str], expected: Mapping[str, str], what: str) -> None:
    for name, digest in expected.items():
        if found.get(name) != digest:
            raise Wrong(f"{name} of {what} is not as it was published")


# --- The other process ----------------------------------------------------------------------------


class OtherProcess:
    """Implements `ports.ServerWorkers`: one worker, at the other end of a pipe."""

    meets: Meeting = "plugin"

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self.orders: list[TransferOrder] = []

    async def states(self) -> Sequence[WorkerState]:
        return msgspec.convert([await self.ask("state")], tuple[WorkerState, ...])

    async def receive(self, order: TransferOrder) -> None:
        self.orders.append(order)
        await self.ask("begin", msgspec.to_builtins(order))

    async def served(self, version: int) -> Mapping[str, str]:
        """Serves a version that came, and returns the digest of each tensor."""
        return await self.ask("take", version)

    async def ask(self, verb: str, given: object = None) -> Any:
        return await asyncio.to_thread(self._ask, verb, given)

    def _ask(self, verb: str, given: object) -> Any:
        self._pipe.send((verb, given))
        if not self._pipe.poll(ANSWER_SECONDS):
            raise Wrong(f"the other process does not answer within {ANSWER_SECONDS:.0f} s")
        return self._pipe.recv()


@contextmanager
def _other_process(bench: Bench, size: BenchSize) -> Generator[OtherProcess]:
    context = mp.get_context("spawn")
    bench.folder(size)  # it is made before the other reads it
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, bench, size), daemon=True)
    process.start()
    try:
        yield OtherProcess(ours)
    finally:
        process.kill()
        process.join()


def _serve(pipe: Any, bench: Bench, size: BenchSize) -> None:
    """Runs in the other process, until it is killed."""
    worker = BenchWorker(bench.model(size, dtype="bfloat16"))
    while True:
        verb, given = pipe.recv()
        said: object = None
        if verb == "begin":
            worker.buffer.begin(given, index=0, workers=1)
        elif verb == "state":
            said = worker.buffer.state()
        else:
            worker.buffer.take(given)
            bench.wait()
            said = _digests(named_tensors(worker.model))
        pipe.send(said)
