"""Attention over one slot of keys and values per running sequence, plugged into `transformers` through its interface."""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from midflight.errors import NotSupported

Place = tuple[int, int]
Stretch = Mapping[Place, tuple[Tensor, Tensor]]
"""Keys [kv_heads, n, head_dim] and values of some tokens, by attention."""


class KvCache:
    """Two tensors per attention, [slots, kv_heads, context, head_dim], made at the first write and grown by doubling.

    An attention is (layer, how often the layer has attended before in the same step): some architectures attend twice. Heads and
    sizes are learned from the first keys written, so any attention shape fits. Entries past a sequence's length are finite garbage:
    they are masked, and a masked value must not be NaN because 0 * NaN is NaN.
    """

    def __init__(self, *, max_slots: int, max_context: int) -> None:
        self._max_slots, self._max_context = max_slots, max_context
        self._slots = 0
        self.context = 0
        """Positions a slot has room for now."""
        self._keys: dict[Place, Tensor] = {}
        self._values: dict[Place, Tensor] = {}

    def reserve(self, *, slots: int, context: int) -> None:
        """Makes room for `slots` sequences of `context` tokens."""
        if slots <= self._slots and context <= self.context:
            return
        self._slots = max(self._slots, min(self._max_slots, max(slots, 2 * self._slots)))
        self.context = max(self.context, min(self._max_context, max(context, 2 * self.context, 32)))
        for tensors in (self._keys, self._values):
            for place, old in tensors.items():
                tensors[place] = self._grown(old)

    def write(self, place: Place, keys: Tensor, values: Tensor, *, rows: Tensor) -> None:
        """Stores N tokens: keys [N, kv_heads, D], values [N, kv_heads, E]. `rows` [N * kv_heads] numbers the rows of the cache seen as [slots * kv_heads * context, head_dim]."""
        if place not in self._keys:
            self._keys[place], self._values[place] = self._empty(keys), self._empty(values)
        for cache, new in ((self._keys[place], keys), (self._values[place], values)):
            cache.view(-1, cache.shape[-1]).index_copy_(0, rows, new.reshape(-1, new.shape[-1]))

    def read(self, place: Place, slots: Tensor | slice, *, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [b, kv_heads, length, head_dim] of some slots; a view where `slots` is a slice."""
        return self._keys[place][slots, :, :length], self._values[place][slots, :, :length]

    def take(self, slot: int, *, start: int, end: int) -> Stretch:
        """Copies entries [start, end) of a slot."""
        return {
            place: (keys[slot, :, start:end].clone(), self._values[place][slot, :, start:end].clone()) for place, keys in self._keys.items()
        }

    def put(self, slot: int, stretch: Stretch, *, start: int, num: int) -> None:
        """Writes the first `num` entries of what was taken, from `start` on."""
        for place, (keys, values) in stretch.items():
            self._keys[place][slot, :, start : start + num] = keys[:, :num]
            self._values[place][slot, :, start : start + num] = values[:, :num]

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._slots, like.shape[1], self.context, like.shape[-1])

    def _grown(self, old: Tensor) -> Tensor:
        slots, heads, context, size = old.shape
        new = old.new_zeros(self._slots, heads, self.context, size)
        new[:slots, :, :context] = old
        return new


def slot_rows(slots: Tensor, positions: Tensor, *, num_heads: int, context: int) -> Tensor:
    """Rows for `KvCache.write`, token by token: row(n, h) = (slot_n * num_heads + h) * context + position_n."""
    heads = torch.arange(0, num_heads * context, context, device=slots.device)
    return ((slots * (num_heads * context) + positions)[:, None] + heads).view(-1)


ATTENTION: Final = "midflight_slots"
"""Name under which `transformers` finds `slot_attention`."""
_UNKNOWN: Final = frozenset({"position_bias", "indices", "block_indices"})
"""Options that change the attention weights themselves; ignoring one would serve another model."""


class Reach(NamedTuple):
    """What a layer's queries may see, besides that keys are not after them."""

    window: int | None = None
    """Only so many keys back, their own among them."""
    chunk: int | None = None
    """Only keys of the stretch of so many positions, counted from the first, in which they stand themselves."""


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
    masks: dict[Reach, Tensor] = field(default_factory=dict[Reach, Tensor])
    """Made by the first layer of a step that asks for it."""

    def mask(self, reach: Reach, dtype: torch.dtype) -> Tensor:
        """[b, 1, Q, K]: 0 where a query may look (keys up to its own position, within `reach`), -inf elsewhere."""
        keys, positions = torch.arange(self.num_keys, device=self.positions.device), self.positions[..., None]
        hidden = keys > positions
        if reach.window is not None:
            hidden |= keys <= positions - reach.window
        if reach.chunk is not None:
            hidden |= keys < positions - positions % reach.chunk
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return mask[:, None]


@dataclass(slots=True, eq=False)
class StepPlaces:
    """Where the N tokens of a step live, and how they attend; the same for all layers but for what `reaches` says."""

    cache: KvCache
    slots: Tensor
    """[N]"""
    positions: Tensor
    """[N]"""
    buckets: list[Bucket]
    reaches: Mapping[int, Reach]
    """By layer, where the model says it in its configuration."""
    rows: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """By the number of key heads, made by the first layer of a step that has so many."""
    times: dict[int, int] = field(default_factory=dict[int, int])
    """How often each layer has attended in this step."""

    def token_rows(self, num_heads: int) -> Tensor:
        """For `KvCache.write`."""
        if num_heads not in self.rows:
            self.rows[num_heads] = slot_rows(self.slots, self.positions, num_heads=num_heads, context=self.cache.context)
        return self.rows[num_heads]

    def place(self, layer: int) -> Place:
        """Where the layer's keys are kept, the next time that it attends."""
        time = self.times.get(layer, 0)
        self.times[layer] = time + 1
        return layer, time


STEP: Final[ContextVar[StepPlaces | None]] = ContextVar("midflight_step", default=None)
"""The engine step that this thread runs. Not handed through the model, because many architectures do not pass on what they do not know."""


class Weighing(NamedTuple):
    """How an attention's weights differ from softmax(scale q k)."""

    scale: float | None
    softcap: float | None
    """c tanh(score / c) in place of the score (Gemma 2)."""
    sinks: Tensor | None
    """[heads] a logit per head that takes part in the softmax and has no value (gpt-oss)."""


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    """Query, key and value are [1, heads, N, D] over the flattened tokens of a step; returns [1, N, heads, D].

    Outside an engine step the model attends as it does with `sdpa`, so that the same model also trains and evaluates.
    """
    step = STEP.get()
    weighing = None if softcap is None and s_aux is None else Weighing(scaling, softcap, s_aux)
    if step is None:
        if weighing is not None:
            return _weighed_outside(query, key, value, attention_mask, weighing), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **options)  # pyright: ignore[reportArgumentType]
    if not _UNKNOWN.isdisjoint(options) and (used := [name for name in _UNKNOWN if options.get(name) is not None]):
        raise NotSupported(f"running the model: its attention uses {used[0]!r}, which the embedded engine does not compute")
    layer, num_heads = int(module.layer_idx), key.shape[1]  # pyright: ignore[reportArgumentType]
    place = step.place(layer)
    step.cache.write(place, key[0].transpose(0, 1), value[0].transpose(0, 1), rows=step.token_rows(num_heads))
    reach = step.reaches.get(layer, _EVERYWHERE)
    if sliding_window is not None:
        reach = Reach(sliding_window, reach.chunk)
    return attend(query[0].transpose(0, 1), place, step, scale=scaling, weighing=weighing, reach=reach)[None], None


_EVERYWHERE: Final = Reach()


def attend(queries: Tensor, place: Place, step: StepPlaces, *, scale: float | None, weighing: Weighing | None, reach: Reach) -> Tensor:
    """Queries [N, heads, D] of a step's tokens over the keys kept at `place`, theirs among them -> [N, heads, E]."""
    outputs = [
        _attend(queries[bucket.start : bucket.end], place, step.cache, bucket, scale=scale, weighing=weighing, reach=reach)
        for bucket in step.buckets
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(
    queries: Tensor, place: Place, cache: KvCache, bucket: Bucket, *, scale: float | None, weighing: Weighing | None, reach: Reach
) -> Tensor:
    if bucket.rows is not None:
        queries = queries[bucket.rows]
    if reach not in bucket.masks:
        bucket.masks[reach] = bucket.mask(reach, queries.dtype)
    keys, values = cache.read(place, bucket.slots, length=bucket.num_keys)
    mask = bucket.masks[reach]
    num, length = bucket.positions.shape
    heads, kv_heads = queries.shape[1], keys.shape[1]
    if weighing is not None:
        split = queries.reshape(num, length, heads, -1).transpose(1, 2)
        out = weighed(split, keys, values, mask=mask, weighing=weighing).transpose(1, 2).reshape(num * length, heads, -1)
    elif length == 1:
        # The query heads that share a key head stand where queries stand: no key is repeated.
        grouped = queries.reshape(num, kv_heads, heads // kv_heads, -1)
        mask = mask.expand(-1, -1, heads // kv_heads, -1)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale).reshape(num, heads, -1)
    else:
        split = queries.reshape(num, length, heads, -1).transpose(1, 2)
        out = scaled_dot_product_attention(split, keys, values, attn_mask=mask, scale=scale, enable_gqa=heads != kv_heads)
        out = out.transpose(1, 2).reshape(num * length, heads, -1)
    return out if bucket.picks is None else out[bucket.picks]


def weighed(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, weighing: Weighing) -> Tensor:
    """Attention with a softcap or sinks: query [b, heads, Q, D], key [b, kv_heads, K, D], value [b, kv_heads, K, E], mask [b, 1, Q, K] added
    to the scores -> [b, heads, Q, E].

        w_k = exp(s_k) / (sum_j exp(s_j) + exp(sink)), s = c tanh(scale q k / c) + mask

    Gemma Team 2024 (2408.00118), section 2; OpenAI 2025 (2508.10925), section 2.2.
    """
    (num, heads, length, size), kv_heads = query.shape, key.shape[1]
    scale = size**-0.5 if weighing.scale is None else weighing.scale
    grouped = query.reshape(num, kv_heads, heads // kv_heads * length, size)
    scores = (grouped @ key.transpose(-1, -2) * scale).view(num, kv_heads, heads // kv_heads, length, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if weighing.softcap is not None:
        scores = weighing.softcap * torch.tanh(scores / weighing.softcap)
    scores = scores + mask[:, :, None]
    if weighing.sinks is not None:
        sinks = weighing.sinks.to(scores.dtype).view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return (weights.reshape(num, kv_heads, -1, key.shape[2]) @ value).view(num, heads, length, -1)


def _weighed_outside(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, weighing: Weighing) -> Tensor:
    """Outside a step: [b, heads, Q, D] -> [b, Q, heads, E]. No mask means that the queries, the last of the keys, see all before them."""
    (length, num_keys) = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(1, 1, length, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - length)
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return weighed(query, key, value, mask=mask, weighing=weighing).transpose(1, 2)


AttentionInterface.register(ATTENTION, slot_attention)
# Used only outside engine steps: a step passes a mask of four dimensions, which transformers leaves as it is.
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
