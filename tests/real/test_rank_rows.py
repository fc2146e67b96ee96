"""Versions that go from the rows of several ranks into a server's workers. Gloo processes in the place of GPUs and of NCCL."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engines.servers.fakes import attached
from tests.engines.servers.own_vllm import StubVllm
from tests.second_device import crossed, here
from tests.trainer.fixtures import batch, tiny_model, trainer
from torch import Tensor

from midflight.engines.servers.direct import DirectLoader
from midflight.engines.servers.engine import ServerEngine
from midflight.models.names import as_tensors, named_tensors
from midflight.run.trainer.team import Wire
from midflight.trainer.model.rank_buckets import collect
from midflight.trainer.model.ranks import Ranks
from midflight.types import WeightManifest
from midflight.weights.manifest import extent, layout
from midflight.weights.transports import rank_rows
from midflight.weights.transports.device_versions import device_fingerprint
from midflight.weights.transports.direct import DirectFeed
from midflight.weights.transports.process_group import BroadcastReceiver
from midflight.weights.transports.publisher import named_shapes
from midflight.weights.transports.rank_rows import RankRowsPublisher

from .rank_processes import in_processes

BUCKET = 4096
"""Bytes: a small part of the largest tensors, and no multiple of a row."""


class Served:
    """A server of two workers on a loop of its own, so that versions come to it beside the steps of the ranks."""

    def __init__(self, engine: ServerEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop

    def update(self, manifest: WeightManifest) -> Any:
        """What is done when it serves the version."""
        return asyncio.run_coroutine_threadsafe(self._update(manifest), self._loop)

    async def _update(self, manifest: WeightManifest) -> None:
        await self._engine.stage(manifest)
        await self._engine.commit(manifest.version)


@contextmanager
def serving(stub: StubVllm) -> Iterator[Served]:
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), list[ServerEngine]()
    ended = asyncio.Event()

    async def main() -> None:
        way = DirectLoader("vllm", DirectFeed(), by_own_engine=True)
        with tempfile.TemporaryDirectory() as folder:
            async with attached(stub, Path(folder), direct=way) as (engine, _):
                found.append(engine)
                ready.set()
                await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(60)
    try:
        yield Served(found[0], loop)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()


def stepping_and_sending(_: Path) -> None:
    """Each version is sent while all ranks make the next step; every second one is fetched whole as well."""
    ours = trainer(tiny_model(), ranks=Ranks.joined(), micro_batch_tokens=60)
    wire = Wire(ours.ranks, partial(RankRowsPublisher, bucket_bytes=BUCKET, quiet_seconds=0.02, dtype=torch.bfloat16))
    stub = StubVllm(named_tensors(tiny_model()), workers=2)
    reader = BroadcastReceiver()
    coming = list[tuple[Any, Mapping[str, Tensor]]]()

    def whole() -> dict[str, Tensor]:
        tensors = named_tensors(ours.model)
        into = {} if ours.ranks.rank else {name: torch.empty(t.shape, dtype=torch.bfloat16) for name, t in tensors.items()}
        collect(tensors, into, ours.ranks, dtype=torch.bfloat16)
        return into

    def main(server: Served | None) -> None:
        for version in range(1, 5):
            ours.step(batch(seed=version, version=version - 1, num_groups=3))
            if server is not None and coming:
                update, expected = coming[-1]
                update.result(60)
                assert stub.holds(expected)
            wire.publisher.release(version - 1)
            manifest = wire.publisher.publish(version, named_tensors(ours.model))
            assert len(wire.publisher._held[version].data) < 0.7 * extent(manifest.tensors), "no rank has all of it"
            expected = whole()
            if server is None:
                continue
            specs = layout(named_shapes(expected))
            data = torch.zeros(extent(specs), dtype=torch.uint8)
            for spec in specs:
                data[spec.offset : spec.offset + spec.num_bytes].copy_(expected[spec.name].reshape(-1).view(torch.uint8))
            assert manifest.fingerprint == device_fingerprint(specs, data), "the fingerprint of the same version on one rank"
            if version % 2 == 0:
                got = as_tensors(manifest.tensors, reader.fetch(manifest))
                assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
            coming.append((server.update(manifest), expected))
        if server is not None:
            update, expected = coming[-1]
            update.result(60)
            assert stub.holds(expected)
        dist.barrier()  # the others have to be there until the last version has gone
        wire.publisher.close()

    if ours.ranks.rank == 0:
        with serving(stub) as server:
            main(server)
    else:
        main(None)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_send_their_own_rows_beside_their_steps_and_no_rank_has_all_of_a_version(size: int, tmp_path: Path) -> None:
    in_processes(stepping_and_sending, size, tmp_path)


class Rows:
    """Stands for a tensor of FSDP2 whose rows are on our second device, which has no FSDP2."""

    def __init__(self, whole: Tensor, rank: int, size: int, device: torch.device) -> None:
        self.shape, self.dtype = whole.shape, whole.dtype
        each = -(-whole.shape[0] // size)
        self.first = min(rank * each, whole.shape[0])
        self.local = whole[self.first : self.first + each].contiguous().to(device)
        self._whole = whole.to(device)

    def is_floating_point(self) -> bool:
        return True

    def full_tensor(self) -> Tensor:
        return self._whole


def sending_from_the_device(_: Path) -> None:
    device, ranks = here(), Ranks.joined()
    rank_rows.DTensor = Rows  # pyright: ignore[reportAttributeAccessIssue]
    rank_rows.own_rows = lambda tensor, _: (tensor.local, tensor.first)  # pyright: ignore[reportAttributeAccessIssue]
    made = partial(RankRowsPublisher, device=device, backend="cpu:gloo,second:gloo", bucket_bytes=BUCKET, quiet_seconds=0.02)
    wire = Wire(ranks, made)
    first = {name: tensor.detach() for name, tensor in named_tensors(tiny_model()).items()}
    stub = StubVllm(first, workers=2, device=device)

    def main(server: Served | None) -> None:
        for version in (1, 2):
            whole = {name: tensor * (1 + version) for name, tensor in first.items()}
            rows: dict[str, Any] = {name: Rows(tensor, ranks.rank, ranks.size, device) for name, tensor in whole.items()}
            crossed.clear()
            manifest = wire.publisher.publish(version, rows)
            if server is not None:
                server.update(manifest).result(60)
            dist.barrier()
            assert (crossed.to_host, crossed.from_host) == (0, 0)
            assert server is None or stub.holds(whole)
            wire.publisher.release(version)

    if ranks.rank == 0:
        with serving(stub) as server:
            main(server)
    else:
        main(None)


def test_versions_of_two_ranks_reach_two_workers_through_no_host_memory(tmp_path: Path) -> None:
    """Counted on our second device, in the process of each rank: no proof of NCCL."""
    in_processes(sending_from_the_device, 2, tmp_path)
