"""Attention over one slot of keys and values per running sequence, plugged into `transformers`
through its interface.
"""

import math
import mmap
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
Stretch = tuple[Tensor, ...]
"""The entries of n tokens: [lines, kv_heads, n, head_dim] out of each block."""


class KvCache:
    """A line of keys and a line of values for each attention, [slots, kv_heads, context, head_dim].
    Lines are made at the first write, and their context grows by doubling. The last doubling ends
    at `max_context`.

    An attention is (layer, how often the layer has attended before in the same step), because some
    architectures attend twice. Heads and sizes are learned from the first keys written, so any
    attention shape fits. On a CPU, room takes memory only when it is written to.

    After the step that wrote them first, lines of equal shape lie in one block, [slots, lines,
    kv_heads, context, head_dim], so that all keys and values of a sequence are copied in one piece.
    Entries past a sequence's length are finite garbage: they are masked, and a masked value must
    not be NaN because 0 * NaN is NaN.
    """

    def __init__(self, *, max_slots: int, max_context: int) -> None:
        self._max_slots = max_slots
        self._max_context = max_context
        self._slots = 0
        self.context = 0
        """Positions a slot has room for now."""
        self._blocks: list[Tensor] = []
        self._lines: dict[Place, tuple[Tensor, Tensor]] = {}
        """Keys and values. They are views of blocks, except at the places in `_loose`."""
        self._loose: list[Place] = []
        self._where: list[list[tuple[Place, int]]] = []
        """For each line of each block: its place, and 0 if it holds keys or 1 if it
        holds values.
        """

    def reserve(self, *, slots: int, context: int) -> None:
        """Makes room for `slots` sequences of `context` tokens."""
        if self._loose:
            self._gather()
        if slots <= self._slots and context <= self.context:
            return
        if slots > self._slots:
            self._slots = min(self._max_slots, max(slots, 2 * self._slots))
        if context > self.context:
            self.context = _halved(self._max_context, least=max(context, LEAST_CONTEXT))
        self._blocks = [self._grown(block) for block in self._blocks]
        self._look()

    def line(self, place: Place, *, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots. If there are none yet, new lines are made for tokens such
        as `like`, [N, kv_heads, size] each.
        """
        if place not in self._lines:
            keys, values = like
            self._lines[place] = self._empty(keys), self._empty(values)
            self._loose.append(place)
        return self._lines[place]

    def _empty(self, like: Tensor) -> Tensor:
        """An empty line for tokens such as these, [N, kv_heads, size]."""
        return _zeros((self._slots, like.shape[1], self.context, like.shape[-1]), like=like)

    def read(self, place: Place, slots: Tensor | slice, *, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [b, kv_heads, length, head_dim] of some slots. They are views if `slots`
        is a slice.
        """
        keys, values = self._lines[place]
        return keys[slots, :, :length], values[slots, :, :length]

    def take(self, slot: int, *, start: int, end: int) -> Stretch:
        """Copies entries [start, end) of a slot."""
        if self._loose:
            self._gather()
        return tuple([block[slot, :, :, start:end].clone() for block in self._blocks])

    def put(self, slot: int, stretch: Stretch, *, start: int, num: int) -> None:
        """Writes the first `num` entries of a stretch that was taken, from `start` on."""
        # An attention that came later has a block of its own.
        for block, taken in zip(self._blocks, stretch, strict=False):
            block[slot, :, :, start : start + num] = taken[:, :, :num]

    def _gather(self) -> None:
        """Puts lines that were made since into blocks."""
        alike: dict[tuple[int, int], list[tuple[Place, int]]] = {}
        for place in self._loose:
            for kind, line in enumerate(self._lines[place]):
                shape = (line.shape[1], line.shape[-1])
                alike.setdefault(shape, []).append((place, kind))
        for lines in alike.values():
            tensors = [self._lines[place][kind] for place, kind in lines]
            self._blocks.append(torch.stack(tensors, 1))
            self._where.append(lines)
        self._loose = []
        self._look()

    def _look(self) -> None:
        """Finds the lines where they are now."""
        found: dict[tuple[Place, int], Tensor] = {}
        for block, lines in zip(self._blocks, self._where, strict=True):
            for number, at in enumerate(lines):
                found[at] = block[:, number]
        self._lines = {place: (found[place, 0], found[place, 1]) for place in self._lines}

    def _grown(self, old: Tensor) -> Tensor:
        slots, lines, heads, context, size = old.shape
        new = _zeros((self._slots, lines, heads, self.context, size), like=old)
        new[:slots, :, :, :context] = old
        return new


LEAST_CONTEXT: Final = 32
"""Tokens that a slot has room for at first, if the model can take so many."""


def _halved(most: int, *, least: int) -> int:
    """`most`, halved as often as it stays at least `least`. Halves are rounded up."""
    half = -(-most // 2)
    while half >= least:
        most = half
        half = -(-most // 2)
    return most


def _zeros(shape: tuple[int, ...], *, like: Tensor) -> Tensor:
    """Zeros that take no memory on a CPU before they are written to. The kernel gives such pages;
    torch's own zeros are written at once.
    """
    num_bytes = math.prod(shape) * like.itemsize
    if like.device.type != "cpu" or num_bytes < mmap.PAGESIZE:
        return like.new_zeros(shape)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def slot_rows(
    slots: Tensor, positions: Tensor, *, num_heads: int, context: int, stride: int
) -> Tensor:
    """The rows of a line seen as [.., head_dim], token by token: row(n, h) = slot_n * stride + h *
    context + position_n.
    """
    heads = torch.arange(0, num_heads * context, context, device=slots.device)
    return ((slots * stride + positions)[:, None] + heads).view(-1)


ATTENTION: Final = "midflight_slots"
"""Name under which `transformers` finds `slot_attention`."""
_UNKNOWN: Final = frozenset({"position_bias", "indices", "block_indices"})
"""Options that change the attention weights themselves. Ignoring one would serve another model."""


class Reach(NamedTuple):
    """The keys that a layer's queries see. They never see keys after their own."""

    window: int | None = None
    """Queries see only so many keys back, their own among them."""
    chunk: int | None = None
    """Positions are cut into stretches of so many, from the first on, and queries see only the keys
    of their own stretch.
    """


@dataclass(slots=True, eq=False)
class Bucket:
    """Sequences [b] of about equal query length, attended together as [b, Q] queries over [b, K]
    keys.

    Its tokens are [start, end) of the flattened step. Only queries are padded here, so that linear
    layers never see padding. `rows` and `picks` are `None` if the queries are the tokens in order.
    """

    slots: Tensor | slice
    positions: Tensor
    """[b, Q] the position of each query."""
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
        """[b, 1, Q, K]: 0 where a query may look (keys up to its own position, within `reach`),
        -inf elsewhere.
        """
        keys = torch.arange(self.num_keys, device=self.positions.device)
        positions = self.positions[..., None]
        hidden = keys > positions
        if reach.window is not None:
            hidden |= keys <= positions - reach.window
        if reach.chunk is not None:
            hidden |= keys < positions - positions % reach.chunk
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
            hidden, -torch.inf
        )
        return mask[:, None]


@dataclass(slots=True, eq=False)
class StepPlaces:
    """The places of the N tokens of a step, and how they attend. They are the same for all layers
    except for `reaches`.
    """

    cache: KvCache
    slots: Tensor
    """[N]"""
    positions: Tensor
    """[N]"""
    buckets: list[Bucket]
    reaches: Mapping[int, Reach]
    """The reach of each layer, by its number. A layer that is absent sees all keys
    before its own.
    """
    rows: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])
    """See `slot_rows`. The key is the number of key heads and the rows of a slot. The first layer of
    a step that has so many makes the entry.
    """
    times: dict[int, int] = field(default_factory=dict[int, int])
    """The number of times that each layer has attended in this step."""

    def write(self, place: Place, keys: Tensor, values: Tensor) -> None:
        """Stores the step's tokens: keys [N, kv_heads, D], values [N, kv_heads, E]."""
        key_line, value_line = self.cache.line(place, like=(keys, values))
        self._write(key_line, keys)
        self._write(value_line, values)

    def _write(self, line: Tensor, new: Tensor) -> None:
        slots, heads, context, size = line.shape
        stride = line.stride(0) // size
        rows = torch.as_strided(line, ((slots - 1) * stride + heads * context, size), (size, 1))
        rows.index_copy_(0, self._token_rows(heads, stride), new.reshape(-1, size))

    def _token_rows(self, num_heads: int, stride: int) -> Tensor:
        if (num_heads, stride) not in self.rows:
            self.rows[num_heads, stride] = slot_rows(
                self.slots,
                self.positions,
                num_heads=num_heads,
                context=self.cache.context,
                stride=stride,
            )
        return self.rows[num_heads, stride]

    def place(self, layer: int) -> Place:
        """The place of the layer's keys, the next time that it attends."""
        time = self.times.get(layer, 0)
        self.times[layer] = time + 1
        return layer, time


STEP: Final[ContextVar[StepPlaces | None]] = ContextVar("midflight_step", default=None)
"""The engine step that this thread runs. It is not handed through the model, because many
architectures do not pass on options that they do not know.
"""


class Weighing(NamedTuple):
    """The differences between an attention's weights and softmax(scale q k)."""

    scale: float | None
    softcap: float | None
    """c tanh(score / c) in place of the score (Gemma 2)."""
    sinks: Tensor | None
    """[heads] a logit of each head that takes part in the softmax and has no value (gpt-oss)."""


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
    """The attention of a layer, as `transformers` calls it. Query, key and value are [1, heads, N,
    D] over the flattened tokens of a step; returns [1, N, heads, D].

    Outside an engine step the model attends as it does with `sdpa`, so that the same model also
    trains and evaluates.
    """
    step = STEP.get()
    weighing = None if softcap is None and s_aux is None else Weighing(scaling, softcap, s_aux)
    if step is None:
        if weighing is not None:
            return _weighed_outside(query, key, value, attention_mask, weighing), None
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            sliding_window=sliding_window,
            **options,  # pyright: ignore[reportArgumentType]
        )
    if not _UNKNOWN.isdisjoint(options):
        used = [name for name in _UNKNOWN if options.get(name) is not None]
        if used:
            raise NotSupported(
                f"running the model: its attention uses {used[0]!r}, which the embedded engine "
                "does not compute"
            )
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    place = step.place(layer)
    step.write(place, key[0].transpose(0, 1), value[0].transpose(0, 1))
    reach = step.reaches.get(layer, _EVERYWHERE)
    if sliding_window is not None:
        reach = Reach(sliding_window, reach.chunk)
    queries = query[0].transpose(0, 1)
    attended = attend(queries, place, step, scale=scaling, weighing=weighing, reach=reach)
    return attended[None], None


_EVERYWHERE: Final = Reach()


def attend(
    queries: Tensor,
    place: Place,
    step: StepPlaces,
    *,
    scale: float | None,
    weighing: Weighing | None,
    reach: Reach,
) -> Tensor:
    """Queries [N, heads, D] of a step's tokens -> [N, heads, E], over the keys stored at `place`,
    which include their own.
    """
    outputs = [
        _attend(
            queries[bucket.start : bucket.end],
            place,
            step.cache,
            bucket,
            scale=scale,
            weighing=weighing,
            reach=reach,
        )
        for bucket in step.buckets
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(
    queries: Tensor,
    place: Place,
    cache: KvCache,
    bucket: Bucket,
    *,
    scale: float | None,
    weighing: Weighing | None,
    reach: Reach,
) -> Tensor:
    if bucket.rows is not None:
        queries = queries[bucket.rows]
    if reach not in bucket.masks:
        bucket.masks[reach] = bucket.mask(reach, queries.dtype)
    keys, values = cache.read(place, bucket.slots, length=bucket.num_keys)
    mask = bucket.masks[reach]
    num, length = bucket.positions.shape
    heads = queries.shape[1]
    kv_heads = keys.shape[1]
    if weighing is not None:
        split = queries.reshape(num, length, heads, -1).transpose(1, 2)
        out = weighed(split, keys, values, mask=mask, weighing=weighing)
        out = out.transpose(1, 2).reshape(num * length, heads, -1)
    elif length == 1:
        # The query heads that share a key head take the place of queries, so no key is repeated.
        grouped = queries.reshape(num, kv_heads, heads // kv_heads, -1)
        mask = mask.expand(-1, -1, heads // kv_heads, -1)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        out = out.reshape(num, heads, -1)
    else:
        split = queries.reshape(num, length, heads, -1).transpose(1, 2)
        out = scaled_dot_product_attention(
            split, keys, values, attn_mask=mask, scale=scale, enable_gqa=heads != kv_heads
        )
        out = out.transpose(1, 2).reshape(num * length, heads, -1)
    return out if bucket.picks is None else out[bucket.picks]


def weighed(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, weighing: Weighing
) -> Tensor:
    """Attention with a softcap or sinks: query [b, heads, Q, D], key [b, kv_heads, K, D], value [b,
    kv_heads, K, E], mask [b, 1, Q, K] added to the scores -> [b, heads, Q, E].

        w_k = exp(s_k) / (sum_j exp(s_j) + exp(sink)), s = c tanh(scale q k / c) + mask

    Gemma Team 2024 (2408.00118), section 2; OpenAI 2025 (2508.10925), section 2.2.
    """
    num, heads, length, size = query.shape
    kv_heads = key.shape[1]
    num_keys = key.shape[2]
    sharing = heads // kv_heads
    scale = size**-0.5 if weighing.scale is None else weighing.scale
    grouped = query.reshape(num, kv_heads, sharing * length, size)
    scores = grouped @ key.transpose(-1, -2) * scale
    scores = scores.view(num, kv_heads, sharing, length, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if weighing.softcap is not None:
        scores = weighing.softcap * torch.tanh(scores / weighing.softcap)
    scores = scores + mask[:, :, None]
    if weighing.sinks is not None:
        sinks = weighing.sinks.to(scores.dtype).view(kv_heads, -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1)[..., :num_keys].to(value.dtype)
    weighted = weights.reshape(num, kv_heads, -1, num_keys) @ value
    return weighted.view(num, heads, length, -1)


def _weighed_outside(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, weighing: Weighing
) -> Tensor:
    """Attention outside a step: [b, heads, Q, D] -> [b, Q, heads, E]. Without a mask the queries
    belong to the last of the keys and see all keys before them.
    """
    length = query.shape[2]
    num_keys = key.shape[2]
    if mask is None:
        everything = torch.ones(1, 1, length, num_keys, dtype=torch.bool, device=query.device)
        mask = everything.tril(num_keys - length)
    if mask.dtype == torch.bool:
        nothing = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        mask = nothing.masked_fill_(~mask, torch.finfo(query.dtype).min)
    return weighed(query, key, value, mask=mask, weighing=weighing).transpose(1, 2)


AttentionInterface.register(ATTENTION, slot_attention)
# This is used only outside engine steps: a step passes a mask of four dimensions, which
# transformers leaves as it is.
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
