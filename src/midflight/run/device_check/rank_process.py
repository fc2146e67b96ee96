"""One of the two ranks of a device's check.

    python -m midflight.run.device_check.rank_process RANK PORT KIND FOLDER

The first rank writes a `DeviceTrial` as JSON for each thing that both have tried, one a line.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from midflight.models.load import load_frame, load_model
from midflight.models.names import named_tensors
from midflight.run.device_check.bench import (
    SMALL,
    Bench,
    Wrong,
    batch,
    policy_trainer,
    tried,
    within,
)
from midflight.run.device_check.groups import ONE_RANK, SIZE
from midflight.run.device_check.inside import BenchWorker
from midflight.run.device_check.kernels import SAME_STEP
from midflight.run.device_check.report import DeviceTrial, TrialOutcome
from midflight.trainer.model.rank_buckets import collect
from midflight.trainer.model.ranks import Ranks, join
from midflight.trainer.trainer import PolicyTrainer
from midflight.types import WeightManifest
from midflight.weights.transports.broadcast import BroadcastPublisher
from midflight.weights.transports.direct import DirectFeed

HOST = "127.0.0.1"
BUCKET_BYTES = 2**16
"""It is small, so that the tensors of a small model take several."""


def main() -> None:
    rank = int(sys.argv[1])
    port = sys.argv[2]
    kind = sys.argv[3]
    folder = Path(sys.argv[4])
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    bench = Bench(device, folder)
    if rank == 0:
        bench.folder(SMALL)
    join(f"{HOST}:{port}", host=HOST, rank=rank, size=SIZE, device=str(device))
    dist.barrier()
    for trial in _trials(bench, Ranks.joined()):
        if rank == 0:
            sys.stdout.write(msgspec.json.encode(trial).decode() + "\n")
            sys.stdout.flush()
        elif trial.outcome is TrialOutcome.FAILED:
            raise SystemExit(f"{trial.what}: {trial.found}")
    dist.destroy_process_group()


def _trials(bench: Bench, ranks: Ranks) -> Iterator[DeviceTrial]:
    deeds: dict[str, Callable[[Bench, Ranks], str]] = {
        "sums and broadcasts between two ranks": _collectives,
        "a step of two ranks, beside that of one": _step,
        "a model that the first rank alone has loaded, shared by rows": _loaded,
        "weights put together in host memory, bucket by bucket": _collected,
        "a version from one rank to the other by the direct transport": _broadcast,
    }
    for what, deed in deeds.items():
        yield tried(what, lambda deed=deed: deed(bench, ranks), remedy=ONE_RANK)


def _collectives(bench: Bench, ranks: Ranks) -> str:
    numbers = torch.full((1000,), float(ranks.rank + 1), device=bench.device)
    ranks.sum(numbers)
    if not bool((numbers == 3).all()):
        raise Wrong(f"1 + 2 is {float(numbers[0])}")
    numbers.fill_(ranks.rank)
    dist.broadcast(numbers, 0)
    if bool(numbers.any()):
        raise Wrong("the first rank's zeros did not arrive")
    if ranks.largest(ranks.rank) != 1:
        raise Wrong("the larger of 0 and 1 is not 1")
    return "1,000 numbers"


def _whole(trainer: PolicyTrainer) -> Tensor:
    parts: list[Tensor] = []
    for tensor in named_tensors(trainer.model).values():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        parts.append(whole.detach().cpu().double().flatten())
    return torch.cat(parts)


def _step(bench: Bench, ranks: Ranks) -> str:
    alone = policy_trainer(bench.model(SMALL), SMALL)
    before = _whole(alone)
    alone.step(batch(SMALL, 0))
    together = policy_trainer(bench.model(SMALL), SMALL, ranks=ranks)
    together.step(batch(SMALL, 0))
    apart = _whole(together) - _whole(alone)
    share = float(apart.norm() / (_whole(alone) - before).norm())
    return within(share, SAME_STEP, "of the step apart")


def _loaded(bench: Bench, ranks: Ranks) -> str:
    folder = bench.folder(SMALL)
    if ranks.is_first:
        model = load_model(folder, dtype="float32")
    else:
        model = load_frame(folder, dtype="float32")
    trainer = policy_trainer(model, SMALL, ranks=ranks, device=bench.device)
    expected = policy_trainer(bench.model(SMALL), SMALL, ranks=ranks)
    found = _whole(trainer)
    if not torch.equal(found, _whole(expected)):
        raise Wrong("the weights are not those of the folder")
    return f"{len(found):,} weights, equal to the bit"


def _collected(bench: Bench, ranks: Ranks) -> str:
    trainer = policy_trainer(bench.model(SMALL), SMALL, ranks=ranks)
    tensors = named_tensors(trainer.model)
    into: dict[str, Tensor] = {}
    if ranks.is_first:
        into = {name: torch.empty(t.shape, dtype=torch.bfloat16) for name, t in tensors.items()}
    collect(tensors, into, ranks, dtype=torch.bfloat16, bucket_bytes=BUCKET_BYTES)
    expected = _whole(trainer).to(torch.bfloat16)
    if ranks.is_first and not torch.equal(
        torch.cat([t.flatten() for t in into.values()]), expected
    ):
        raise Wrong("they are not the ranks' own")
    return f"{len(expected):,} weights, in buckets of {BUCKET_BYTES // 1024} KB"


def _broadcast(bench: Bench, ranks: Ranks) -> str:
    """Rank 0 publishes, and a worker in rank 1 receives, in a group of their own. On GPUs the bytes
    go from one to the other.
    """
    tensors = named_tensors(bench.model(SMALL, seed=1))
    told = torch.zeros(2**16, dtype=torch.uint8)
    if ranks.is_first:
        with BroadcastPublisher(HOST, device=bench.device, bucket_bytes=BUCKET_BYTES) as publisher:
            words = msgspec.json.encode(publisher.publish(1, tensors))
            told[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
            dist.broadcast(told, 0)
            dist.barrier()
        return f"{sum(tensor.nbytes for tensor in tensors.values()) / 1e6:.1f} MB"
    dist.broadcast(told, 0)
    manifest = msgspec.json.decode(told.numpy().tobytes().rstrip(b"\0"), type=WeightManifest)
    worker = BenchWorker(bench.model(SMALL))
    try:
        asyncio.run(DirectFeed().bring(manifest, worker))
    finally:
        dist.barrier()
    worker.buffer.take(1)
    found = named_tensors(worker.model)
    if not all(torch.equal(found[name], tensor) for name, tensor in tensors.items()):
        raise Wrong("what came is not what was sent")
    return "received"


if __name__ == "__main__":
    main()
