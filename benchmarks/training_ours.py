"""Our side of `training.py`, a process of its own: the trainer's steps on a written batch."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training_both import Meter, peak_mib, reset_peak, resident_mib

from midflight.config import load_config
from midflight.models.load import load_model
from midflight.trainer.step import named_parameters
from midflight.trainer.trainer import PolicyTrainer, trainer_of
from midflight.types import PackedBatch


class Products(TorchDispatchMode):
    """The matrix products of what runs meanwhile, to do them again alone: the floor of its time."""

    KINDS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default})

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[Any, list[tuple[torch.Size, tuple[int, ...]]]]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.KINDS:
            self._seen.append((func, [(tensor.shape, tensor.stride()) for tensor in args if isinstance(tensor, torch.Tensor)]))
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def again(self) -> None:
        """The same products in the same order, of tensors that lie as those did."""
        made: dict[tuple[int, torch.Size, tuple[int, ...]], torch.Tensor] = {}
        for func, tensors in self._seen:
            for at, (size, stride) in enumerate(tensors):
                if (at, size, stride) not in made:
                    made[at, size, stride] = torch.empty_strided(size, stride).normal_()
            func(*(made[at, size, stride] for at, (size, stride) in enumerate(tensors)))


def main(folder: Path, out: Path, steps: int, options: list[str]) -> None:
    torch.set_num_threads(1)
    shape = json.loads((folder / "shape.json").read_text())
    trainer, batch, meter, floor = _trainer(folder, options, longest=shape["longest"]), _batch(folder, shape), Meter(), Meter()
    before = resident_mib()
    reset_peak()

    def save(*_: object) -> None:
        _save_gradient(trainer, out.with_suffix(".npz"))

    saving = trainer.optimizer.register_step_pre_hook(save)
    tokens = 0.0
    for _ in range(steps):
        now = trainer.version
        current = replace(batch, train_version=now, versions=np.full_like(batch.versions, now))
        meter.begin()
        report = trainer.step(current)
        meter.end()
        saving.remove()
        tokens = report.num_tokens
    peak = peak_mib()
    with Products() as products:
        trainer.step(replace(batch, train_version=trainer.version, versions=np.full_like(batch.versions, trainer.version)))
    for _ in range(steps):
        floor.begin()
        products.again()
        floor.end()
    meter.write(out, peak_mib=peak, loaded_mib=before, tokens=tokens, floor=floor.cpu)


def _trainer(folder: Path, options: list[str], *, longest: int) -> PolicyTrainer:
    config = load_config(None, ["trainer.learning_rate=1e-5", "trainer.warmup_steps=0", f"environment.max_tokens={longest}", *options])
    return trainer_of(config, load_model(folder, dtype="float32"))


def _batch(folder: Path, shape: dict[str, Any]) -> PackedBatch:
    data, size = np.load(folder / "batch.npz"), shape["num_groups"] * shape["group_size"]
    rows = [
        [*data["prompts"][i // shape["group_size"]], *answer]
        for i, answer in enumerate(np.split(data["completions"], np.cumsum(data["lengths"])[:-1]))
    ]
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
        rollout_group=np.repeat(np.arange(shape["num_groups"]), shape["group_size"]).astype(np.int32),
        truncated=np.zeros(size, np.bool_),
    )


def _save_gradient(trainer: PolicyTrainer, path: Path) -> None:
    np.savez(path, allow_pickle=False, **{name: p.grad.numpy() for name, p in named_parameters(trainer.model) if p.grad is not None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
