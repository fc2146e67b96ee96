"""AdamW with decay on matrices only, a step that is refused when a gradient is not finite, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim import AdamW


@dataclass(frozen=True, slots=True)
class Adam:
    """How gradients become steps."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """What is trained: every parameter once (tied ones under their first name), in the model's order."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def adamw(model: nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float) -> AdamW:
    """AdamW (Loshchilov and Hutter 2019). Norms and biases, which are vectors, are not decayed: to shrink a scale is not to regularise."""
    matrices = [p for _, p in named_parameters(model) if p.ndim > 1]
    vectors = [p for _, p in named_parameters(model) if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas, fused=True)


def clear_gradients(model: nn.Module) -> None:
    """Sets every gradient to zeros, not to None: a parameter that a batch does not reach still decays its moments."""
    for _, parameter in named_parameters(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def clipped_step(optimizer: AdamW, *, learning_rate: float, max_norm: float) -> float:
    """Clips gradients to an L2 norm and steps. Returns the norm before clipping; if it is not finite nothing is changed."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if not bool(norm.isfinite()):
        return float(norm)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    return float(norm)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up to 1, then `constant`, or down to 0 at `total_steps` along a line or half a cosine."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 1

    def factor(self, step: int) -> float:
        """The share for step 0, 1, 2, ...; the first step of a warm-up of w is 1 / w, the last before the end is above 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        left = self.total_steps - self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / left) if left > 0 else 0.0
        match self.kind:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - progress
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * progress))
