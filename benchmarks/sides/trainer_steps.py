"""Our side of the steps of `training.py`, in a process of its own.

python -m sides.trainer_steps FOLDER OUT STEPS [OPTION ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.processes import peak_mib, reset_peak, resident_mib
from harness.rounds import Meter
from torch.utils._python_dispatch import TorchDispatchMode

from midflight.config import load_config
from midflight.models.load import load_model
from midflight.trainer.optimizer import named_parameters
from midflight.trainer.trainer import PolicyTrainer, trainer_of
from midflight.types import PackedBatch
from midflight.types.digests import StepChain


class Products(TorchDispatchMode):
    """The matrix products of what runs meanwhile, to do them again alone: the floor of its time.
    Those inside attention are told apart.
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
        self.linear: list[Callable[[], object]] = []
        self.attention: list[Callable[[], object]] = []
        self._made: dict[tuple[int, torch.Size, tuple[int, ...]], torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in self.KINDS:
            again = [self._like(at, given) for at, given in enumerate(args)]
            self.linear.append(partial(func, *again))
        elif func.overloadpacket is self.ATTENTION:
            self.attention += self._of_attention(*args[:3])
        elif func.overloadpacket is self.ATTENTION_BACKWARD:
            self.attention += self._of_attention(*args[1:4], backward=True)
        return func(*args, **(kwargs or {}))

    def _of_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, backward: bool = False
    ) -> list[Callable[[], object]]:
        """Q K^T and P V; of the backward Q K^T again, dO V^T, and the products with P and dS that
        give dV, dQ and dK. Whole, not the causal half.
        """
        groups = query.shape[1] // key.shape[1]
        q = query.flatten(0, 1)
        k = key.repeat_interleave(groups, 1).flatten(0, 1)
        v = value.repeat_interleave(groups, 1).flatten(0, 1)
        p = torch.randn(*q.shape[:2], k.shape[1])
        if not backward:
            return [partial(torch.bmm, q, k.mT), partial(torch.bmm, p, v)]
        return [
            partial(torch.bmm, q, k.mT),
            partial(torch.bmm, q, v.mT),
            partial(torch.bmm, p.mT, q),
            partial(torch.bmm, p, k),
            partial(torch.bmm, p.mT, q),
        ]

    def _like(self, at: int, given: Any) -> Any:
        """A tensor that lies as this one does, and the same for all that do."""
        if not isinstance(given, torch.Tensor):
            return given
        key = at, given.shape, given.stride()
        if key not in self._made:
            self._made[key] = torch.empty_strided(given.shape, given.stride()).normal_()
        return self._made[key]


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
    digests = partial(StepChain().stepped, 1, batch, weights="", skipped=False, metrics={})
    meter.write(
        out,
        digests=_cpu_of_all([digests], times=steps),
        peak_mib=peak,
        loaded_mib=loaded,
        tokens=tokens,
        floor=_cpu_of_all(products.linear, times=steps),
        attention=_cpu_of_all(products.attention, times=steps),
    )


def _cpu_of_all(deeds: list[Callable[[], object]], *, times: int) -> list[float]:
    meter = Meter()
    for _ in range(times):
        meter.begin()
        for deed in deeds:
            deed()
        meter.end()
    return meter.cpu


def _of_version(batch: PackedBatch, version: int) -> PackedBatch:
    """The batch, as if it had been sampled by that version."""
    return replace(batch, train_version=version, versions=np.full_like(batch.versions, version))


def _trainer(folder: Path, options: list[str], *, longest: int) -> PolicyTrainer:
    defaults = [
        "trainer.learning_rate=1e-5",
        "trainer.warmup_steps=0",
        f"environment.max_tokens={longest}",
    ]
    config = load_config(None, [*defaults, f"model.max_context={4 * longest}", *options])
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
