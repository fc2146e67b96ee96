"""Forward passes over any decoder-only model of `transformers`: one flattened pass per engine step,
by its own modules or by hand.

By hand go the plain families (`models.plain`): the matrix products (`products`), and as little as
can be between them. The load-time trial (`probe`) holds it against the model's own forward before
it serves anything. Products of one input are one product: their weights lie one after the other in
memory, and the parameters of the model are views of that.
"""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import embedding, silu
from transformers import PreTrainedConfig, PreTrainedModel

from midflight.engines.embedded.attention import (
    ATTENTION,
    STEP,
    Bucket,
    KvCache,
    Reach,
    StepPlaces,
    Stretch,
    attend,
)
from midflight.engines.embedded.products import (
    PackedProduct,
    PlainProduct,
    Product,
    packing_is_right,
)
from midflight.engines.embedded.states import RUNNING, Key, States, cohorts, stateful
from midflight.errors import NotSupported
from midflight.models.names import put_together
from midflight.models.plain import parts_of, sides_of
from midflight.models.sizes import PACKED_BYTES, TURNED_BYTES

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """Sequence i brings tokens [starts_i, starts_i + counts_i) of slot i. Single-token sequences
    come first, in order of slots, then the others by ascending count."""

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
    """Owns the model, the keys and values, and the states. Not thread-safe: only the decode thread
    calls it.
    """

    recomputes = False
    """Whether nothing is kept of a sequence, so that each step must bring all of it."""

    def __init__(
        self, model: PreTrainedModel, *, max_running: int, max_context: int, serial: bool = False
    ) -> None:
        """`serial`: layers with states take one token at a time once they have one."""
        self.model = model.eval()
        self.device: torch.device = model.device
        model.set_attn_implementation(ATTENTION)
        self._cache = KvCache(max_slots=max_running, max_context=max_context)
        self._states = States(max_slots=max_running) if stateful(model) else None
        self.keeps_states = self._states is not None
        """Whether a sequence can only go on where its state was taken."""
        if self._states is not None:
            self._states.serial = serial
        self._reaches = reaches(model.config.get_text_config())
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=self.device)

    def laid_out(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights, by name, as steps use them best: the same values, and the same memory where
        it can be.
        """
        return tensors

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Logits [R, V] of the wanted tokens; keys, values and states of all tokens are stored."""
        offsets = np.cumsum(batch.counts) - batch.counts
        num_slots = int(batch.slots.max()) + 1
        self._cache.reserve(slots=num_slots, context=int(batch.positions.max()) + 1)
        tokens, positions, slots = self._put(
            np.stack((batch.tokens, batch.positions, batch.token_slots))
        ).unbind()
        if self._states is not None:
            self._states.reserve(slots=num_slots)
            self._states.cohorts = cohorts(batch.slots, batch.starts, batch.counts, self.device)
        buckets = self._buckets(batch, offsets, positions, slots)
        step = STEP.set(StepPlaces(self._cache, slots, positions, buckets, self._reaches))
        states = RUNNING.set(self._states)
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
        options: dict[str, object] = {
            "position_ids": positions[None],
            "attention_mask": self._no_mask,
            "use_cache": False,
        }
        picks = None if len(last) == len(tokens) else self._put(last)
        if "logits_to_keep" in self._takes:
            options["logits_to_keep"] = 0 if picks is None else picks  # 0 is all
        logits = self.model(
            input_ids=tokens[None],
            **{name: value for name, value in options.items() if name in self._takes},
        ).logits[0]
        return logits if picks is None or "logits_to_keep" in self._takes else logits[picks]

    def _buckets(
        self, batch: StepBatch, offsets: Ints, positions: Tensor, slots: Tensor
    ) -> list[Bucket]:
        """Single tokens in one bucket; longer chunks share one only where padding at most doubles
        them.

        `positions` and `slots` [N] of all tokens, on the device.
        """
        num_single = int(np.searchsorted(batch.counts, 1, side="right"))
        buckets = [self._single_bucket(batch, num_single, positions, slots)] if num_single else []
        if num_single < len(batch.counts):
            classes = np.ceil(np.log2(batch.counts[num_single:])).astype(np.int64)
            edges = num_single + np.flatnonzero(np.diff(classes)) + 1
            for first, last in itertools.pairwise([num_single, *edges.tolist(), len(batch.counts)]):
                start = int(offsets[first])
                end = int(offsets[last - 1] + batch.counts[last - 1])
                buckets.append(
                    self._chunk_bucket(batch, slice(first, last), positions, start=start, end=end)
                )
        return buckets

    def _single_bucket(
        self, batch: StepBatch, num: int, positions: Tensor, slots: Tensor
    ) -> Bucket:
        """Where the slots are nearly a range, the whole range is read as a view: an idle row in it
        costs less than gathering all.
        """
        low = int(batch.slots[0])
        high = int(batch.slots[num - 1]) + 1
        num_keys = int(batch.positions[:num].max()) + 1
        if high - low == num or high - low > num + num // 2:
            where = slice(low, high) if high - low == num else slots[:num]
            return Bucket(where, positions[:num, None], start=0, end=num, num_keys=num_keys)
        rows = np.zeros(high - low, dtype=np.int64)
        padded = np.zeros((high - low, 1), dtype=np.int64)
        picks = batch.slots[:num] - low
        rows[picks] = np.arange(num)
        padded[picks, 0] = batch.positions[:num]
        where = slice(low, high)
        return Bucket(
            where,
            self._put(padded),
            start=0,
            end=num,
            num_keys=num_keys,
            rows=self._put(rows),
            picks=self._put(picks),
        )

    def _chunk_bucket(
        self, batch: StepBatch, part: slice, positions: Tensor, *, start: int, end: int
    ) -> Bucket:
        counts = batch.counts[part]
        slots = self._put(batch.slots[part])
        num = len(counts)
        longest = int(counts[-1])
        num_keys = int(batch.positions[start:end].max()) + 1
        if counts[0] == longest:
            return Bucket(
                slots,
                positions[start:end].reshape(num, longest),
                start=start,
                end=end,
                num_keys=num_keys,
            )
        filled = np.arange(longest) < counts[:, None]
        rows = np.zeros((num, longest), dtype=np.int64)
        padded = np.zeros((num, longest), dtype=np.int64)
        rows[filled] = np.arange(end - start)
        padded[filled] = batch.positions[start:end]
        rows_on = self._put(rows.reshape(-1))
        picks = self._put(np.flatnonzero(filled))
        return Bucket(
            slots,
            self._put(padded),
            start=start,
            end=end,
            num_keys=num_keys,
            rows=rows_on,
            picks=picks,
        )

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
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    known = {"sliding_attention": Reach(window=window), "chunked_attention": Reach(chunk=chunk)}
    kinds: list[str] = getattr(config, "layer_types", None) or []
    return {number: known[kind] for number, kind in enumerate(kinds) if kind in known}


# --- Plain families, by hand ----------------------------------------------------------------------


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
    """The names of what is multiplied as one."""

    weights: list[str]
    biases: list[str]


class _PackedWeights(NamedTuple):
    """The products of some weights, which lie where `pointers` say."""

    pointers: list[int]
    layers: list[list[PackedProduct]]
    """Four products for each layer, in the order of `_Layer`."""
    head: PackedProduct


class PlainRunner(Runner):
    """As `Runner`, for models that are plain."""

    def __init__(
        self, model: PreTrainedModel, *, max_running: int, max_context: int, packs: bool = False
    ) -> None:
        """`packs`: weights may be replaced, and are not written to, so that copies of them may be
        multiplied with. Those of a version are made where it is laid out, beside decoding."""
        super().__init__(model, max_running=max_running, max_context=max_context)
        self._decoder: Any = model.model
        self._embedding = self._decoder.embed_tokens.weight
        self._last_norm = self._decoder.norm.weight
        attentions = [layer.self_attn for layer in self._decoder.layers]
        self._norms = [
            part.weight
            for each in attentions
            if "q_norm" in parts_of(each)
            for part in (each.q_norm, each.k_norm)
        ]
        self._parameters = dict(model.named_parameters())
        self._named = {id(parameter): name for name, parameter in self._parameters.items()}
        self._sides = [
            [self._side(products) for products in sides_of(layer)] for layer in self._decoder.layers
        ]
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
        self._packs = (
            packs
            and multiplies_by_mkl
            and TURNED_BYTES < num_bytes <= PACKED_BYTES
            and self._packing_is_right()
        )
        first = attentions[0]
        self._size = int(first.head_dim)
        self._scale = float(first.scaling)
        self._heads, self._kv_heads = (
            len(product.weight) // self._size for product in (first.q_proj, first.k_proj)
        )
        self._eps = torch.tensor(self._decoder.norm.variance_epsilon, device=self.device)
        self._which_norm = torch.tensor(
            [0] * self._heads + [1] * self._kv_heads, device=self.device
        )
        self._turns = (torch.empty(0), torch.empty(0))
        self._turned(32)
        self._lay_out()

    def laid_out(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Packs the weights that are used as one, or lays them side by side and turns them where
        that is faster.
        """
        if self._packs:
            self._replaced = None
            self._ahead = self._packed(tensors)
            return tensors
        for side in itertools.chain.from_iterable(self._sides):
            for names in filter(None, side):
                group = [tensors[name] for name in names]
                tensors.update(
                    zip(
                        names,
                        put_together(group, turned=self._turns_weights and group[0].ndim == 2),
                        strict=True,
                    )
                )
        return tensors

    @torch.no_grad()
    def _packed(self, tensors: Mapping[str, Tensor]) -> _PackedWeights:
        def product(side: _Side) -> PackedProduct:
            return PackedProduct.joined(
                [tensors[name] for name in side.weights], [tensors[name] for name in side.biases]
            )

        pointers = [tensors[name].data_ptr() for name in self._parameters]
        return _PackedWeights(
            pointers,
            [[product(side) for side in sides] for sides in self._sides],
            product(self._head_side),
        )

    def _logits(self, tokens: Tensor, positions: Tensor, last: Ints) -> Tensor:
        step = STEP.get()
        assert step is not None
        if self._pointers != self._places() or (
            self._ahead is not None and self._ahead.pointers == self._pointers
        ):
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
            return weight * (
                wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
            ).to(x.dtype)
        length = vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()).mul_(
            weight
        )

    def _head_norms(self) -> Sequence[Tensor]:
        """Of each layer [heads + kv_heads, head_dim]; made anew for each step, because weights may
        be written to in place.
        """
        return torch.stack(self._norms).unflatten(0, (-1, 2))[:, self._which_norm].unbind()

    def _turned(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [length, head_dim] of each position, from the model's own rotary embedding.
        The sine has the sign of what it adds: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
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
        """Finds the weights where they are now, and lays them out unless they came so."""
        places = self._places()
        if self._ahead is None or self._ahead.pointers != places:
            with torch.inference_mode(False), torch.no_grad():
                for name, tensor in self.laid_out(
                    {name: parameter.data for name, parameter in self._parameters.items()}
                ).items():
                    self._parameters[name].data = tensor
        ahead = self._ahead
        products = list[list[Any]]()
        if ahead is None:
            products = [[self._plain_product(side) for side in sides] for sides in self._sides]
            self._head: Product = self._plain_product(self._head_side)
        else:
            self._replaced = self._used
            self._used = ahead
            self._ahead = None
            products = ahead.layers
            self._head = ahead.head
        everywhere = Reach(
            getattr(self.model.config, "sliding_window", None)
            if self.model.config.model_type == "mistral"
            else None
        )
        self._layers: list[_Layer] = []
        for number, (layer, (qkv, out, gate_up, down)) in enumerate(
            zip(self._decoder.layers, products, strict=True)
        ):
            first = layer.input_layernorm.weight.data
            second = layer.post_attention_layernorm.weight.data
            self._layers.append(
                _Layer(
                    first, qkv, out, second, gate_up, down, self._reaches.get(number, everywhere)
                )
            )
        self._pointers = self._places()

    def _packing_is_right(self) -> bool:
        return all(
            packing_is_right([self._parameters[name] for name in side.weights])
            for side in self._sides[0]
        )

    def _places(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._parameters.values()))

    def _side(self, products: list[Any]) -> _Side:
        weights = [self._named[id(product.weight)] for product in products]
        return _Side(
            weights,
            [self._named[id(product.bias)] for product in products if product.bias is not None],
        )

    def _plain_product(self, side: _Side) -> PlainProduct:
        return PlainProduct.joined(
            [self._parameters[name].data for name in side.weights],
            [self._parameters[name].data for name in side.biases],
        )
