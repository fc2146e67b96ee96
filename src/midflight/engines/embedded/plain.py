"""Forward passes of plain families (`models.plain`) by hand: the matrix products (`products`), and
as little as possible between them.

The trial at load time (`probe`) compares this way with the model's own forward before it serves
anything. Products of one input are one product: their weights lie one after the other in memory,
and the parameters of the model are views of that.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import embedding, silu
from transformers import PreTrainedModel

from midflight.engines.embedded.attention import STEP, Reach, StepPlaces, attend
from midflight.engines.embedded.products import (
    PackedProduct,
    PlainProduct,
    Product,
    packing_is_right,
)
from midflight.engines.embedded.runner import Runner
from midflight.errors import NotSupported
from midflight.models.names import put_together
from midflight.models.plain import parts_of, sides_of
from midflight.models.sizes import PACKED_BYTES, TURNED_BYTES

Ints = NDArray[np.int64]


class _Layer(NamedTuple):
    """The weights of a layer, as they are multiplied."""

    first_norm: Tensor
    qkv: Product
    """hidden to (heads + 2 kv_heads) head_dim"""
    out: Product
    """heads head_dim to hidden"""
    second_norm: Tensor
    gate_up: Product
    """hidden to 2 inner"""
    down: Product
    """inner to hidden"""
    reach: Reach


class _Side(NamedTuple):
    """The names of the parameters that are multiplied as one."""

    weights: list[str]
    biases: list[str]


class _PackedWeights(NamedTuple):
    """The products of a set of weights, and the addresses of these weights in memory."""

    pointers: list[int]
    layers: list[list[PackedProduct]]
    """Four products for each layer, in the order of `_Layer`."""
    head: PackedProduct


class PlainRunner(Runner):
    """A `Runner` for models that are plain."""

    def __init__(
        self, model: PreTrainedModel, *, max_running: int, max_context: int, packs: bool = False
    ) -> None:
        """With `packs` the weights may be replaced but are never written to, so that products may
        use copies of them. The copies of a version are made when it is laid out, beside decoding.
        """
        super().__init__(model, max_running=max_running, max_context=max_context)
        self._decoder: Any = model.model
        self._embedding = self._decoder.embed_tokens.weight
        self._last_norm = self._decoder.norm.weight
        attentions = [layer.self_attn for layer in self._decoder.layers]
        self._norms: list[Tensor] = []
        """The norms of queries and keys of each layer, in turn. Empty if the family has none."""
        for attention in attentions:
            if "q_norm" in parts_of(attention):
                self._norms.append(attention.q_norm.weight)
                self._norms.append(attention.k_norm.weight)
        self._parameters = dict(model.named_parameters())
        self._named = {id(parameter): name for name, parameter in self._parameters.items()}
        self._sides: list[list[_Side]] = []
        """Four sides for each layer, in the order of `_Layer`."""
        for layer in self._decoder.layers:
            self._sides.append([self._side(products) for products in sides_of(layer)])
        self._head_side = self._side([model.lm_head])
        self._ahead: _PackedWeights | None = None
        """The products of weights that were laid out and are not used yet."""
        self._used: _PackedWeights | None = None
        """The products of the weights that are served."""
        self._replaced: _PackedWeights | None = None
        """The products of the weights before. They are freed later, because giving memory back
        takes longer than a swap may.
        """
        num_bytes = sum(parameter.nbytes for parameter in self._parameters.values())
        multiplies_by_mkl = self.device.type == "cpu" and model.dtype == torch.float32
        self._turns_weights = multiplies_by_mkl and num_bytes <= TURNED_BYTES
        may_pack = packs and multiplies_by_mkl and TURNED_BYTES < num_bytes <= PACKED_BYTES
        self._packs = may_pack and self._packing_is_right()
        first = attentions[0]
        self._size = int(first.head_dim)
        self._scale = float(first.scaling)
        self._heads = len(first.q_proj.weight) // self._size
        self._kv_heads = len(first.k_proj.weight) // self._size
        self._eps = torch.tensor(self._decoder.norm.variance_epsilon, device=self.device)
        self._which_norm = torch.tensor(
            [0] * self._heads + [1] * self._kv_heads, device=self.device
        )
        self._turns = (torch.empty(0), torch.empty(0))
        self._turned(32)
        self._lay_out()

    def laid_out(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Packs the weights that are used as one. Without `packs` it lays them side by side, and
        transposes them where that is faster.
        """
        if self._packs:
            self._replaced = None
            self._ahead = self._packed(tensors)
            return tensors
        for side in itertools.chain.from_iterable(self._sides):
            for names in (side.weights, side.biases):
                if not names:
                    continue
                group = [tensors[name] for name in names]
                turned = self._turns_weights and group[0].ndim == 2
                tensors.update(zip(names, put_together(group, turned=turned), strict=True))
        return tensors

    @torch.no_grad()
    def _packed(self, tensors: Mapping[str, Tensor]) -> _PackedWeights:
        def product(side: _Side) -> PackedProduct:
            weights = [tensors[name] for name in side.weights]
            biases = [tensors[name] for name in side.biases]
            return PackedProduct.joined(weights, biases)

        pointers = [tensors[name].data_ptr() for name in self._parameters]
        layers: list[list[PackedProduct]] = []
        for sides in self._sides:
            layers.append([product(side) for side in sides])
        return _PackedWeights(pointers, layers, product(self._head_side))

    def _logits(self, tokens: Tensor, positions: Tensor, last: Ints) -> Tensor:
        step = STEP.get()
        assert step is not None
        # Tensors of a device without addresses all say 0, so that a move is not seen there.
        moved = not any(self._pointers) or self._pointers != self._places()
        packed_anew = self._ahead is not None and self._ahead.pointers == self._pointers
        if moved or packed_anew:
            self._lay_out()
        cos, sin = self._turned(step.cache.context)
        cos = cos[positions][:, None]
        sin = sin[positions][:, None]
        norms = self._head_norms() if self._norms else [None] * len(self._layers)
        x = embedding(tokens, self._embedding)
        for number, (layer, norm) in enumerate(zip(self._layers, norms, strict=True)):
            x = self._through(x, number, layer, cos=cos, sin=sin, norm=norm, step=step)
        if len(last) != len(tokens):
            x = x[self._put(last)]
        return self._head.of(self._normed(x, self._last_norm))

    def _through(
        self,
        x: Tensor,
        number: int,
        layer: _Layer,
        *,
        cos: Tensor,
        sin: Tensor,
        norm: Tensor | None,
        step: StepPlaces,
    ) -> Tensor:
        """One layer: x [N, hidden] -> [N, hidden]. cos and sin [N, 1, head_dim], norm [heads +
        kv_heads, head_dim].
        """
        num = len(x)
        turned = self._heads + self._kv_heads
        place = (number, 0)
        qkv = layer.qkv.of(self._normed(x, layer.first_norm)).view(
            num, turned + self._kv_heads, self._size
        )
        qk = qkv[:, :turned] if norm is None else self._normed(qkv[:, :turned], norm)
        qk = torch.addcmul(qk * cos, qk.roll(self._size // 2, -1), sin)
        step.write(place, qk[:, self._heads :], qkv[:, turned:])
        attended = attend(
            qk[:, : self._heads], place, step, scale=self._scale, weighing=None, reach=layer.reach
        )
        x = layer.out.added(x, attended.reshape(num, -1))
        gate, up = layer.gate_up.of(self._normed(x, layer.second_norm)).chunk(2, -1)
        return layer.down.added(x, silu(gate).mul_(up))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """w x / sqrt(mean x^2 + eps) over the last dimension (Zhang and Sennrich 2019, eq. 4),
        rounded where `transformers` rounds.
        """
        if x.dtype != torch.float32:
            wide = x.float()
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
            return weight * normed.to(x.dtype)
        length = vector_norm(x, dim=-1, keepdim=True)
        factor = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * factor).mul_(weight)

    def _head_norms(self) -> Sequence[Tensor]:
        """The norms of each layer [heads + kv_heads, head_dim]. They are made anew for each step,
        because weights may be written to in place.
        """
        return torch.stack(self._norms).unflatten(0, (-1, 2))[:, self._which_norm].unbind()

    def _turned(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [length, head_dim] of each position, from the model's own rotary embedding.
        The sine carries the sign of its summand: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
        """
        if len(self._turns[0]) < length:
            like = torch.empty(0, dtype=self.model.dtype, device=self.device)
            places = torch.arange(length, device=self.device)
            cos, sin = (turn[0] for turn in self._decoder.rotary_emb(like, places[None]))
            if cos.shape[-1] != self._size:
                raise NotSupported(
                    f"running {self.model.config.model_type} without its modules: a part of each "
                    "head is turned, not all of it"
                )
            sin[:, : self._size // 2].neg_()
            self._turns = cos, sin
        return self._turns

    def _lay_out(self) -> None:
        """Finds the weights where they are now, and lays them out unless they were laid
        out before.
        """
        places = self._places()
        if self._ahead is None or self._ahead.pointers != places:
            with torch.inference_mode(False), torch.no_grad():
                tensors = {name: parameter.data for name, parameter in self._parameters.items()}
                for name, tensor in self.laid_out(tensors).items():
                    self._parameters[name].data = tensor
        ahead = self._ahead
        products: Sequence[Sequence[Product]]
        if ahead is None:
            products = [list(map(self._plain_product, sides)) for sides in self._sides]
            self._head: Product = self._plain_product(self._head_side)
        else:
            self._replaced = self._used
            self._used = ahead
            self._ahead = None
            products = ahead.layers
            self._head = ahead.head
        window = None
        if self.model.config.model_type == "mistral":
            window = getattr(self.model.config, "sliding_window", None)
        everywhere = Reach(window)
        self._layers: list[_Layer] = []
        for number, layer in enumerate(self._decoder.layers):
            qkv, out, gate_up, down = products[number]
            self._layers.append(
                _Layer(
                    first_norm=layer.input_layernorm.weight.data,
                    qkv=qkv,
                    out=out,
                    second_norm=layer.post_attention_layernorm.weight.data,
                    gate_up=gate_up,
                    down=down,
                    reach=self._reaches.get(number, everywhere),
                )
            )
        self._pointers = self._places()

    def _packing_is_right(self) -> bool:
        for side in self._sides[0]:
            if not packing_is_right([self._parameters[name] for name in side.weights]):
                return False
        return True

    def _places(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._parameters.values()))

    def _side(self, products: list[Any]) -> _Side:
        weights = [self._named[id(product.weight)] for product in products]
        biases = [self._named[id(product.bias)] for product in products if product.bias is not None]
        return _Side(weights, biases)

    def _plain_product(self, side: _Side) -> PlainProduct:
        weights = [self._parameters[name].data for name in side.weights]
        biases = [self._parameters[name].data for name in side.biases]
        return PlainProduct.joined(weights, biases)
