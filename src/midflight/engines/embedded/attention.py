"""Keys and values of running sequences, one slot each, and attention over them, plugged into `transformers` through its interface."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from midflight.errors import NotSupported


class KvCache:
    """Two tensors per layer, [slots, kv_heads, context, head_dim], made at the first write and grown by doubling.

    Heads and sizes are learned from the first keys a layer writes, so any attention shape fits. Entries past a sequence's length
    are finite garbage: they are masked, and a masked value must not be NaN because 0 * NaN is NaN.
    """

    def __init__(self, *, max_slots: int, max_context: int) -> None:
        self._max_slots, self._max_context = max_slots, max_context
        self._slots = 0
        self.context = 0
        """Positions a slot has room for now."""
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def reserve(self, *, slots: int, context: int) -> None:
        """Makes room for `slots` sequences of `context` tokens."""
        if slots <= self._slots and context <= self.context:
            return
        self._slots = max(self._slots, min(self._max_slots, max(slots, 2 * self._slots)))
        self.context = max(self.context, min(self._max_context, max(context, 2 * self.context, 32)))
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
        return like.new_zeros(self._slots, like.shape[0], self.context, like.shape[-1])

    def _grown(self, old: Tensor) -> Tensor:
        slots, heads, context, size = old.shape
        new = old.new_zeros(self._slots, heads, self.context, size)
        new[:slots, :, :context] = old
        return new


def slot_rows(slots: Tensor, positions: Tensor, *, num_heads: int, context: int) -> Tensor:
    """Rows for `KvCache.write`, head-major: row(h, n) = (slot_n * num_heads + h) * context + position_n."""
    heads = torch.arange(num_heads, device=slots.device)[:, None]
    return ((slots * num_heads + heads) * context + positions).reshape(-1)


ATTENTION: Final = "midflight_slots"
"""Name under which `transformers` finds `slot_attention`."""
_UNKNOWN: Final = ("softcap", "s_aux")
"""Options that change the attention weights themselves; ignoring one would serve another model."""


@dataclass(slots=True, eq=False)
class Bucket:
    """Sequences [b] of about equal query length, attended together as [b, Q] queries over [b, K] keys.

    Its tokens are [start, end) of the flattened step. Only queries are padded here; linear layers never see padding. `rows` and
    `picks` are `None` where the queries are the tokens in order.
    """

    slots: Tensor | slice
    positions: Tensor
    """[b, Q] of the queries."""
    start: int
    end: int
    num_keys: int
    rows: Tensor | None = None
    """[b * Q] the token (from `start`) of each query."""
    picks: Tensor | None = None
    """[end - start] the query of each token."""
    masks: dict[int | None, Tensor] = field(default_factory=dict[int | None, Tensor])
    """By window, made by the first layer of a step that asks for it."""

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[b, 1, Q, K]: 0 where a query may look (keys up to its own position, at most `window` of them), -inf elsewhere."""
        keys = torch.arange(self.num_keys, device=self.positions.device)
        hidden = keys > self.positions[..., None]
        if window is not None:
            hidden |= keys <= self.positions[..., None] - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return mask[:, None]


@dataclass(slots=True, eq=False)
class StepPlaces:
    """Where the N tokens of a step live, and how they attend; the same for all layers."""

    cache: KvCache
    slots: Tensor
    """[N]"""
    positions: Tensor
    """[N]"""
    buckets: list[Bucket]
    rows: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """For `KvCache.write`, by the number of key heads, made by the first layer of a step that has so many."""


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    midflight_step: StepPlaces | None = None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    """Query, key and value are [1, heads, N, D] over the flattened tokens of a step; returns [1, N, heads, D].

    Outside an engine step the model attends as it does with `sdpa`, so that the same model also trains and evaluates.
    """
    if midflight_step is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **options)  # pyright: ignore[reportArgumentType]
    for name in _UNKNOWN:
        if options.get(name) is not None:
            raise NotSupported(
                f"running the model: its attention uses {name!r}, which the embedded engine does not compute. Use another model or engine."
            )
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    step, num_heads = midflight_step, key.shape[1]
    if num_heads not in step.rows:
        step.rows[num_heads] = slot_rows(step.slots, step.positions, num_heads=num_heads, context=step.cache.context)
    step.cache.write(layer, key[0], value[0], rows=step.rows[num_heads])
    queries, outputs = query[0].transpose(0, 1), list[Tensor]()
    for bucket in step.buckets:
        outputs.append(_attend(queries[bucket.start : bucket.end], layer, step.cache, bucket, scaling=scaling, window=sliding_window))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _attend(queries: Tensor, layer: int, cache: KvCache, bucket: Bucket, *, scaling: float | None, window: int | None) -> Tensor:
    if bucket.rows is not None:
        queries = queries[bucket.rows]
    if window not in bucket.masks:
        bucket.masks[window] = bucket.mask(window, queries.dtype)
    keys, values = cache.read(layer, bucket.slots, length=bucket.num_keys)
    mask = bucket.masks[window]
    num, length = bucket.positions.shape
    heads, kv_heads = queries.shape[1], keys.shape[1]
    if length == 1:
        # The query heads that share a key head stand where queries stand: no key is repeated.
        grouped = queries.reshape(num, kv_heads, heads // kv_heads, -1)
        mask = mask.expand(-1, -1, heads // kv_heads, -1)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling).reshape(num, heads, -1)
    else:
        split = queries.reshape(num, length, heads, -1).transpose(1, 2)
        out = scaled_dot_product_attention(split, keys, values, attn_mask=mask, scale=scaling, enable_gqa=heads != kv_heads)
        out = out.transpose(1, 2).reshape(num * length, heads, -1)
    return out if bucket.picks is None else out[bucket.picks]


AttentionInterface.register(ATTENTION, slot_attention)
# Used only outside engine steps: a step passes a mask of four dimensions, which transformers leaves as it is.
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
