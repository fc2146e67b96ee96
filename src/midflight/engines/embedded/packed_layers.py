"""Linear layers over copies of their weights in oneDNN's own order, on CPUs.

A product of a few rows reads the weights of a layer once, and does little else. oneDNN's order is
that in which they are multiplied: such a product takes 0.55 to 0.9 of the time that MKL takes for
weights as they lie in memory (2 to 32 rows, AVX2 and AVX-512; `benchmarks/NOTES.md`). The copy
takes as many bytes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from midflight.models.adapters import adapter_name
from midflight.models.sizes import PACKED_AT_LEAST, PACKED_AT_MOST

_ROWS = 32
"""The number of rows that weights are packed for. Other numbers are multiplied almost as fast."""
_TOLERANCE = 1e-4
"""Largest difference between the two ways to multiply, as a share of the largest number. Rounding
makes a hundredth of it.
"""
_onednn: Any = torch.ops.mkldnn
"""The operators that torch's own compiler multiplies with on a CPU. They are private:
`_packing_is_right` tries them.
"""
_packing: Any = getattr(_onednn, "_reorder_linear_weight", None)
_multiplying: Any = getattr(_onednn, "_linear_pointwise", None)

Packs = Mapping[str, Tensor]
"""Copies of weights in oneDNN's order, by the names of the parameters."""


@dataclass(slots=True, eq=False)
class _PackedLayer:
    """Computes a layer in place of its own `forward`."""

    layer: nn.Linear
    packed: Tensor

    def __call__(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]. One row is multiplied as ever: MKL takes no longer for it."""
        if input.numel() == input.shape[-1]:
            return linear(input, self.layer.weight, self.layer.bias)
        return _multiplied(input, self.packed, self.layer.bias)


class PackedLayers:
    """The layers of a model that are worth packing. Their weights may be replaced, with their packs
    (`use`), but nobody writes to them: a pack does not see it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers: dict[str, list[_PackedLayer]] = {}
        """The layers of each parameter, by its name in `named_tensors`: several if they share it."""
        weights = _weights_to_pack(model)
        if not weights or not _packing_is_right(next(iter(weights.values()))):
            return
        packs = {name: _packed(weight) for name, weight in weights.items()}
        names = {id(weight): name for name, weight in weights.items()}
        for layer in _linear_layers(model):
            name = names.get(id(layer.weight))
            if name is None:
                continue
            computed = _PackedLayer(layer, packs[name])
            layer.forward = computed
            self._layers.setdefault(name, []).append(computed)

    def packs(self, tensors: Mapping[str, Tensor]) -> Packs:
        """The packs of those tensors that layers multiply with. Any thread may make them, beside
        decoding.
        """
        return {name: _packed(tensors[name]) for name in self._layers.keys() & tensors.keys()}

    def use(self, packs: Packs) -> Packs:
        """Multiplies with these packs from now on, and returns those that they replace."""
        replaced: dict[str, Tensor] = {}
        for name, packed in packs.items():
            for computed in self._layers[name]:
                replaced[name] = computed.packed
                computed.packed = packed
        return replaced


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers that multiply as torch's own linear layer does, and not as a class of it may."""
    return [module for module in model.modules() if type(module) is nn.Linear]


def _weights_to_pack(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of linear layers that are worth it. Adapters are small, and are not packed."""
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if num_bytes > PACKED_AT_MOST:
        return {}
    multiplied = {id(layer.weight) for layer in _linear_layers(model)}
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        is_base = adapter_name(name) is None
        if is_base and id(parameter) in multiplied and _is_worth_it(parameter):
            weights[name] = parameter
    return weights


def _is_worth_it(weight: Tensor) -> bool:
    is_multiplied_by_mkl = weight.device.type == "cpu" and weight.dtype == torch.float32
    return is_multiplied_by_mkl and weight.numel() >= PACKED_AT_LEAST


@torch.inference_mode()
def _packed(weight: Tensor) -> Tensor:
    return _packing(weight.detach(), _ROWS)


def _multiplied(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return _multiplying(x, packed, bias, "none", [], "")


@torch.inference_mode()
def _packing_is_right(weight: Tensor) -> bool:
    """True if this torch packs on this processor, and multiplies with the pack as with the weight.
    Both are tried with two rows and with more than the weight is packed for.
    """
    if _packing is None or _multiplying is None or not torch.backends.mkldnn.is_available():
        return False
    draw = torch.Generator().manual_seed(0)
    for rows in (2, _ROWS + 3):
        x = torch.randn(rows, weight.shape[1], generator=draw)
        expected = linear(x, weight)
        try:
            found = _multiplied(x, _packed(weight), None)
        except RuntimeError:
            return False
        largest = float(expected.abs().max())
        if float((found - expected).abs().max()) > _TOLERANCE * largest:
            return False
    return True
