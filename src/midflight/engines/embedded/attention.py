"""Keys and values of running sequences, one slot each, and attention over them, plugged into `transformers` through its interface."""

from __future__ import annotations

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


ATTENTION: Final = "midflight_slots"
"""Name under which `transformers` finds `slot_attention`."""


class Bucket:
    """Sequences [b] of about equal query length, attended together as [b, Q] queries over [b, K] keys.

    Its tokens are [start, end) of the flattened step. Only queries are padded here; linear layers never see padding.
    """

    def __init__(
        self, slots: Tensor | slice, positions: Tensor, *, start: int, end: int, num_keys: int, rows: Tensor | None, picks: Tensor | None
    ) -> None:
        """`positions` [b, Q] of the queries. `rows` [b * Q]: the token (from `start`) of each query; `picks` [end - start]: the query of each token.

        Both are `None` where the queries are the tokens in order.
        """
        self.slots, self.positions, self.rows, self.picks = slots, positions, rows, picks
        self.start, self.end, self.num_keys = start, end, num_keys
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[b, 1, Q, K]: 0 where a query may look (keys up to its own position, at most `window` of them), -inf elsewhere; made once per step."""
        if window not in self._masks:
            keys = torch.arange(self.num_keys, device=self.positions.device)
            hidden = keys > self.positions[..., None]
            if window is not None:
                hidden |= keys <= self.positions[..., None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._masks[window] = mask[:, None]
        return self._masks[window]


class StepTokens:
    """Where the N tokens of a step live, and how they attend; the same for all layers."""

    def __init__(self, cache: KvCache, *, slots: Tensor, positions: Tensor, buckets: list[Bucket]) -> None:
        self.cache, self.buckets = cache, buckets
        self._slots, self._positions = slots, positions
        self._rows: dict[int, Tensor] = {}

    def rows(self, num_heads: int) -> Tensor:
        if num_heads not in self._rows:
            self._rows[num_heads] = slot_rows(self._slots, self._positions, num_heads=num_heads, context=self.cache.context)
        return self._rows[num_heads]


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    midflight_step: StepTokens | None = None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    """Query, key and value are [1, heads, N, D] over the flattened tokens of a step; returns [1, N, heads, D].

    Outside an engine step the model attends as it does with `sdpa`, so that the same model also trains and evaluates.
    """
    if midflight_step is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **options)  # pyright: ignore[reportArgumentType]
    _refuse(options)
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    step = midflight_step
    step.cache.write(layer, key[0], value[0], rows=step.rows(key.shape[1]))
    queries = query[0].transpose(0, 1)
    outputs = [_attend(queries[b.start : b.end], layer, step, b, scaling=scaling, window=sliding_window) for b in step.buckets]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _attend(queries: Tensor, layer: int, step: StepTokens, bucket: Bucket, *, scaling: float | None, window: int | None) -> Tensor:
    if bucket.rows is not None:
        queries = queries[bucket.rows]
    keys, values = step.cache.read(layer, bucket.slots, length=bucket.num_keys)
    mask = bucket.mask(window, queries.dtype)
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


def _refuse(options: dict[str, object]) -> None:
    """Attention variants that change the weights themselves; ignoring one would serve another model."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise NotSupported(
                f"running the model: its attention uses {name!r}, which the embedded engine does not compute. Use another model or engine."
            )


AttentionInterface.register(ATTENTION, slot_attention)
# Used only outside engine steps: a step passes a mask of four dimensions, which transformers leaves as it is.
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
