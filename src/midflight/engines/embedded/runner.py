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

from midflight.engines.embedded.attention import ATTENTION, Bucket, KvCache, StepTokens
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
        sequence = np.repeat(np.arange(len(batch.slots)), batch.counts)
        positions = np.arange(len(batch.tokens)) - (offsets - batch.starts)[sequence]
        self._cache.reserve(slots=int(batch.slots.max()) + 1, context=int(positions.max()) + 1)
        positions_on = self._put(positions)
        step = StepTokens(
            self._cache, slots=self._put(batch.slots[sequence]), positions=positions_on, buckets=self._buckets(batch, offsets, positions)
        )
        last = (offsets + batch.counts - 1)[batch.wanted]
        out = self.model(
            input_ids=self._put(batch.tokens)[None],
            position_ids=positions_on[None],
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=self._put(last),
            midflight_step=step,
        )
        return out.logits[0]

    @torch.inference_mode()
    def copy(self, sources: Ints, targets: Ints, *, length: int) -> None:
        """Copies the keys and values of the first `length` tokens between slots."""
        self._cache.reserve(slots=int(max(sources.max(), targets.max())) + 1, context=length)
        self._cache.copy(self._put(sources), self._put(targets), length=length)

    def _probe(self) -> None:
        """A model whose attention cannot be served fails when it is loaded, not under a request."""
        one = np.ones(1, dtype=np.int64)
        self.forward(StepBatch(slots=one - 1, starts=one - 1, counts=one, tokens=one - 1, wanted=one == 1))

    def _buckets(self, batch: StepBatch, offsets: Ints, positions: Ints) -> list[Bucket]:
        """Single tokens in one bucket; longer chunks share one only where padding at most doubles them."""
        buckets: list[Bucket] = []
        classes = np.ceil(np.log2(batch.counts)).astype(np.int64)
        edges = [0, *(np.flatnonzero(np.diff(classes)) + 1).tolist(), len(classes)]
        for first, last in itertools.pairwise(edges):
            start, end = int(offsets[first]), int(offsets[last - 1] + batch.counts[last - 1])
            part = slice(first, last)
            make = self._single_bucket if batch.counts[first] == 1 else self._chunk_bucket
            buckets.append(make(batch.slots[part], batch.counts[part], positions[start:end], start=start))
        return buckets

    def _single_bucket(self, slots: Ints, counts: Ints, positions: Ints, *, start: int) -> Bucket:
        """Where the slots are nearly a range, the whole range is read as a view: an idle row in it costs less than gathering all."""
        num, low, high = len(slots), int(slots[0]), int(slots[-1]) + 1
        common = {"start": start, "end": start + num, "num_keys": int(positions.max()) + 1}
        if high - low > num + num // 2:
            return Bucket(self._put(slots), self._put(positions)[:, None], rows=None, picks=None, **common)
        if high - low == num:
            return Bucket(slice(low, high), self._put(positions)[:, None], rows=None, picks=None, **common)
        rows, padded = np.zeros(high - low, dtype=np.int64), np.zeros((high - low, 1), dtype=np.int64)
        rows[slots - low], padded[slots - low, 0] = np.arange(num), positions
        return Bucket(slice(low, high), self._put(padded), rows=self._put(rows), picks=self._put(slots - low), **common)

    def _chunk_bucket(self, slots: Ints, counts: Ints, positions: Ints, *, start: int) -> Bucket:
        num, longest = len(slots), int(counts[-1])
        common = {"start": start, "end": start + len(positions), "num_keys": int(positions.max()) + 1}
        if counts[0] == longest:
            return Bucket(self._put(slots), self._put(positions.reshape(num, longest)), rows=None, picks=None, **common)
        filled = np.arange(longest) < counts[:, None]
        rows, padded = np.zeros((num, longest), dtype=np.int64), np.zeros((num, longest), dtype=np.int64)
        rows[filled], padded[filled] = np.arange(len(positions)), positions
        picks = np.flatnonzero(filled)
        return Bucket(self._put(slots), self._put(padded), rows=self._put(rows.reshape(-1)), picks=self._put(picks), **common)

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
