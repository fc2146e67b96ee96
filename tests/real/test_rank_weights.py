"""T2, T3: any number of ranks takes the step of one. Gloo processes on the CPU, in double precision."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.trainer.fixtures import batch, exact_norm, tiny_model, trainer
from tests.weights.test_broadcast import asking, joined
from torch.distributed.tensor import DTensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from midflight.config.loss import CorrectionSection, ObjectiveSection
from midflight.models.names import as_tensors, named_tensors
from midflight.trainer.credit import Scoring
from midflight.trainer.critic import Valuation
from midflight.trainer.model.rank_buckets import collect
from midflight.trainer.model.ranks import Ranks
from midflight.trainer.objective import Objective
from midflight.types import WeightManifest
from midflight.weights.manifest import extent
from midflight.weights.transports.broadcast import BroadcastPublisher
from midflight.weights.transports.process_group import BroadcastReceiver

LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}, {}),
    "beyond tokens": (
        {"kind": "gspo", "kl_coefficient": 0.1, "entropy_coefficient": 0.01},
        {"weight": "tis_sequence", "self_normalised": True, "m2po": 0.2},
        {"updates_per_step": 2, "activation_checkpointing": True},
    ),
    "critic": (
        {"advantage": "gae"},
        {},
        {"scoring": Scoring("gae"), "valuation": Valuation(trace_decay=0.9), "updates_per_step": 2, "activation_checkpointing": True},
    ),
}


def steps(name: str, ranks: Ranks) -> tuple[torch.Tensor, list[dict[str, float]]]:
    """The weights after three steps of AdamW, whole, and what the steps reported."""
    first, second, options = LOSSES[name]
    objective = Objective.of(ObjectiveSection.model_validate(first), CorrectionSection.model_validate(second))
    model = tiny_model()
    ours = trainer(model, objective, ranks=ranks, micro_batch_tokens=60, learning_rate=1e-2, weight_decay=0.1, **options)
    metrics = [dict(ours.step(batch(seed=version, version=version, num_groups=3)).metrics) for version in range(3)]
    whole = (t.full_tensor() if isinstance(t, DTensor) else t for t in named_tensors(model).values())
    return torch.cat([t.detach().flatten() for t in whole]), metrics


def one_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    Qwen3RMSNorm.forward = exact_norm  # type: ignore[method-assign]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        torch.save({name: steps(name, Ranks.joined()) for name in LOSSES}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_several_ranks_reach_the_weights_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3RMSNorm, "forward", exact_norm)
    size = 3
    multiprocessing.set_forkserver_preload([__name__])  # imports once for all ranks
    mp.start_processes(one_rank, args=(size, str(tmp_path)), nprocs=size, start_method="forkserver")
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for name in LOSSES:
        weights, metrics = steps(name, Ranks())
        for found, reported in (result[name] for result in results):
            assert float((found - weights).norm() / weights.norm()) < 1e-12
            for ours, theirs in zip(reported, metrics, strict=True):
                assert ours.keys() == theirs.keys()
                same = ours.keys() - {"step/micro_batches"}
                assert [ours[k] for k in sorted(same)] == pytest.approx([theirs[k] for k in sorted(same)], rel=1e-9, abs=1e-12)


DEADLINE = 3.0
"""Seconds, of a bucket: what a server that stops costs the others."""


def broken_off(manifest: WeightManifest, *, stops: bool) -> None:
    """A server's worker that gets one bucket, and then is killed, or stands still past the deadline."""
    with asking(manifest) as connection:
        group = joined(connection)
        group.broadcast(torch.empty(min(group.terms.bucket_bytes, extent(manifest.tensors)), dtype=torch.uint8))
        if stops:
            time.sleep(2 * DEADLINE)
        group.close()


def with_a_server_that_fails(rank: int, size: int, folder: str) -> None:
    """Steps and gathers of all ranks go on while each version is on its way; of the third and of the fifth a receiver fails in mid-update."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    ours = trainer(tiny_model(), ranks=Ranks.joined(), micro_batch_tokens=60)
    coming = list[tuple[WeightManifest, dict[str, torch.Tensor], Future[Any]]]()
    with (
        BroadcastPublisher(bucket_bytes=4096, num_slots=8, quiet_seconds=0.2, deadline_seconds=DEADLINE) as sender,
        ThreadPoolExecutor(2) as others,
    ):
        server = BroadcastReceiver()
        for version in range(1, 7):
            ours.step(batch(seed=version, version=version - 1, num_groups=3))
            tensors = named_tensors(ours.model)
            whole = {} if rank else {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
            collect(tensors, whole, ours.ranks)
            if rank == 0:
                fails = version in (3, 5)
                manifest = replace(sender.publish(version, whole), receivers=1 + fails)
                copied = {name: tensor.detach().clone() for name, tensor in whole.items()}
                coming.append((manifest, copied, others.submit(server.fetch, manifest)))
                if fails:
                    others.submit(broken_off, manifest, stops=version == 5)
        for manifest, expected, fetched in coming:
            got = as_tensors(manifest.tensors, fetched.result(60))
            assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
        assert rank or sender.service.num_groups >= 3, "two of them broke"
    dist.destroy_process_group()


def test_i7_no_order_of_steps_gathers_and_broadcasts_hangs_three_ranks_where_a_server_fails_in_mid_update(tmp_path: Path) -> None:
    multiprocessing.set_forkserver_preload([__name__])
    mp.start_processes(with_a_server_that_fails, args=(3, str(tmp_path)), nprocs=3, start_method="forkserver")
