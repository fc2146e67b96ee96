"""The output layer without its logits: log-probabilities of given tokens, in memory that does not grow with the vocabulary.

Logits are made for a few predictions at a time, read, and forgotten; the backward makes them again. At most `CHUNK` of them exist
at once, whatever the vocabulary and the number of predictions.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK = 2**24
"""Logits in memory at once: 64 MiB in float32. Smaller reads the layer's weights more often, larger gains little."""


def token_scores(
    hidden: Float[Tensor, "k H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " k"],
    *,
    temperature: float,
    with_entropy: bool = False,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"] | None]:
    """log softmax(z / temperature) at the targets, and the entropy of that distribution in nats where it is asked for; z = hidden weight^T + bias.

    In float32 (float64 for float64 inputs), with gradients of both for hidden, weight and bias.
    """
    rows = max(1, chunk // weight.shape[0])
    scores = cast("tuple[Tensor, Tensor]", _TokenScores.apply(hidden, weight, bias, targets, temperature, with_entropy, rows))
    return scores[0], scores[1] if with_entropy else None


class _TokenScores(torch.autograd.Function):
    """With p = softmax(z): d log p_t / dz = onehot_t - p, and dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, entropy: bool, rows: int
    ):
        precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        chosen = hidden.new_empty(len(targets), dtype=precise)
        total, entropies = torch.empty_like(chosen), torch.zeros_like(chosen)
        kept: Tensor | None = None
        for part in _parts(len(targets), rows):
            z = _logits(hidden[part], weight, bias, temperature, precise)
            chosen[part] = z.gather(-1, targets[part, None]).squeeze(-1)
            total[part] = z.logsumexp(-1)
            if entropy:
                p = (z - total[part, None]).exp_()
                entropies[part] = total[part] - p.mul_(z).sum(-1)
            kept = z
        ctx.temperature, ctx.entropy, ctx.rows = temperature, entropy, rows
        whole = kept if len(targets) <= rows and any(ctx.needs_input_grad[:3]) else None
        """One chunk was enough: its logits are within the bound, and need not be made again."""
        ctx.save_for_backward(hidden, weight, bias, targets, total, entropies, whole)
        return chosen - total, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        hidden, weight, bias, targets, total, entropies, whole = ctx.saved_tensors
        by_logprob, by_entropy = gradients
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        precise = total.dtype
        hidden_gradient = torch.empty_like(hidden) if to_hidden else None
        weight_gradient = torch.zeros(weight.shape, dtype=precise, device=weight.device) if to_weight else None
        bias_gradient = torch.zeros(bias.shape, dtype=precise, device=bias.device) if to_bias else None
        for part in _parts(len(targets), ctx.rows):
            z = _logits(hidden[part], weight, bias, ctx.temperature, precise) if whole is None else whole
            log_p = z - total[part, None]
            dz = log_p.exp()
            if ctx.entropy:
                slope = by_entropy[part, None] * (log_p + entropies[part, None])
                dz *= -(by_logprob[part, None] + slope)
            else:
                dz *= -by_logprob[part, None]
            dz.scatter_add_(-1, targets[part, None], by_logprob[part, None])
            dz = (dz / ctx.temperature).to(hidden.dtype) if ctx.temperature != 1 else dz.to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient[part] = dz @ weight
            if weight_gradient is not None:
                _add_product(weight_gradient, dz.t(), hidden[part])
            if bias_gradient is not None:
                bias_gradient += dz.sum(0)
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None else bias_gradient.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, dtype: torch.dtype) -> Tensor:
    z = torch.nn.functional.linear(hidden, weight, bias).to(dtype)
    return z if temperature == 1 else z.div_(temperature)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b. Without another tensor of the size of `total`, which is the layer's, where the precisions allow it."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _parts(count: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
