"""Forward passes over any decoder-only model of `transformers`: one flattened pass per engine step,
by the model's own modules.
"""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from midflight.engines.embedded.attention import (
    ATTENTION,
    STEP,
    Bucket,
    KvCache,
    Reach,
    StepPlaces,
    Stretch,
)
from midflight.engines.embedded.states import RUNNING, Key, States, cohorts, stateful

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """Sequence i has tokens [starts_i, starts_i + counts_i) of slot i in the step. Single-token
    sequences come first, in order of slots, then the others by ascending count.
    """

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
    """[N] whether the logits at the token are needed."""


class Runner:
    """Owns the model, the keys and values, and the states. Not thread-safe: only the decode thread
    calls it.
    """

    recomputes = False
    """True if nothing is kept of a sequence, so that each step must have all of its tokens."""

    def __init__(
        self, model: PreTrainedModel, *, max_running: int, max_context: int, serial: bool = False
    ) -> None:
        """With `serial` layers with states take one token at a time once they have a state."""
        self.model = model.eval()
        self.device: torch.device = model.device
        model.set_attn_implementation(ATTENTION)
        self._max_running = max_running
        self._max_context = max_context
        self._serial = serial
        self.keeps_states = stateful(model)
        """True if a sequence can only go on where its state was taken."""
        self.forget_keys()
        self._reaches = reaches(model.config.get_text_config())
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=self.device)

    def forget_keys(self) -> None:
        """Drops the keys, values and states of all slots. Room for new ones is made as it is
        needed.
        """
        self._cache = KvCache(max_slots=self._max_running, max_context=self._max_context)
        self._states: States | None = None
        if self.keeps_states:
            self._states = States(max_slots=self._max_running)
            self._states.serial = self._serial

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Logits [R, V] of the wanted tokens; keys, values and states of all tokens are stored."""
        offsets = np.cumsum(batch.counts) - batch.counts
        num_slots = int(batch.slots.max()) + 1
        self._cache.reserve(slots=num_slots, context=int(batch.positions.max()) + 1)
        columns = np.stack((batch.tokens, batch.positions, batch.token_slots))
        tokens, positions, slots = self._put(columns).unbind()
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
        states = None
        if self._states is not None and at_end:
            states = self._states.take(slot)
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
        model_picks = "logits_to_keep" in self._takes
        if model_picks:
            options["logits_to_keep"] = 0 if picks is None else picks  # 0 is all
        taken = {name: value for name, value in options.items() if name in self._takes}
        logits = self.model(input_ids=tokens[None], **taken).logits[0]
        if picks is None or model_picks:
            return logits
        return logits[picks]

    def _buckets(
        self, batch: StepBatch, offsets: Ints, positions: Tensor, slots: Tensor
    ) -> list[Bucket]:
        """Single tokens are in one bucket. Longer chunks share one only if padding at most doubles
        them.

        `positions` and `slots` [N] of all tokens, on the device.
        """
        num_single = int(np.searchsorted(batch.counts, 1, side="right"))
        buckets: list[Bucket] = []
        if num_single:
            buckets.append(self._single_bucket(batch, num_single, positions, slots))
        if num_single == len(batch.counts):
            return buckets
        classes = np.ceil(np.log2(batch.counts[num_single:])).astype(np.int64)
        edges = num_single + np.flatnonzero(np.diff(classes)) + 1
        bounds = [num_single, *edges.tolist(), len(batch.counts)]
        for first, last in itertools.pairwise(bounds):
            start = int(offsets[first])
            end = int(offsets[last - 1] + batch.counts[last - 1])
            part = slice(first, last)
            buckets.append(self._chunk_bucket(batch, part, positions, start=start, end=end))
        return buckets

    def _single_bucket(
        self, batch: StepBatch, num: int, positions: Tensor, slots: Tensor
    ) -> Bucket:
        """The bucket of sequences that have a single token. If the slots are nearly a range, the
        whole range is read as a view: an idle row in it costs less than gathering all.
        """
        low = int(batch.slots[0])
        high = int(batch.slots[num - 1]) + 1
        width = high - low
        num_keys = int(batch.positions[:num].max()) + 1
        if width == num:
            where = slice(low, high)
            return Bucket(where, positions[:num, None], start=0, end=num, num_keys=num_keys)
        if width > num + num // 2:
            return Bucket(slots[:num], positions[:num, None], start=0, end=num, num_keys=num_keys)
        rows = np.zeros(width, dtype=np.int64)
        padded = np.zeros((width, 1), dtype=np.int64)
        picks = batch.slots[:num] - low
        rows[picks] = np.arange(num)
        padded[picks, 0] = batch.positions[:num]
        return Bucket(
            slice(low, high),
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
        return Bucket(
            slots,
            self._put(padded),
            start=start,
            end=end,
            num_keys=num_keys,
            rows=self._put(rows.reshape(-1)),
            picks=self._put(np.flatnonzero(filled)),
        )

    def _put(self, values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


@dataclass(frozen=True, slots=True, eq=False)
class SpanOfSlot:
    """Implements `SpanState`."""

    stretch: Stretch
    states: Mapping[Key, Tensor] | None
    """The states behind the last of its tokens, if they are known there."""

    @property
    def num_bytes(self) -> int:
        num = sum([tensor.nbytes for tensor in self.stretch])
        if self.states is not None:
            num += sum([tensor.nbytes for tensor in self.states.values()])
        return num

    @property
    def has_state(self) -> bool:
        return self.states is not None

    def cut(self, start: int, end: int) -> "SpanOfSlot":
        length = self.stretch[0].shape[2] if self.stretch else end
        stretch = tuple([taken[:, :, start:end].clone() for taken in self.stretch])
        return SpanOfSlot(stretch, self.states if end == length else None)


def reaches(config: PreTrainedConfig) -> dict[int, Reach]:
    """Returns the reach of each layer that sees only a part of the tokens before it, as the
    configuration says.
    """
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    known = {"sliding_attention": Reach(window=window), "chunked_attention": Reach(chunk=chunk)}
    kinds: list[str] = getattr(config, "layer_types", None) or []
    return {number: known[kind] for number, kind in enumerate(kinds) if kind in known}
