"""Forward passes over any decoder-only model of `transformers`: one flattened pass per engine step, and rows to score.

Keys and values of running sequences have one slot each; attention over them is plugged into `transformers` through its interface.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from midflight.errors import NotSupported
from midflight.types import Float32, Int32


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


Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """Sequence i brings tokens [starts_i, starts_i + counts_i) of slot i. Single-token sequences come first, in order of slots,
    then the others by ascending count."""

    slots: Ints
    starts: Ints
    counts: Ints
    tokens: Ints
    """All tokens, flattened [N]."""
    positions: Ints
    """[N]"""
    token_slots: Ints
    """[N]"""
    wanted: NDArray[np.bool_]
    """Whether the logits of the sequence's last token are needed."""


class Runner:
    """Owns the model and the keys and values. Not thread-safe: only the decode thread calls it."""

    def __init__(self, model: PreTrainedModel, *, max_running: int, max_context: int) -> None:
        self.model = model.eval()
        self.device: torch.device = model.device
        model.set_attn_implementation(ATTENTION)
        self._cache = KvCache(max_slots=max_running, max_context=max_context)
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=self.device)
        self._probe()

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Logits [R, V] of the wanted sequences' last tokens; keys and values of all tokens are stored."""
        offsets = np.cumsum(batch.counts) - batch.counts
        self._cache.reserve(slots=int(batch.slots.max()) + 1, context=int(batch.positions.max()) + 1)
        tokens, positions, slots = self._put(np.stack((batch.tokens, batch.positions, batch.token_slots))).unbind()
        last = (offsets + batch.counts - 1)[batch.wanted]
        out = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=0 if len(last) == len(batch.tokens) else self._put(last),  # 0 is all
            midflight_step=StepPlaces(self._cache, slots, positions, self._buckets(batch, offsets, positions, slots)),
        )
        return out.logits[0]

    @torch.inference_mode()
    def copy(self, sources: Ints, targets: Ints, *, length: int) -> None:
        """Copies the keys and values of the first `length` tokens between slots."""
        self._cache.reserve(slots=int(max(sources.max(), targets.max())) + 1, context=length)
        self._cache.copy(self._put(sources), self._put(targets), length=length)

    def _probe(self) -> None:
        """A model whose attention cannot be served fails when it is loaded, not under a request."""
        zero = np.zeros(1, dtype=np.int64)
        self.forward(StepBatch(zero, zero, zero + 1, tokens=zero, positions=zero, token_slots=zero, wanted=zero == 0))

    def _buckets(self, batch: StepBatch, offsets: Ints, positions: Tensor, slots: Tensor) -> list[Bucket]:
        """Single tokens in one bucket; longer chunks share one only where padding at most doubles them.

        `positions` and `slots` [N] of all tokens, on the device.
        """
        num_single = int(np.searchsorted(batch.counts, 1, side="right"))
        buckets = [self._single_bucket(batch, num_single, positions, slots)] if num_single else []
        if num_single < len(batch.counts):
            classes = np.ceil(np.log2(batch.counts[num_single:])).astype(np.int64)
            edges = num_single + np.flatnonzero(np.diff(classes)) + 1
            for first, last in itertools.pairwise([num_single, *edges.tolist(), len(batch.counts)]):
                start, end = int(offsets[first]), int(offsets[last - 1] + batch.counts[last - 1])
                buckets.append(self._chunk_bucket(batch, slice(first, last), positions, start=start, end=end))
        return buckets

    def _single_bucket(self, batch: StepBatch, num: int, positions: Tensor, slots: Tensor) -> Bucket:
        """Where the slots are nearly a range, the whole range is read as a view: an idle row in it costs less than gathering all."""
        low, high = int(batch.slots[0]), int(batch.slots[num - 1]) + 1
        num_keys = int(batch.positions[:num].max()) + 1
        if high - low == num or high - low > num + num // 2:
            where = slice(low, high) if high - low == num else slots[:num]
            return Bucket(where, positions[:num, None], start=0, end=num, num_keys=num_keys)
        rows, padded = np.zeros(high - low, dtype=np.int64), np.zeros((high - low, 1), dtype=np.int64)
        picks = batch.slots[:num] - low
        rows[picks], padded[picks, 0] = np.arange(num), batch.positions[:num]
        where = slice(low, high)
        return Bucket(where, self._put(padded), start=0, end=num, num_keys=num_keys, rows=self._put(rows), picks=self._put(picks))

    def _chunk_bucket(self, batch: StepBatch, part: slice, positions: Tensor, *, start: int, end: int) -> Bucket:
        counts, slots = batch.counts[part], self._put(batch.slots[part])
        num, longest = len(counts), int(counts[-1])
        num_keys = int(batch.positions[start:end].max()) + 1
        if counts[0] == longest:
            return Bucket(slots, positions[start:end].reshape(num, longest), start=start, end=end, num_keys=num_keys)
        filled = np.arange(longest) < counts[:, None]
        rows, padded = np.zeros((num, longest), dtype=np.int64), np.zeros((num, longest), dtype=np.int64)
        rows[filled], padded[filled] = np.arange(end - start), batch.positions[start:end]
        rows_on, picks = self._put(rows.reshape(-1)), self._put(np.flatnonzero(filled))
        return Bucket(slots, self._put(padded), start=start, end=end, num_keys=num_keys, rows=rows_on, picks=picks)

    def _put(self, values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


MAX_LOGITS = 2**26
"""Logits that are there at once: 256 MiB in float32, and as much again for their softmax."""


def portions(lengths: NDArray[np.int64], *, max_tokens: int) -> list[list[int]]:
    """Rows that go through the model together, by number, shortest first: at most `max_tokens` with their padding, or one row."""
    made: list[list[int]] = []
    for row in np.argsort(lengths, kind="stable").tolist():
        if made and (len(made[-1]) + 1) * int(lengths[row]) <= max_tokens:
            made[-1].append(row)
        else:
            made.append([row])
    return made


@torch.inference_mode()
def token_logprobs(model: PreTrainedModel, rows: Sequence[Int32], *, temperature: float, max_logits: int = MAX_LOGITS) -> list[Float32]:
    """log softmax(logits / temperature) of each token after those before it in its row; 0 for the first, which nothing predicts.

    Padding stands behind the tokens, where causal attention never looks. Columns go through the model a stretch at a time over the
    keys of those before, so that the logits of a long row need not all be there at once.
    """
    ids = _padded(rows, model.device)
    found = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    width = max(1, max_logits // (len(rows) * int(model.config.get_text_config().vocab_size)))
    past = None
    for start in range(0, ids.shape[1] - 1, width):
        end = min(start + width, ids.shape[1] - 1)
        out = model(input_ids=ids[:, start:end], past_key_values=past, use_cache=True)
        past = out.past_key_values
        found[:, start + 1 : end + 1] = _chosen(out.logits, ids[:, start + 1 : end + 1], temperature=temperature)
    scores = found.cpu().numpy()
    return [scores[number, : len(row)] for number, row in enumerate(rows)]


def _padded(rows: Sequence[Int32], device: torch.device) -> Tensor:
    """[rows, longest]; padding is token 0."""
    ids = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    return torch.from_numpy(ids).to(device)


def _chosen(logits: Tensor, targets: Tensor, *, temperature: float) -> Tensor:
    """[b, k, V] and [b, k] -> [b, k], computed in float32, or float64 for a float64 model."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return (logits / temperature).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
