"""A tiny model, and batches of rows as the buffer would lease them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.models import tiny
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from midflight.trainer.checkpoint import stage
from midflight.trainer.credit import Scoring
from midflight.trainer.folders import latest_checkpoint
from midflight.trainer.objective import Objective
from midflight.trainer.optimizer import Adam
from midflight.trainer.schedule import Schedule
from midflight.trainer.step import StepRules
from midflight.trainer.trainer import PolicyTrainer, Scale
from midflight.types import PackedBatch


def tiny_model(dtype: torch.dtype = torch.float64, *, seed: int = 0) -> PreTrainedModel:
    """In double precision, so that numbers may be compared closely."""
    return tiny.tiny_model(seed=seed, dtype=dtype)


def exact_norm(norm: Qwen3RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
    """RMSNorm in the precision of its input: that of `transformers` rounds to float32 inside, which lifts differences of 1e-16 to 1e-8."""
    return norm.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)


def trainer(model: PreTrainedModel, objective: Objective | None = None, **options: Any) -> PolicyTrainer:
    """Options of `Adam`, `Scale` and `StepRules` may be given beside those of `PolicyTrainer`."""
    adam = Adam(**({"learning_rate": 1e-3} | {name: options.pop(name) for name in Adam.__slots__ if name in options}))
    scale = Scale(**{name: options.pop(name) for name in Scale.__slots__ if name in options})
    rules = StepRules(**{name: options.pop(name) for name in StepRules.__slots__ if name in options})
    defaults: dict[str, Any] = {"scoring": Scoring(), "schedule": Schedule()}
    return PolicyTrainer(model, objective or Objective(), adam=adam, scale=scale, rules=rules, **(defaults | options))


def batch(*, seed: int = 0, version: int = 0, num_groups: int = 3, group_size: int = 4, longest: int = 24) -> PackedBatch:
    """Rows of a prompt and an answer; the first rollout has two rows, and its first row two separate stretches of answer."""
    draw = np.random.default_rng(seed)
    num_rollouts = num_groups * group_size
    row_rollout = np.array([0, *range(num_rollouts)], np.int32)
    lengths = draw.integers(6, longest, len(row_rollout))
    mask = [np.arange(n) >= draw.integers(2, n - 2) for n in lengths]
    mask[0][-2] = False
    num_tokens = int(lengths.sum())
    return PackedBatch(
        lease=1,
        train_version=version,
        token_ids=draw.integers(0, 262, num_tokens).astype(np.int32),
        loss_mask=np.concatenate(mask),
        logprobs=(-5.57 + draw.normal(0, 0.5, num_tokens)).astype(np.float32),
        versions=np.full(num_tokens, version, np.int32),
        kv_versions=np.full(num_tokens, version, np.int32),
        row_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        row_rollout=row_rollout,
        rewards=draw.integers(0, 3, num_rollouts).astype(np.float32),
        rollout_group=np.repeat(np.arange(num_groups), group_size).astype(np.int32),
        truncated=np.zeros(num_rollouts, np.bool_),
    )


def with_rows_in_order(source: PackedBatch, order: list[int]) -> PackedBatch:
    """The same batch with its rows laid down differently."""
    spans = [np.arange(source.row_offsets[r], source.row_offsets[r + 1]) for r in order]
    index = np.concatenate(spans)
    return replace(
        source,
        token_ids=source.token_ids[index],
        loss_mask=source.loss_mask[index],
        logprobs=source.logprobs[index],
        versions=source.versions[index],
        kv_versions=source.kv_versions[index],
        row_offsets=np.concatenate([[0], np.cumsum([len(s) for s in spans])]).astype(np.int32),
        row_rollout=source.row_rollout[order],
    )


def weights(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def save_checkpoint(root: Path, ours: PolicyTrainer, *, cursor: str, keep: int) -> Path:
    """Both parts of saving at once, where nothing goes on meanwhile. Returns the checkpoint's folder."""
    stage(ours, cursor=cursor).write(root, keep=keep)
    folder = latest_checkpoint(root)
    assert folder is not None
    return folder
