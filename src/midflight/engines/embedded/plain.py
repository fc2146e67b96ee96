"""A hand-laid forward of the plain families, in place of their modules: the matrix products, and as little as can be between them.

Plain is a decoder whose layers are RMS norm, rotary attention of grouped heads (with or without biases, norms of queries and keys, and
windows), RMS norm, and a SwiGLU (Touvron et al. 2023, section 2.2). The load-time trial (`probe`) holds it against the model's own forward
before it serves anything. Products of one input are one product: their weights lie one after the other in memory, and the parameters of
the model are views of that.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import embedding, linear, silu
from transformers import PreTrainedModel

from midflight.engines.embedded.attention import STEP, Reach, StepPlaces, attend
from midflight.engines.embedded.runner import Ints, Runner
from midflight.errors import NotSupported
from midflight.models.names import put_together, side_by_side

FAMILIES = frozenset({"llama", "ministral", "mistral", "qwen2", "qwen3"})
"""Architectures whose code this is. Others have the same parts, and multiply something in between."""
_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def is_plain(model: PreTrainedModel) -> bool:
    """Whether the model is of a plain family, and made of its plain modules: not of adapters, for one."""
    decoder: Any = getattr(model, "model", None)
    if model.config.model_type not in FAMILIES or _parts(model) != {"model", "lm_head"} or _parts(decoder) != _DECODER:
        return False
    return type(decoder.embed_tokens) is nn.Embedding and type(model.lm_head) is nn.Linear and all(map(_is_plain_layer, decoder.layers))


def _is_plain_layer(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    if _parts(layer) != _LAYER or _parts(attention) - {"q_norm", "k_norm"} != _ATTENTION or _parts(mlp) != _MLP:
        return False
    products: list[Any] = [
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    ]
    if not all(type(product) is nn.Linear for product in products):
        return False
    with_bias = [product.bias is not None for product in products]
    alike = len(set(with_bias[:3])) == len(set(with_bias[4:6])) == 1
    return alike and type(mlp.act_fn).__name__.startswith("SiLU")


def _parts(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


class _Layer(NamedTuple):
    """Weights as they are used. What is multiplied by `addmm` is transposed."""

    first_norm: Tensor
    qkv: Tensor
    """[(heads + 2 kv_heads) head_dim, hidden]"""
    qkv_bias: Tensor | None
    out: Tensor
    """[heads head_dim, hidden]"""
    out_bias: Tensor | None
    second_norm: Tensor
    gate_up: Tensor
    """[2 inner, hidden]"""
    gate_up_bias: Tensor | None
    down: Tensor
    """[inner, hidden]"""
    down_bias: Tensor | None
    reach: Reach


class PlainRunner(Runner):
    """As `Runner`, for models that are plain."""

    def __init__(self, model: PreTrainedModel, *, max_running: int, max_context: int) -> None:
        super().__init__(model, max_running=max_running, max_context=max_context)
        self._decoder: Any = model.model
        head: Any = model.lm_head
        self._embedding, self._last_norm, self._head = (
            self._decoder.embed_tokens.weight,
            self._decoder.norm.weight,
            (head.weight, head.bias),
        )
        attentions = [layer.self_attn for layer in self._decoder.layers]
        self._norms = [part.weight for each in attentions if "q_norm" in _parts(each) for part in (each.q_norm, each.k_norm)]
        self._parameters = tuple(model.parameters())
        first = attentions[0]
        self._size, self._scale = int(first.head_dim), float(first.scaling)
        self._heads, self._kv_heads = (len(product.weight) // self._size for product in (first.q_proj, first.k_proj))
        self._eps = torch.tensor(self._decoder.norm.variance_epsilon, device=self.device)
        self._which_norm = torch.tensor([0] * self._heads + [1] * self._kv_heads, device=self.device)
        self._turns = (torch.empty(0), torch.empty(0))
        self._turned(32)
        self._lay_out()

    @property
    def together(self) -> Sequence[Sequence[str]]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [[names[id(part)] for part in group] for layer in self._decoder.layers for group in _groups(layer)]

    def _logits(self, tokens: Tensor, positions: Tensor, last: Ints) -> Tensor:
        step = STEP.get()
        assert step is not None
        if self._pointers != [parameter.data_ptr() for parameter in self._parameters]:
            self._lay_out()
        cos, sin = self._turned(step.cache.context)
        cos, sin = cos[positions][:, None], sin[positions][:, None]
        norms = self._head_norms() if self._norms else [None] * len(self._layers)
        x = embedding(tokens, self._embedding)
        for number, (layer, norm) in enumerate(zip(self._layers, norms, strict=True)):
            x = self._through(x, number, layer, cos=cos, sin=sin, norm=norm, step=step)
        if len(last) != len(tokens):
            x = x[self._put(last)]
        return linear(self._normed(x, self._last_norm), *self._head)

    def _through(self, x: Tensor, number: int, layer: _Layer, *, cos: Tensor, sin: Tensor, norm: Tensor | None, step: StepPlaces) -> Tensor:
        """One layer: x [N, hidden] -> [N, hidden]. cos and sin [N, 1, head_dim], norm [heads + kv_heads, head_dim]."""
        num, turned, place = len(x), self._heads + self._kv_heads, (number, 0)
        qkv = linear(self._normed(x, layer.first_norm), layer.qkv, layer.qkv_bias).view(num, turned + self._kv_heads, self._size)
        qk = qkv[:, :turned] if norm is None else self._normed(qkv[:, :turned], norm)
        qk = torch.addcmul(qk * cos, qk.roll(self._size // 2, -1), sin)
        step.cache.write(place, qk[:, self._heads :], qkv[:, turned:], rows=step.token_rows(self._kv_heads))
        attended = attend(qk[:, : self._heads], place, step, scale=self._scale, weighing=None, reach=layer.reach)
        x = _added(x, attended.reshape(num, -1), layer.out, layer.out_bias)
        gate, up = linear(self._normed(x, layer.second_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return _added(x, silu(gate).mul_(up), layer.down, layer.down_bias)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """w x / sqrt(mean x^2 + eps) over the last dimension (Zhang and Sennrich 2019, eq. 4), rounded where `transformers` rounds."""
        if x.dtype != torch.float32:
            wide = x.float()
            return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)).to(x.dtype)
        length = vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()).mul_(weight)

    def _head_norms(self) -> Sequence[Tensor]:
        """Of each layer [heads + kv_heads, head_dim]; made anew for each step, because weights may be written to in place."""
        return torch.stack(self._norms).unflatten(0, (-1, 2))[:, self._which_norm].unbind()

    def _turned(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [length, head_dim] of each position, from the model's own rotary embedding. The sine has the sign of what it adds:
        (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
        if len(self._turns[0]) < length:
            like, places = torch.empty(0, dtype=self.model.dtype, device=self.device), torch.arange(length, device=self.device)
            cos, sin = (turn[0] for turn in self._decoder.rotary_emb(like, places[None]))
            if cos.shape[-1] != self._size:
                raise NotSupported(
                    f"running {self.model.config.model_type} without its modules: a part of each head is turned, not all of it"
                )
            sin[:, : self._size // 2].neg_()
            self._turns = cos, sin
        return self._turns

    def _lay_out(self) -> None:
        """Finds the weights where they are now. What is used as one is put side by side unless it came so (`together`)."""
        with torch.inference_mode(False), torch.no_grad():
            for group in (group for layer in self._decoder.layers for group in _groups(layer)):
                for parameter, piece in zip(group, put_together([parameter.data for parameter in group]), strict=True):
                    parameter.data = piece
        everywhere = Reach(getattr(self.model.config, "sliding_window", None) if self.model.config.model_type == "mistral" else None)
        self._layers = [_laid(layer, self._reaches.get(number, everywhere)) for number, layer in enumerate(self._decoder.layers)]
        self._pointers = [parameter.data_ptr() for parameter in self._parameters]


def _added(x: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x + inner weight + bias."""
    return torch.addmm(x if bias is None else x + bias, inner, weight)


def _groups(layer: Any) -> list[list[nn.Parameter]]:
    """Parameters that are used as one: weights first, then biases, each of the attention's and the SwiGLU's input."""
    sides = [[layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj], [layer.mlp.gate_proj, layer.mlp.up_proj]]
    return [[product.weight for product in side] for side in sides] + [
        [product.bias for product in side] for side in sides if side[0].bias is not None
    ]


def _laid(layer: Any, reach: Reach) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _joined(mlp.gate_proj, mlp.up_proj)
    (out, out_bias), (down, down_bias) = _joined(attention.o_proj), _joined(mlp.down_proj)
    norms = layer.input_layernorm.weight.data, layer.post_attention_layernorm.weight.data
    return _Layer(norms[0], qkv, qkv_bias, out.t(), out_bias, norms[1], gate_up, gate_up_bias, down.t(), down_bias, reach)


def _joined(*products: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the product that is all of these."""
    weight = side_by_side([product.weight.data for product in products])
    biases = [product.bias.data for product in products if product.bias is not None]
    assert weight is not None, "they were put together before"
    return weight, side_by_side(biases) if biases else None
