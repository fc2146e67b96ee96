"""A decoder of a plain family, forward and backward by hand: the matrix products, with as little as
possible between them.

With modules, a third of a step's time on a CPU goes into passes over memory: norms, rotations,
gates, their backwards, and new memory for each. Here a layer is two functions around its attention,
each with its own backward:

- `_Heads`: RMS norm, the product that makes queries, keys and values, norms of their heads if
  the family has them, rotation;
- `_Feed`: the result of attention added to the input, RMS norm, SwiGLU (Touvron et al. 2023, section
  2.2).

The scale of a norm is multiplied into the weights behind it, which are fewer than the numbers it
would be multiplied with. Rotation is one product of complex numbers: weights lie so that the two
numbers that turn together are neighbours, which changes no score. Between two products the work
goes through a few rows at a time, which fit into a core's cache.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import embedding, silu
from transformers import PreTrainedModel

from midflight.models.plain import is_plain, sides_of
from midflight.trainer.model.attention import packed_runs, ragged_attention
from midflight.trainer.model.microbatch import MicroBatch

_CACHED = 2**16
"""The numbers in a piece of rows. About six such pieces are in use at once, and they fit into a
core's second cache, of 2 MiB or more.
"""


def can_be_plain(model: PreTrainedModel) -> bool:
    """True if this module computes the model. The model must be of a plain family in which all
    numbers of a head are turned. It must be in float32, because in their norms modules round other
    precisions.
    """
    if not is_plain(model) or model.dtype != torch.float32:
        return False
    decoder: Any = model.base_model
    num_turned = 2 * len(decoder.rotary_emb.inv_freq)
    return num_turned == decoder.layers[0].self_attn.head_dim


class PlainDecoder:
    """Reads the modules' own parameters, and leaves gradients in them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder: Any = model.base_model
        config: Any = model.config
        self._window_of_all: int | None = None
        if config.model_type == "mistral":
            self._window_of_all = config.sliding_window
        self._eps = float(self._decoder.norm.variance_epsilon)

    def hidden(self, micro: MicroBatch) -> Float[Tensor, "k H"]:
        """The last hidden states, at the predictions."""
        decoder = self._decoder
        x = embedding(micro.input_ids[0], decoder.embed_tokens.weight)
        cos, sin = decoder.rotary_emb(x, micro.position_ids)
        half = cos.shape[-1] // 2
        turn = torch.complex(cos[0, :, :half], sin[0, :, :half])[:, None]
        with packed_runs(micro.runs):
            for layer in decoder.layers:
                x = self._through(layer, x, turn)
        last = cast(Tensor, _Normed.apply(x.index_select(0, micro.inputs), self._eps))
        return last * decoder.norm.weight

    def _through(
        self, layer: Any, x: Float[Tensor, "N H"], turn: Complex[Tensor, "N 1 d"]
    ) -> Float[Tensor, "N H"]:
        attention = layer.self_attn
        size = attention.head_dim
        qkv, out, gate_up, down = sides_of(layer)
        num_heads = len(qkv[0].weight) // size
        num_kv_heads = len(qkv[1].weight) // size
        weight, bias = _joined(qkv, layer.input_layernorm, turned=size)
        scale = _scales(attention, heads=num_heads, kv_heads=num_kv_heads)
        x, q, k, v = _Heads.apply(x, weight, bias, scale, turn, self._eps, num_kv_heads)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        window = getattr(attention, "sliding_window", self._window_of_all)
        attended, _ = ragged_attention(
            attention, q, k, v, None, scaling=attention.scaling, sliding_window=window
        )
        weight, bias = _joined(gate_up, layer.post_attention_layernorm)
        found = _Feed.apply(
            x,
            attended[0].flatten(1),
            out[0].weight,
            out[0].bias,
            weight,
            bias,
            down[0].weight,
            down[0].bias,
            self._eps,
        )
        return cast(Tensor, found)


def _joined(
    products: list[Any], norm: Any, *, turned: int | None = None
) -> tuple[Float[Tensor, "F H"], Float[Tensor, " F"] | None]:
    """Weight and bias of one product that does all of these, behind a norm. `turned` is the size of
    heads, and then all products but the last one are turned.
    """
    weights: list[Tensor] = [product.weight for product in products]
    biases: list[Tensor] = [product.bias for product in products if product.bias is not None]
    weight = cast(Tensor, _JoinedWeights.apply(norm.weight, turned, *weights))
    if not biases:
        return weight, None
    return weight, torch.cat(_ordered(biases, turned))


class _JoinedWeights(torch.autograd.Function):
    """Weights one after the other, each column times the norm's scale. It keeps only tensors for
    the backward that are in memory anyway.
    """

    @staticmethod
    def forward(ctx: Any, scale: Tensor, turned: int | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(scale, *weights)
        ctx.turned = turned
        return torch.cat(_ordered(weights, turned)).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        scale, *weights = ctx.saved_tensors
        by_scale = torch.zeros_like(scale)
        parts = given[0].split([len(weight) for weight in weights])
        for part, weight in zip(parts, _ordered(weights, ctx.turned), strict=True):
            by_scale += (part * weight).sum(0)
        by_weights = [part * scale for part in parts]
        if ctx.turned is not None:
            by_weights[:-1] = [_unpaired(rows, ctx.turned) for rows in by_weights[:-1]]
        return by_scale, None, *by_weights


def _ordered(weights: Sequence[Tensor], turned: int | None) -> list[Tensor]:
    """The weights with their rows paired, all but the last one, if heads of size `turned` turn."""
    ordered = list(weights)
    if turned is not None:
        ordered[:-1] = [_paired(rows, turned) for rows in weights[:-1]]
    return ordered


def _paired(rows: Tensor, size: int) -> Tensor:
    """Puts the rows 0, 1, ... 2d - 1 of each head in the order 0, d, 1, d + 1, ..., so that rows
    that turn together are neighbours.
    """
    return rows.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)


def _unpaired(rows: Tensor, size: int) -> Tensor:
    """The inverse of `_paired`."""
    return rows.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2)


def _scales(attention: Any, *, heads: int, kv_heads: int) -> Float[Tensor, "h D"] | None:
    """The scale of the norm of each head of queries and keys, if there are such norms."""
    if not hasattr(attention, "q_norm"):
        return None
    of_queries = _paired(attention.q_norm.weight, attention.head_dim).expand(heads, -1)
    of_keys = _paired(attention.k_norm.weight, attention.head_dim).expand(kv_heads, -1)
    return torch.cat([of_queries, of_keys])


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor, as many as are computed together. The size of a row is taken
    from the first tensor.
    """
    first = tensors[0]
    rows = len(first)
    if first.device.type == "cpu":
        rows = _CACHED * torch.get_num_threads() // max(1, first[:1].numel())
    return zip(*(tensor.split(max(1, rows)) for tensor in tensors), strict=True)


# --- Norms ----------------------------------------------------------------------------------------


def _normed(x: Tensor, out: Tensor, inverse: Tensor, *, eps: float) -> None:
    """x / sqrt(mean x^2 + eps) over the last dimension (Zhang and Sennrich 2019, eq. 4) into `out`,
    and 1 / sqrt(...) into `inverse`.
    """
    length = vector_norm(x, dim=-1, keepdim=True)
    torch.rsqrt(length.square_().div_(x.shape[-1]).add_(eps), out=inverse)
    torch.mul(x, inverse, out=out)


def _norm_backward(by_normed: Tensor, normed: Tensor) -> Tensor:
    """r dL/dx = dL/dy - y mean(y dL/dy) for y = x / r, in place of dL/dy."""
    along = (by_normed * normed).sum(-1, keepdim=True)
    return by_normed.addcmul_(normed, along, value=-1 / normed.shape[-1])


def _all_normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed = torch.empty_like(x)
    inverse = x.new_empty(len(x), 1)
    for part in _pieces(x, normed, inverse):
        _normed(*part, eps=eps)
    return normed, inverse


def _all_backward(by_normed: Tensor, normed: Tensor, inverse: Tensor, added: Tensor) -> Tensor:
    """`added` plus the gradient of the numbers before the norm. `by_normed` is overwritten, and is
    the result.
    """
    for by, part, factor, more in _pieces(by_normed, normed, inverse, added):
        torch.addcmul(more, _norm_backward(by, part), factor, out=by)
    return by_normed


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        normed, inverse = _all_normed(x, eps)
        ctx.save_for_backward(normed, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        normed, inverse = ctx.saved_tensors
        found = given[0].clone()
        for by, part, factor in _pieces(found, normed, inverse):
            _norm_backward(by, part).mul_(factor)
        return found, None


# --- Before attention -----------------------------------------------------------------------------


class _Heads(torch.autograd.Function):
    """x [N, H] -> x, queries [N, heads, D], keys and values [N, kv_heads, D]. It gives x again so
    that its gradient is added to here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        turn: Tensor,
        eps: float,
        kv_heads: int,
    ) -> tuple[Tensor, ...]:
        normed, inverse = _all_normed(x, eps)
        size = 2 * turn.shape[-1]
        qkv = _product(normed, weight, bias).unflatten(1, (-1, size))
        turned = qkv[:, :-kv_heads]
        heads = inverses = None
        if scale is not None:
            heads = torch.empty_like(turned)
            inverses = turned.new_empty(*turned.shape[:2], 1)
            for part, normed_part, inverse_part in _pieces(turned, heads, inverses):
                _normed(part, normed_part, inverse_part, eps=eps)
                torch.mul(normed_part, scale, out=part)
        for part, angle in _pieces(turned, turn):
            _complex(part).mul_(angle)
        ctx.save_for_backward(normed, inverse, weight, scale, turn, heads, inverses)
        ctx.has_bias = bias is not None
        return x, turned[:, :-kv_heads], turned[:, -kv_heads:], qkv[:, -kv_heads:]

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        normed, inverse, weight, scale, turn, heads, inverses = ctx.saved_tensors
        by_x, by_q, by_k, by_v = given
        by_qkv = by_q.new_empty(len(by_q), by_q.shape[1] + 2 * by_k.shape[1], by_q.shape[2])
        by_scale = None if scale is None else torch.zeros_like(scale)
        kept = () if scale is None else (heads, inverses)
        for part, angle, q, k, v, *was in _pieces(
            by_qkv, turn.conj_physical(), by_q, by_k, by_v, *kept
        ):
            part = torch.cat((q, k, v), 1, out=part)[:, : -v.shape[1]]
            _complex(part).mul_(angle)
            if by_scale is not None and scale is not None:
                by_scale += (part * was[0]).sum(0)
                _norm_backward(part.mul_(scale), was[0]).mul_(was[1])
        by_qkv = by_qkv.flatten(1)
        by_weight = by_qkv.t() @ normed
        by_bias = by_qkv.sum(0) if ctx.has_bias else None
        return (
            _all_backward(by_qkv @ weight, normed, inverse, by_x),
            by_weight,
            by_bias,
            by_scale,
            None,
            None,
            None,
        )


def _complex(heads: Tensor) -> Tensor:
    return torch.view_as_complex(heads.unflatten(-1, (-1, 2)))


# --- After attention ------------------------------------------------------------------------------


class _Feed(torch.autograd.Function):
    """x [N, H] and the result of attention [N, heads D] -> [N, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        attended: Tensor,
        out: Tensor,
        out_bias: Tensor | None,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        x = torch.addmm(x if out_bias is None else x + out_bias, attended, _turned(out, len(x)))
        normed, inverse = _all_normed(x, eps)
        both = _product(normed, gate_up, gate_up_bias)
        inner = _gated(both)
        ctx.save_for_backward(attended, out, normed, inverse, gate_up, both, down)
        ctx.biases = (out_bias is not None, gate_up_bias is not None, down_bias is not None)
        return torch.addmm(x if down_bias is None else x + down_bias, inner, _turned(down, len(x)))

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        attended, out, normed, inverse, gate_up, both, down = ctx.saved_tensors
        (by_end,) = given
        by_both, inner = _gated_backward(by_end @ down, both)
        by_down = by_end.t() @ inner
        del inner
        by_gate_up = by_both.t() @ normed
        by_x = _all_backward(by_both @ gate_up, normed, inverse, by_end)
        has_out_bias, has_gate_up_bias, has_down_bias = ctx.biases
        return (
            by_x,
            by_x @ out,
            by_x.t() @ attended,
            by_x.sum(0) if has_out_bias else None,
            by_gate_up,
            by_both.sum(0) if has_gate_up_bias else None,
            by_down,
            by_end.sum(0) if has_down_bias else None,
            None,
        )


def _gated(both: Float[Tensor, "N 2I"]) -> Float[Tensor, "N I"]:
    """silu(gate) up."""
    inner = both.new_empty(len(both), both.shape[1] // 2)
    for out, gate, up in _pieces(inner, *both.chunk(2, -1)):
        torch.mul(silu(gate), up, out=out)
    return inner


def _gated_backward(
    by_inner: Float[Tensor, "N I"], both: Float[Tensor, "N 2I"]
) -> tuple[Float[Tensor, "N 2I"], Float[Tensor, "N I"]]:
    """Puts the gradient of gate and up in their place, and silu(gate) up again in the place of
    `by_inner`. Writing them elsewhere takes a third longer.

    With s = sigmoid(gate) and silu = gate s: d silu / d gate = s + silu (1 - s).
    """
    for by, gate, up in _pieces(by_inner, *both.chunk(2, -1)):
        sigmoid = torch.sigmoid(gate)
        opened = gate * sigmoid
        by_opened = by * up
        inner = opened * up
        torch.mul(by, opened, out=up)
        slope = torch.addcmul(opened, opened, sigmoid, value=-1).add_(sigmoid)
        torch.mul(by_opened, slope, out=gate)
        by.copy_(inner)
    return both, by_inner


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    turned = _turned(weight, len(x))
    return torch.mm(x, turned) if bias is None else torch.addmm(bias, x, turned)


def _turned(weight: Float[Tensor, "out in"], rows: int) -> Float[Tensor, "in out"]:
    """The transposed weight. It is transposed in memory too if there are many rows: MKL's product
    is a tenth faster then, which pays for the copy.
    """
    return weight.t() if rows < 1024 else weight.t().contiguous()
