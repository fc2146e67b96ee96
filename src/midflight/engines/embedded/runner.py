"""Forward passes over any decoder-only model of `transformers`: one flattened pass per engine step, by its own modules or by hand.

By hand go the plain families (`models.plain`): the matrix products, and as little as can be between them. The load-time trial (`probe`) holds it against the model's own forward
before it serves anything. Products of one input are one product: their weights lie one after the other in memory, and the parameters of
the model are views of that.
"""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import embedding, linear, silu
from transformers import PreTrainedConfig, PreTrainedModel

from midflight.engines.embedded.attention import ATTENTION, STEP, Bucket, KvCache, Reach, StepPlaces, Stretch, attend
from midflight.engines.embedded.states import RUNNING, Key, States, cohorts, stateful
from midflight.errors import NotSupported
from midflight.models.names import put_together, side_by_side
from midflight.models.plain import parts_of, sides_of

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
    """[N] Whether the logits at the token are needed."""


class Runner:
    """Owns the model, the keys and values, and the states. Not thread-safe: only the decode thread calls it."""

    def __init__(self, model: PreTrainedModel, *, max_running: int, max_context: int, serial: bool = False) -> None:
        """`serial`: layers with states take one token at a time once they have one."""
        self.model = model.eval()
        self.device: torch.device = model.device
        model.set_attn_implementation(ATTENTION)
        self._cache = KvCache(max_slots=max_running, max_context=max_context)
        self._states = States(max_slots=max_running) if stateful(model) else None
        if self._states is not None:
            self._states.serial = serial
        self._reaches = reaches(model.config.get_text_config())
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=self.device)

    def laid_out(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights, by name, as steps use them best: the same values, and the same memory where it can be."""
        return tensors

    @property
    def keeps_states(self) -> bool:
        """Whether a sequence can only go on where its state was taken."""
        return self._states is not None

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Logits [R, V] of the wanted tokens; keys, values and states of all tokens are stored."""
        offsets = np.cumsum(batch.counts) - batch.counts
        num_slots = int(batch.slots.max()) + 1
        self._cache.reserve(slots=num_slots, context=int(batch.positions.max()) + 1)
        tokens, positions, slots = self._put(np.stack((batch.tokens, batch.positions, batch.token_slots))).unbind()
        if self._states is not None:
            self._states.reserve(slots=num_slots)
            self._states.cohorts = cohorts(batch.slots, batch.starts, batch.counts, self.device)
        buckets = self._buckets(batch, offsets, positions, slots)
        step, states = STEP.set(StepPlaces(self._cache, slots, positions, buckets, self._reaches)), RUNNING.set(self._states)
        try:
            return self._logits(tokens, positions, np.flatnonzero(batch.wanted))
        finally:
            STEP.reset(step)
            RUNNING.reset(states)

    @torch.inference_mode()
    def take(self, slot: int, *, start: int, end: int, at_end: bool) -> "SpanOfSlot":
        """See `KeepsSpans`."""
        states = self._states.take(slot) if self._states is not None and at_end else None
        return SpanOfSlot(self._cache.take(slot, start=start, end=end), states)

    @torch.inference_mode()
    def put(self, slot: int, spans: Sequence[tuple["SpanOfSlot", int]]) -> None:
        """See `KeepsSpans`."""
        self._cache.reserve(slots=slot + 1, context=sum(num for _, num in spans))
        start = 0
        for span, num in spans:
            self._cache.put(slot, span.stretch, start=start, num=num)
            start += num
        if self._states is not None:
            self._states.reserve(slots=slot + 1)
            self._states.put(slot, spans[-1][0].states or {})

    def _logits(self, tokens: Tensor, positions: Tensor, last: Ints) -> Tensor:
        """Tokens and positions [N] of all sequences -> logits [R, V] at `last` [R]."""
        options: dict[str, object] = {"position_ids": positions[None], "attention_mask": self._no_mask, "use_cache": False}
        picks = None if len(last) == len(tokens) else self._put(last)
        if "logits_to_keep" in self._takes:
            options["logits_to_keep"] = 0 if picks is None else picks  # 0 is all
        logits = self.model(input_ids=tokens[None], **{name: value for name, value in options.items() if name in self._takes}).logits[0]
        return logits if picks is None or "logits_to_keep" in self._takes else logits[picks]

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


@dataclass(frozen=True, slots=True, eq=False)
class SpanOfSlot:
    """Implements `Computed`."""

    stretch: Stretch
    states: Mapping[Key, Tensor] | None
    """Behind the last of its tokens, if they are known there."""

    @property
    def num_bytes(self) -> int:
        return sum([tensor.nbytes for tensor in (*self.stretch, *(self.states or {}).values())])

    @property
    def has_state(self) -> bool:
        return self.states is not None

    def cut(self, start: int, end: int) -> "SpanOfSlot":
        length = self.stretch[0].shape[2] if self.stretch else end
        stretch = tuple([taken[:, :, start:end].clone() for taken in self.stretch])
        return SpanOfSlot(stretch, self.states if end == length else None)


def reaches(config: PreTrainedConfig) -> dict[int, Reach]:
    """What the configuration says about layers that see only a part of what stands before them."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    known = {"sliding_attention": Reach(window=window), "chunked_attention": Reach(chunk=chunk)}
    kinds: list[str] = getattr(config, "layer_types", None) or []
    return {number: known[kind] for number, kind in enumerate(kinds) if kind in known}


# --- Plain families, by hand ------------------------------------------------------------------------------------------

_TURNED_BYTES = 2**26
"""Up to this size a model's weights lie [in, out] in memory on a CPU: products of few rows then take up to half the time (MKL, AVX2). Of a
larger model they would have to be copied at each version, for less: its products wait for memory."""


class _Layer(NamedTuple):
    """Weights as they are multiplied, x W."""

    first_norm: Tensor
    qkv: Tensor
    """[hidden, (heads + 2 kv_heads) head_dim]"""
    qkv_bias: Tensor | None
    out: Tensor
    """[heads head_dim, hidden]"""
    out_bias: Tensor | None
    second_norm: Tensor
    gate_up: Tensor
    """[hidden, 2 inner]"""
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
        self._norms = [part.weight for each in attentions if "q_norm" in parts_of(each) for part in (each.q_norm, each.k_norm)]
        self._parameters = dict(model.named_parameters())
        named = {id(parameter): name for name, parameter in self._parameters.items()}
        self._groups = [[named[id(part)] for part in group] for layer in self._decoder.layers for group in _groups(layer)]
        num_bytes = sum(parameter.nbytes for parameter in self._parameters.values())
        self._turns_weights = self.device.type == "cpu" and model.dtype == torch.float32 and num_bytes <= _TURNED_BYTES
        first = attentions[0]
        self._size, self._scale = int(first.head_dim), float(first.scaling)
        self._heads, self._kv_heads = (len(product.weight) // self._size for product in (first.q_proj, first.k_proj))
        self._eps = torch.tensor(self._decoder.norm.variance_epsilon, device=self.device)
        self._which_norm = torch.tensor([0] * self._heads + [1] * self._kv_heads, device=self.device)
        self._turns = (torch.empty(0), torch.empty(0))
        self._turned(32)
        self._lay_out()

    def laid_out(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is used as one lies side by side, and what multiplies is turned where that is faster."""
        for names in self._groups:
            group = [tensors[name] for name in names]
            tensors.update(zip(names, put_together(group, turned=self._turns_weights and group[0].ndim == 2), strict=True))
        return tensors

    def _logits(self, tokens: Tensor, positions: Tensor, last: Ints) -> Tensor:
        step = STEP.get()
        assert step is not None
        if self._pointers != [parameter.data_ptr() for parameter in self._parameters.values()]:
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
        qkv = _product(self._normed(x, layer.first_norm), layer.qkv, layer.qkv_bias).view(num, turned + self._kv_heads, self._size)
        qk = qkv[:, :turned] if norm is None else self._normed(qkv[:, :turned], norm)
        qk = torch.addcmul(qk * cos, qk.roll(self._size // 2, -1), sin)
        step.write(place, qk[:, self._heads :], qkv[:, turned:])
        attended = attend(qk[:, : self._heads], place, step, scale=self._scale, weighing=None, reach=layer.reach)
        x = _added(x, attended.reshape(num, -1), layer.out, layer.out_bias)
        gate, up = _product(self._normed(x, layer.second_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
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
        """Finds the weights where they are now, and lays them out unless they came so."""
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in self.laid_out({name: parameter.data for name, parameter in self._parameters.items()}).items():
                self._parameters[name].data = tensor
        everywhere = Reach(getattr(self.model.config, "sliding_window", None) if self.model.config.model_type == "mistral" else None)
        self._layers = [_laid(layer, self._reaches.get(number, everywhere)) for number, layer in enumerate(self._decoder.layers)]
        self._pointers = [parameter.data_ptr() for parameter in self._parameters.values()]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _added(x: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x + inner weight + bias."""
    return torch.addmm(x if bias is None else x + bias, inner, weight)


def _groups(layer: Any) -> list[list[nn.Parameter]]:
    """Parameters that are used as one: weights first, then biases."""
    sides = sides_of(layer)
    weights = [[product.weight for product in side] for side in sides]
    return weights + [[product.bias for product in side] for side in sides if side[0].bias is not None]


def _laid(layer: Any, reach: Reach) -> _Layer:
    qkv, out, gate_up, down = (_joined(side) for side in sides_of(layer))
    return _Layer(layer.input_layernorm.weight.data, *qkv, *out, layer.post_attention_layernorm.weight.data, *gate_up, *down, reach)


def _joined(products: list[Any]) -> tuple[Tensor, Tensor | None]:
    """Weight [in, out] and bias [out] of the product that is all of these."""
    weights = [product.weight.data for product in products]
    weight = side_by_side(weights, turned=not weights[0].is_contiguous())
    biases = [product.bias.data for product in products if product.bias is not None]
    assert weight is not None, "they were put together before"
    return weight.t(), side_by_side(biases) if biases else None
