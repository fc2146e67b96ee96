"""Forward passes over any decoder-only model of `transformers`: one flattened pass per engine step, and rows to score."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from midflight.engines.embedded.attention import ATTENTION, Bucket, KvCache, StepPlaces
from midflight.types import Float32, Int32

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
