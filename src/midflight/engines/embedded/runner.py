"""Forward passes over any decoder-only model of `transformers`: one flattened pass per engine step."""

import inspect
import itertools
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from midflight.engines.embedded.attention import ATTENTION, STEP, Bucket, KvCache, Reach, StepPlaces, Stretch
from midflight.engines.embedded.states import RUNNING, Key, States, cohorts, stateful

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

    @property
    def together(self) -> Sequence[Sequence[str]]:
        """Names of weights that are used as one, and should come one after the other in memory."""
        return ()

    @property
    def keeps_states(self) -> bool:
        """Whether a sequence can only go on where its state was taken."""
        return self._states is not None

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Logits [R, V] of the wanted sequences' last tokens; keys, values and states of all tokens are stored."""
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
            return self._logits(tokens, positions, (offsets + batch.counts - 1)[batch.wanted])
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


_WORK_OF_A_THREAD = 4e7
"""Products (parameters times tokens) of a step from which on one more thread saves more than waiting for it costs."""


@contextmanager
def threads_for(work: float) -> Generator[None]:
    """Meanwhile as many threads compute as so many products are worth, of those that there are."""
    most = torch.get_num_threads()
    torch.set_num_threads(max(1, min(most, int(work / _WORK_OF_A_THREAD))))
    try:
        yield
    finally:
        torch.set_num_threads(most)


@dataclass(frozen=True, slots=True, eq=False)
class SpanOfSlot:
    """Implements `Computed`."""

    stretch: Stretch
    states: Mapping[Key, Tensor] | None
    """Behind the last of its tokens, if they are known there."""

    @property
    def num_bytes(self) -> int:
        tensors = [*itertools.chain(*self.stretch.values()), *(self.states or {}).values()]
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def has_state(self) -> bool:
        return self.states is not None

    def cut(self, start: int, end: int) -> "SpanOfSlot":
        length = next((keys.shape[1] for keys, _ in self.stretch.values()), end)
        stretch = {place: (keys[:, start:end].clone(), values[:, start:end].clone()) for place, (keys, values) in self.stretch.items()}
        return SpanOfSlot(stretch, self.states if end == length else None)


def reaches(config: PreTrainedConfig) -> dict[int, Reach]:
    """What the configuration says about layers that see only a part of what stands before them."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    known = {"sliding_attention": Reach(window=window), "chunked_attention": Reach(chunk=chunk)}
    kinds: list[str] = getattr(config, "layer_types", None) or []
    return {number: known[kind] for number, kind in enumerate(kinds) if kind in known}
