"""AdamW with decay on matrices only. It refuses a gradient that is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import AdamW


@dataclass(frozen=True, slots=True)
class Adam:
    """The options that turn gradients into steps."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are trained, each once (tied ones under their first name), in the model's
    order.
    """
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def adamw(
    model: nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> AdamW:
    """AdamW (Loshchilov and Hutter 2019). Norms and biases, which are vectors, are not decayed: to
    shrink a scale is not to regularise.
    """
    matrices = [p for _, p in named_parameters(model) if p.ndim > 1]
    vectors = [p for _, p in named_parameters(model) if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return AdamW(filled, lr=learning_rate, betas=betas, fused=True)


def clear_gradients(model: nn.Module) -> None:
    """Sets every gradient to zeros, not to None: a parameter that a batch does not reach still
    decays its moments.
    """
    for _, parameter in named_parameters(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def clipped_step(optimizer: AdamW, *, learning_rate: float, max_norm: float) -> float:
    """Clips gradients to an L2 norm and steps. Returns the norm before clipping.

    Nothing is changed if the norm is not finite. Nothing is changed if it is 0 either: a batch that
    says nothing, with all advantages 0 or all tokens masked, must not move the weights by the
    momentum of earlier ones and by decay.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if not bool(norm.isfinite()) or not bool(norm):
        return float(norm)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    return float(norm)
