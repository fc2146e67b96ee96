"""Our side of the steps of `training.py`, in a process of its own.

python -m sides.trainer_steps FOLDER OUT STEPS [OPTION ...]
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.processes import peak_mib, reset_peak, resident_mib
from harness.rounds import Meter
from torch.utils._python_dispatch import TorchDispatchMode

from midflight.config import load_config
from midflight.config.sections import Config
from midflight.models.load import load_model
from midflight.run.replay.fingerprints import served_fingerprint
from midflight.trainer.optimizer import named_parameters
from midflight.trainer.trainer import PolicyTrainer, trainer_of
from midflight.types import (
    GroupKey,
    PackedBatch,
    RolloutKey,
    Row,
    Segment,
    Trajectory,
)
from midflight.types.digests import NOTHING, StepChain, rollout_digest, turn_digest
from midflight.types.rollouts import TurnRecord


@dataclass(frozen=True)
class Laid:
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, given: object) -> object:
        """Anything but a tensor stands for itself."""
        if isinstance(given, torch.Tensor):
            return cls(tuple(given.shape), given.stride())
        return given

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride).normal_()


@dataclass(frozen=True)
class Product:
    """One matrix product, without its numbers."""

    func: Any
    arguments: tuple[object, ...]

    def made(self) -> Callable[[], object]:
        """The same product of random numbers, to be done again."""
        arguments: list[object] = []
        for each in self.arguments:
            arguments.append(each.made() if isinstance(each, Laid) else each)
        return partial(self.func, *arguments)


class Products(TorchDispatchMode):
    """Counts the matrix products of what runs meanwhile, to do them again alone: the floor of its
    time. Those inside attention are told apart.
    """

    KINDS = frozenset(
        {
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
            torch.ops.aten.addmm_.default,
            torch.ops.aten.bmm.default,
            torch.ops.aten.baddbmm.default,
        }
    )
    ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def __init__(self) -> None:
        super().__init__()
        self.linear: Counter[Product] = Counter()
        self.attention: Counter[Product] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in self.KINDS:
            self.linear[Product(func, tuple(Laid.of(given) for given in args))] += 1
        elif func.overloadpacket is self.ATTENTION:
            self.attention.update(_inside_attention(args[0], args[1]))
        elif func.overloadpacket is self.ATTENTION_BACKWARD:
            self.attention.update(_inside_attention(args[1], args[2], backward=True))
        return func(*args, **(kwargs or {}))


def _inside_attention(
    query: torch.Tensor, key: torch.Tensor, *, backward: bool = False
) -> list[Product]:
    """Q K^T and P V; of the backward Q K^T again, dO V^T, and the products with P and dS that give
    dV, dQ and dK. Whole, not the causal half.
    """
    rows, heads, queries, size = query.shape
    keys = key.shape[2]
    num = rows * heads
    q = Laid((num, queries, size), (queries * size, size, 1))
    k = Laid((num, keys, size), (keys * size, size, 1))
    k_turned = Laid((num, size, keys), (keys * size, 1, size))
    p = Laid((num, queries, keys), (queries * keys, keys, 1))
    p_turned = Laid((num, keys, queries), (queries * keys, 1, keys))
    bmm = torch.bmm
    if not backward:
        return [Product(bmm, (q, k_turned)), Product(bmm, (p, k))]
    return [
        Product(bmm, (q, k_turned)),
        Product(bmm, (q, k_turned)),
        Product(bmm, (p_turned, q)),
        Product(bmm, (p, k)),
        Product(bmm, (p_turned, q)),
    ]


def main(folder: Path, out: Path, steps: int, options: list[str]) -> None:
    torch.set_num_threads(1)
    shape = json.loads((folder / "shape.json").read_text())
    trainer = _trainer(folder, options, longest=shape["longest"])
    batch = _batch(folder, shape)
    meter = Meter()
    loaded = resident_mib()
    reset_peak()

    def save(*_: object) -> None:
        _save_gradient(trainer, out.with_suffix(".npz"))

    saving = trainer.optimizer.register_step_pre_hook(save)
    tokens = 0.0
    for _ in range(steps):
        current = _of_version(batch, trainer.version)
        meter.begin()
        report = trainer.step(current)
        meter.end()
        saving.remove()
        tokens = report.num_tokens
    peak = peak_mib()
    with Products() as products:
        trainer.step(_of_version(batch, trainer.version))
    fingerprint = partial(served_fingerprint, trainer.model, _config(options, shape["longest"]))
    meter.write(
        out,
        digests=_cpu_of(partial(_digests, batch), times=steps),
        fingerprint=_cpu_of(fingerprint, times=steps),
        peak_mib=peak,
        loaded_mib=loaded,
        tokens=tokens,
        floor=_cpu_of_products(products.linear, times=steps),
        attention=_cpu_of_products(products.attention, times=steps),
    )


def _cpu_of_products(products: Counter[Product], *, times: int) -> list[float]:
    """CPU seconds of all of them, each kind done once for each of the times."""
    totals = [0.0] * times
    for product, count in products.items():
        again = product.made()
        again()
        for number, seconds in enumerate(_cpu_of(again, times=times)):
            totals[number] += count * seconds
    return totals


def _cpu_of(deed: Callable[[], object], *, times: int) -> list[float]:
    meter = Meter()
    for _ in range(times):
        meter.begin()
        deed()
        meter.end()
    return meter.cpu


def _of_version(batch: PackedBatch, version: int) -> PackedBatch:
    """The batch, as if it had been sampled by that version."""
    return replace(batch, train_version=version, versions=np.full_like(batch.versions, version))


def _digests(batch: PackedBatch) -> None:
    """All digests of the tokens of a step: those of answers and rollouts, which a gateway makes,
    and those of the batch and the step.
    """
    for number, (start, end) in enumerate(pairwise(batch.row_offsets.tolist())):
        place = slice(start, end)
        mask = batch.loss_mask[place]
        first = int(mask.argmax())
        ids = batch.token_ids[place]
        logprobs = batch.logprobs[place]
        made = turn_digest(
            NOTHING,
            tail=ids[:first].tobytes(),
            output=ids[first:].tobytes(),
            logprobs=logprobs[first:].tobytes(),
            segments=(Segment(0, 0, 0, len(ids) - first),),
            conditions=b"",
        )
        versions = (batch.versions[place], batch.kv_versions[place])
        record = TurnRecord(0, first, len(ids), b"", made)
        row = Row(ids, mask, mask, logprobs, *versions, records=(record,))
        key = RolloutKey(GroupKey(0, number), 0)
        rollout_digest(Trajectory(key, "task", "source", 0.5, (row,)), {}, {})
    StepChain().stepped(1, batch, weights="", skipped=False, metrics={})


def _config(options: list[str], longest: int) -> Config:
    defaults = [
        "trainer.learning_rate=1e-5",
        "trainer.warmup_steps=0",
        f"environment.max_tokens={longest}",
    ]
    return load_config(None, [*defaults, f"model.max_context={4 * longest}", *options])


def _trainer(folder: Path, options: list[str], *, longest: int) -> PolicyTrainer:
    config = _config(options, longest)
    return trainer_of(config, load_model(folder, dtype="float32"))


def _batch(folder: Path, shape: dict[str, Any]) -> PackedBatch:
    data = np.load(folder / "batch.npz")
    group_size = shape["group_size"]
    size = shape["num_groups"] * group_size
    answers = np.split(data["completions"], np.cumsum(data["lengths"])[:-1])
    rows: list[list[int]] = []
    for number, answer in enumerate(answers):
        rows.append([*data["prompts"][number // group_size], *answer])
    mask = np.concatenate([np.arange(len(row)) >= shape["prompt"] for row in rows])
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[mask] = data["logprobs"]
    return PackedBatch(
        lease=1,
        train_version=0,
        token_ids=np.concatenate(rows).astype(np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=np.zeros(len(mask), np.int32),
        kv_versions=np.zeros(len(mask), np.int32),
        row_offsets=np.cumsum([0, *map(len, rows)]).astype(np.int32),
        row_rollout=np.arange(size, dtype=np.int32),
        rewards=data["rewards"],
        rollout_group=(np.arange(size) // group_size).astype(np.int32),
        truncated=np.zeros(size, np.bool_),
    )


def _save_gradient(trainer: PolicyTrainer, path: Path) -> None:
    gradients: dict[str, np.ndarray] = {}
    for name, parameter in named_parameters(trainer.model):
        if parameter.grad is not None:
            gradients[name] = parameter.grad.numpy()
    np.savez(path, allow_pickle=False, **gradients)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
