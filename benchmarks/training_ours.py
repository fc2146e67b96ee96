"""Our side of `training.py`, a process of its own: the trainer's steps on a written batch."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training_both import Meter, peak_mib, reset_peak, resident_mib

from midflight.config import load_config
from midflight.models.load import load_model
from midflight.trainer.step import named_parameters
from midflight.trainer.trainer import PolicyTrainer, trainer_of
from midflight.types import PackedBatch


def main(folder: Path, out: Path, steps: int, options: list[str]) -> None:
    torch.set_num_threads(1)
    shape = json.loads((folder / "shape.json").read_text())
    trainer, batch, meter = _trainer(folder, options, longest=shape["longest"]), _batch(folder, shape), Meter()
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
    meter.write(out, peak_mib=peak_mib(), loaded_mib=before, tokens=tokens)


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
