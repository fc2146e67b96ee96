"""Keys and values of running sequences, one slot each."""

from __future__ import annotations

import torch
from torch import Tensor


class KvCache:
    """Two tensors per layer, [slots, kv_heads, context, head_dim], made at the first write and grown by doubling.

    Heads and sizes are learned from the first keys a layer writes, so any attention shape fits. Entries past a sequence's length
    are finite garbage: they are masked, and a masked value must not be NaN because 0 * NaN is NaN.
    """

    def __init__(self, *, max_slots: int, max_context: int) -> None:
        self._max_slots, self._max_context = max_slots, max_context
        self._slots, self._context = 0, 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def context(self) -> int:
        """Positions a slot has room for now."""
        return self._context

    def reserve(self, *, slots: int, context: int) -> None:
        """Makes room for `slots` sequences of `context` tokens."""
        if slots <= self._slots and context <= self._context:
            return
        self._slots = max(self._slots, min(self._max_slots, max(slots, 2 * self._slots)))
        self._context = max(self._context, min(self._max_context, max(context, 2 * self._context, 32)))
        for tensors in (self._keys, self._values):
            for layer, old in tensors.items():
                tensors[layer] = self._grown(old)

    def write(self, layer: int, keys: Tensor, values: Tensor, *, rows: Tensor) -> None:
        """Stores N tokens: keys [kv_heads, N, D], values [kv_heads, N, E]. `rows` [kv_heads * N] numbers the rows of the cache seen as [slots * kv_heads * context, head_dim]."""
        if layer not in self._keys:
            self._keys[layer], self._values[layer] = self._empty(keys), self._empty(values)
        for cache, new in ((self._keys[layer], keys), (self._values[layer], values)):
            cache.view(-1, cache.shape[-1]).index_copy_(0, rows, new.reshape(-1, new.shape[-1]))

    def read(self, layer: int, slots: Tensor | slice, *, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [b, kv_heads, length, head_dim] of some slots; a view where `slots` is a slice."""
        return self._keys[layer][slots, :, :length], self._values[layer][slots, :, :length]

    def copy(self, sources: Tensor, targets: Tensor, *, length: int) -> None:
        """Copies the first `length` entries of each source slot to the target slot beside it."""
        for tensors in (self._keys, self._values):
            for cache in tensors.values():
                cache[targets, :, :length] = cache[sources, :, :length]

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._slots, like.shape[0], self._context, like.shape[-1])

    def _grown(self, old: Tensor) -> Tensor:
        slots, heads, context, size = old.shape
        new = old.new_zeros(self._slots, heads, self._context, size)
        new[:slots, :, :context] = old
        return new


def slot_rows(slots: Tensor, positions: Tensor, *, num_heads: int, context: int) -> Tensor:
    """Rows for `KvCache.write`, head-major: row(h, n) = (slot_n * num_heads + h) * context + position_n."""
    heads = torch.arange(num_heads, device=slots.device)[:, None]
    return ((slots * num_heads + heads) * context + positions).reshape(-1)
