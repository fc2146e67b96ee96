"""The matrix products of a plain family, over weights as they lie in memory or packed in oneDNN's
own order.

A packed product of few rows takes two thirds of the time, because weights are read in the order in
which they are multiplied (measured on AVX-512, 1 to 64 rows by 576 x 3072: 0.55 to 0.75 of MKL's).
The pack is a copy and takes as many bytes again.

A step multiplies four times in each layer, so `of` and `added` are functions of torch that hold the
weights already, and no Python runs between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from midflight.models.names import side_by_side

_ROWS = 32
"""The number of rows that weights are packed for. Other numbers are multiplied almost as fast."""
_TOLERANCE = 1e-4
"""Largest difference between the two ways to multiply, as a share of the largest number. Rounding
makes a hundredth of it.
"""


class Product(Protocol):
    """x W + b, with W of the shape [in, out]."""

    @property
    def of(self) -> Callable[[Tensor], Tensor]:
        """x -> x W + b."""
        ...

    @property
    def added(self) -> Callable[[Tensor, Tensor], Tensor]:
        """y, x -> y + x W + b."""
        ...


@dataclass(slots=True, eq=False)
class PlainProduct:
    """A product over weights as they lie in memory. It sees every later write to them."""

    weight: Tensor
    """[in, out]"""
    bias: Tensor | None
    of: Callable[[Tensor], Tensor] = field(init=False)
    added: Callable[[Tensor, Tensor], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        if self.bias is None:
            self.of = partial(torch.mm, mat2=self.weight)
            self.added = partial(torch.addmm, mat2=self.weight)
        else:
            self.of = partial(torch.addmm, self.bias, mat2=self.weight)
            self.added = partial(_added_to_both, bias=self.bias, weight=self.weight)

    @classmethod
    def joined(cls, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> PlainProduct:
        """One product of all these weights, which lie side by side."""
        weight = side_by_side(weights, turned=not weights[0].is_contiguous())
        assert weight is not None, "they were put together before"
        return cls(weight.t(), side_by_side(biases) if biases else None)


def _added_to_both(to: Tensor, x: Tensor, *, bias: Tensor, weight: Tensor) -> Tensor:
    return torch.addmm(to + bias, x, weight)


@dataclass(slots=True, eq=False)
class PackedProduct:
    """A product over a copy in oneDNN's own order. The copy does not see later writes to the
    weights.
    """

    packed: Tensor
    bias: Tensor | None
    of: Callable[[Tensor], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.of = partial(
            _multiplying, W=self.packed, B=self.bias, attr="none", scalars=[], algorithm=""
        )

    @classmethod
    def joined(cls, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> PackedProduct:
        """One product of all these weights, wherever they lie."""
        weight = side_by_side(weights)
        if weight is None:
            weight = torch.cat(list(weights))
        return cls(_packing(weight, _ROWS), torch.cat(list(biases)) if biases else None)

    def added(self, to: Tensor, x: Tensor) -> Tensor:
        return _multiplying.binary(x, to, self.packed, self.bias, "add")


_onednn: Any = torch.ops.mkldnn
"""The operators that torch's own compiler multiplies with on a CPU. They are private:
`packing_is_right` tries them.
"""
_packing: Any = getattr(_onednn, "_reorder_linear_weight", None)
_multiplying: Any = getattr(_onednn, "_linear_pointwise", None)


@torch.inference_mode()
def packing_is_right(weights: Sequence[Tensor]) -> bool:
    """True if this torch packs on this processor, and multiplies with the pack as with these
    weights. Both are tried with one row and with several.
    """
    if _packing is None or _multiplying is None or not torch.backends.mkldnn.is_available():
        return False
    draw = torch.Generator().manual_seed(0)
    plain = torch.cat(list(weights)).t()
    for rows in (1, _ROWS + 3):
        x = torch.randn(rows, len(plain), generator=draw)
        to = torch.randn(rows, plain.shape[1], generator=draw)
        expected = torch.addmm(to, x, plain)
        try:
            packed = PackedProduct.joined(weights, ())
            found = packed.added(to, x), to + packed.of(x)
        except RuntimeError:
            return False
        largest = float(expected.abs().max())
        for each in found:
            if float((each - expected).abs().max()) > _TOLERANCE * largest:
                return False
    return True
