"""Choosing tokens for a whole batch at once, with noise that depends on (seed, position, token id)
and nothing else (I5).

SplitMix64 (Steele, Lea and Flood 2014) is used as a counter-based generator, and the Gumbel-max
trick draws from the distribution: token = argmax over kept ids of log p + g, g = -log(-log u). The
noise of an id does not depend on other rows of the batch, nor on how often the generation was
interrupted. So the same request gives the same tokens.

Rows are sampled a few at a time: the numbers of a large vocabulary and many rows would go through
main memory again and again.

Before temperature the logits are adjusted, in this order: penalties, bias, grammar. Rows that ask
for nothing are not touched.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midflight.types.sampling_masks import pack_kept

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """The penalties of P of a step's rows. They are a function of the tokens so far, never of
    state, so that a resume changes nothing (I5).
    """

    rows: Ints
    """[P]"""
    tokens: Ints
    """[P, L] prompt and output so far. Entries after them are ignored."""
    num_prompt: Ints
    """[P]"""
    length: Ints
    """[P] prompt and output together."""
    repetition: NDArray[np.float64]
    frequency: NDArray[np.float64]
    presence: NDArray[np.float64]

    def part(self, start: int, stop: int) -> Penalties | None:
        """The penalties of the step's rows [start, stop), counted from `start`, or `None` if no row
        has any.
        """
        own = (self.rows >= start) & (self.rows < stop)
        if not own.any():
            return None
        return Penalties(
            rows=self.rows[own] - start,
            tokens=self.tokens[own],
            num_prompt=self.num_prompt[own],
            length=self.length[own],
            repetition=self.repetition[own],
            frequency=self.frequency[own],
            presence=self.presence[own],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Biases:
    """Triples of equal place in three arrays: `values` is added to the logit of `token_ids` in
    `rows`.
    """

    rows: Ints
    token_ids: Ints
    values: NDArray[np.float64]

    def part(self, start: int, stop: int) -> Biases | None:
        """See `Penalties.part`."""
        own = (self.rows >= start) & (self.rows < stop)
        if not own.any():
            return None
        return Biases(self.rows[own] - start, self.token_ids[own], self.values[own])


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """The ids that grammars allow, for the rows that have a grammar."""

    rows: Ints
    """[G]"""
    allowed: NDArray[np.bool_]
    """[G, V]; each row allows at least one id."""

    def part(self, start: int, stop: int) -> Masks | None:
        """See `Penalties.part`."""
        own = (self.rows >= start) & (self.rows < stop)
        if not own.any():
            return None
        return Masks(self.rows[own] - start, self.allowed[own])

    def without(self, suppressed: Ints) -> tuple[Masks, NDArray[np.bool_]]:
        """Takes ids [G, W] (padded with -1) away. Also returns the rows [G] that stayed as they
        were, because nothing would have been left.
        """
        fewer = self.allowed.copy()
        row, column = np.nonzero(suppressed >= 0)
        fewer[row, suppressed[row, column]] = False
        empty = np.asarray(~fewer.any(1))
        fewer[empty] = self.allowed[empty]
        return Masks(self.rows, fewer), empty


def penalised(logits: Tensor, penalties: Penalties) -> Tensor:
    """Logits [R, V] with, in the rows that ask for it,

        z_j <- z_j / r if z_j > 0 else z_j r    for every id j in prompt or output,
        z_j <- z_j - f n_j - p [n_j > 0]        where n_j counts j in the output alone.

    The first line is Keskar et al. 2019 (CTRL), eq. 2, which divides negative logits too. They
    would become likelier.
    """
    rows = _on(penalties.rows, logits)
    tokens = _on(penalties.tokens, logits)
    index = torch.arange(tokens.shape[1], device=logits.device)
    before = index < _column(penalties.length, logits)
    output = before & (index >= _column(penalties.num_prompt, logits))
    part = logits[rows]
    seen = _counts(tokens, before, like=part) > 0
    repetition = _column(penalties.repetition, logits)
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where(seen, repeated, part)
    counts = _counts(tokens, output, like=part)
    frequency = _column(penalties.frequency, logits)
    presence = _column(penalties.presence, logits)
    part = part - frequency * counts - presence * (counts > 0)
    return logits.index_copy(0, rows, part)


def biased(logits: Tensor, biases: Biases) -> Tensor:
    """Logits [R, V] with the biases added."""
    index = (_on(biases.rows, logits), _on(biases.token_ids, logits))
    return logits.index_put(index, _on(biases.values, logits).to(logits.dtype), accumulate=True)


def masked(logits: Tensor, masks: Masks) -> Tensor:
    """Logits [R, V], -inf where a row's grammar forbids the id."""
    rows = _on(masks.rows, logits)
    part = logits[rows].masked_fill(~_on(masks.allowed, logits), -torch.inf)
    return logits.index_copy(0, rows, part)


def _counts(tokens: Tensor, counted: Tensor, *, like: Tensor) -> Tensor:
    """The number of times that each id [P, V] occurs among the `counted` [P, L] of
    `tokens` [P, L].
    """
    return torch.zeros_like(like).scatter_add_(1, tokens, counted.to(like.dtype))


def _on(values: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


def _column(values: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


def _signed(value: int) -> int:
    """The two's complement reading of 64 unsigned bits: torch computes modulo 2^64 on signed
    words.
    """
    return value - 2**64 if value >= 2**63 else value


_UNSIGNED = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GAMMA, _MULTIPLIER_1, _MULTIPLIER_2 = map(_signed, _UNSIGNED)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """The parameters for sampling each of R rows, as arrays of shape [R] unless said otherwise."""

    temperature: NDArray[np.float64]
    top_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    """0 is no limit."""
    min_p: NDArray[np.float64]
    seeds: NDArray[np.int64]
    """The unsigned seed's bits."""
    positions: NDArray[np.int64]
    """Absolute index that the sampled token will have."""
    suppressed: NDArray[np.int64] | None
    """[R, W] ids that may not be sampled, padded with -1. `None` if no row has any."""
    penalties: Penalties | None = None
    biases: Biases | None = None
    masks: Masks | None = None
    num_top: NDArray[np.int64] | None = None
    """The number of likeliest ids to report. `None` if no row asks."""
    wants_kept: NDArray[np.bool_] | None = None
    """True for rows whose truncation is recorded. `None` if no row asks."""

    def part(self, start: int, stop: int) -> SamplingBatch:
        """The options of the rows [start, stop)."""
        own = slice(start, stop)
        return SamplingBatch(
            temperature=self.temperature[own],
            top_p=self.top_p[own],
            top_k=self.top_k[own],
            min_p=self.min_p[own],
            seeds=self.seeds[own],
            positions=self.positions[own],
            suppressed=None if self.suppressed is None else self.suppressed[own],
            penalties=None if self.penalties is None else self.penalties.part(start, stop),
            biases=None if self.biases is None else self.biases.part(start, stop),
            masks=None if self.masks is None else self.masks.part(start, stop),
            num_top=None if self.num_top is None else self.num_top[own],
            wants_kept=None if self.wants_kept is None else self.wants_kept[own],
        )


@dataclass(frozen=True, slots=True, eq=False)
class SampledIds:
    """The ids chosen for R rows, and the likeliest ids of each. At most W are listed, likeliest
    first (ties: lower id), filled up with id -1.
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    """[R] of the chosen ids."""
    top_ids: NDArray[np.int64]
    """[R, W]"""
    top_logprobs: NDArray[np.float64]
    """[R, W]"""
    kept: tuple[bytes | None, ...] = ()
    """[R] the part of the vocabulary that truncation left, as records of `types.sampling_masks`. It is `None`
    for rows that do not ask. Empty if no row asks.
    """

    def of(self, rows: NDArray[np.bool_]) -> SampledIds:
        """The same for the rows [R] that are true."""
        if rows.all():
            return self
        kept = tuple(itertools.compress(self.kept, rows.tolist()))
        return SampledIds(
            self.token_ids[rows],
            self.logprobs[rows],
            self.top_ids[rows],
            self.top_logprobs[rows],
            kept,
        )


def sample(logits: Tensor, batch: SamplingBatch) -> SampledIds:
    """Samples from logits [R, V]. All log-probabilities are of the distribution sampled: after
    adjustments, temperature and truncation, renormalised.

    Temperature 0 is greedy: the likeliest token after adjustments, with log-probabilities of
    temperature 1 and no truncation.
    """
    num, vocab_size = logits.shape
    rows = max(1, _AT_ONCE // vocab_size) if logits.device.type == "cpu" else num
    if num > rows:
        parts: list[SampledIds] = []
        for start in range(0, num, rows):
            stop = start + rows
            parts.append(sample(logits[start:stop], batch.part(start, stop)))
        return _together(parts)
    logits = logits.double()
    if batch.penalties is not None:
        logits = penalised(logits, batch.penalties)
    if batch.biases is not None:
        logits = biased(logits, batch.biases)
    if batch.masks is not None:
        logits = masked(logits, batch.masks)
    if batch.suppressed is not None:
        logits = _suppress(logits, batch.suppressed)
    greedy = batch.temperature == 0
    temperature = np.where(greedy, 1.0, batch.temperature)
    scaled = logits / _column(temperature, logits) if (temperature != 1).any() else logits
    log_p = _truncated(torch.log_softmax(scaled, dim=-1), batch)
    token_ids = logits.argmax(-1) if greedy.all() else _drawn(log_p, batch)
    if greedy.any():
        token_ids = torch.where(_on(greedy, logits), logits.argmax(-1), token_ids)
    logprobs = log_p.gather(-1, token_ids[:, None])[:, 0].cpu().numpy()
    if batch.num_top is not None:
        top_ids, top_logprobs = _likeliest(log_p, batch.num_top)
    else:
        top_ids = np.empty((len(log_p), 0), np.int64)
        top_logprobs = np.empty((len(log_p), 0))
    kept = _kept(log_p, batch.wants_kept) if batch.wants_kept is not None else ()
    return SampledIds(token_ids.cpu().numpy(), logprobs, top_ids, top_logprobs, kept)


_AT_ONCE = 2**17
"""The number of logits that are sampled from at once on a CPU. With the temporary arrays they take
a few megabytes.
"""


def _together(parts: list[SampledIds]) -> SampledIds:
    """One `SampledIds` of several, the columns of the likeliest ids padded to the widest."""
    width = max(part.top_ids.shape[1] for part in parts)
    top_ids: list[Ints] = []
    top_logprobs: list[NDArray[np.float64]] = []
    for part in parts:
        padding = ((0, 0), (0, width - part.top_ids.shape[1]))
        top_ids.append(np.pad(part.top_ids, padding, constant_values=-1))
        top_logprobs.append(np.pad(part.top_logprobs, padding))
    return SampledIds(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate(top_ids),
        np.concatenate(top_logprobs),
        tuple(itertools.chain.from_iterable(part.kept for part in parts)),
    )


def _drawn(log_p: Tensor, batch: SamplingBatch) -> Tensor:
    """argmax of log p + g, [R]; ties: lower id. Logarithms are computed only for the noise of ids
    that may win. These are some dozens.

    With E = -log u the winner has the least E / p, and 1 - u <= E <= 37.5 (1 - u), because u >=
    2^-54. So it is among the ids whose (1 - u) / p is at most `_NEAR` times the least of all.
    Single precision decides this; an id whose p it cannot tell from 0 never wins.
    """
    bits = _noise_bits(batch.seeds, batch.positions, vocab_size=log_p.shape[1], device=log_p.device)
    left = ((~bits >> 11) & (2**53 - 1)).float().add_(0.5).mul_(2.0**-53)
    ratio = left.div_(log_p.float().exp_())
    near = ratio <= _NEAR * ratio.amin(-1, keepdim=True)
    rows, ids = np.nonzero(near.cpu().numpy())
    index = _on(rows, log_p), _on(ids, log_p)
    scores = (log_p[index] - _exponential(bits[index]).log_()).cpu().numpy()
    order = np.lexsort((ids, -scores, rows))
    _, first = np.unique(rows[order], return_index=True)
    return _on(ids[order][first], log_p)


_NEAR = 40.0


def _kept(log_p: Tensor, wanted: NDArray[np.bool_]) -> tuple[bytes | None, ...]:
    rows = np.flatnonzero(wanted)
    possible = (log_p[_on(rows, log_p)] > -torch.inf).cpu().numpy()
    records = dict(zip(rows.tolist(), pack_kept(possible), strict=True))
    return tuple(records.get(row) for row in range(len(log_p)))


def gumbel_noise(
    seeds: NDArray[np.int64], positions: NDArray[np.int64], *, vocab_size: int, device: torch.device
) -> Tensor:
    """Noise [R, V] in float64: g_j = -log(-log u_j), with u_j = ((mix(key + (j + 1) GAMMA) >> 11) +
    1/2) 2^-53 and key = mix(mix(seed) + (position + 1) GAMMA).
    """
    bits = _noise_bits(seeds, positions, vocab_size=vocab_size, device=device)
    return _exponential(bits).log_().neg_()


def _noise_bits(
    seeds: NDArray[np.int64], positions: NDArray[np.int64], *, vocab_size: int, device: torch.device
) -> Tensor:
    """The mixed words [R, V] that u is made of. numpy has shifts of unsigned words, and takes half
    the time of torch.
    """
    steps = (positions + 1).view(np.uint64) * np.uint64(_UNSIGNED[0])
    key = _mixed(_mixed(seeds.view(np.uint64)) + steps)
    strides = _strides(vocab_size, device)
    if device.type == "cpu":
        words = _mixed(key[:, None] + strides.numpy().view(np.uint64))
        return torch.from_numpy(words.view(np.int64))
    return _mix(torch.from_numpy(key.view(np.int64)).to(device)[:, None] + strides)


def _exponential(bits: Tensor) -> Tensor:
    """-log u in float64."""
    return ((bits >> 11) & (2**53 - 1)).double().add_(0.5).mul_(2.0**-53).log_().neg_()


@cache
def _strides(vocab_size: int, device: torch.device) -> Tensor:
    """(j + 1) GAMMA of each id j."""
    return torch.arange(1, vocab_size + 1, device=device) * _GAMMA


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser."""
    z = z ^ (z >> np.uint64(30))
    z *= np.uint64(_UNSIGNED[1])
    z ^= z >> np.uint64(27)
    z *= np.uint64(_UNSIGNED[2])
    z ^= z >> np.uint64(31)
    return z


def _mix(z: Tensor) -> Tensor:
    """Computes `_mixed` in place. The masks make torch's arithmetic shifts logical."""
    z ^= (z >> 30) & (2**34 - 1)
    z *= _MULTIPLIER_1
    z ^= (z >> 27) & (2**37 - 1)
    z *= _MULTIPLIER_2
    z ^= (z >> 31) & (2**33 - 1)
    return z


def _suppress(logits: Tensor, suppressed: NDArray[np.int64]) -> Tensor:
    rows, columns = np.nonzero(suppressed >= 0)
    if len(rows):
        logits = logits.clone()
        logits[torch.from_numpy(rows), torch.from_numpy(suppressed[rows, columns])] = -torch.inf
    return logits


def _truncated(log_p: Tensor, batch: SamplingBatch) -> Tensor:
    """log p [R, V], truncated. Only the rows that ask for it are cut and renormalised, because the
    others need no sort.
    """
    nucleus = (batch.top_p < 1) | (batch.top_k > 0)
    rows = np.flatnonzero((nucleus | (batch.min_p > 0)) & (batch.temperature > 0))
    if not len(rows):
        return log_p
    index = torch.from_numpy(rows).to(log_p.device)
    part = log_p[index]
    kept = part >= part.amax(-1, keepdim=True) + _column(batch.min_p[rows], part).log()
    if nucleus[rows].any():
        top_k = _column(batch.top_k[rows], part)
        top_p = _column(batch.top_p[rows], part)
        kept &= _nucleus(part, top_k=top_k, top_p=top_p)
    part = part.masked_fill(~kept, -torch.inf)
    return log_p.index_copy(0, index, part - part.logsumexp(-1, keepdim=True))


def _nucleus(log_p: Tensor, *, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The mask of the ids kept of [r, V]: the `top_k` likeliest ids (ties: lower id first), and
    among these, renormalised, the fewest that hold `top_p`.
    """
    sorted_log_p, order = log_p.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(log_p.shape[-1], device=log_p.device)
    keep = (rank < top_k) | (top_k == 0)
    p = sorted_log_p.exp() * keep
    p /= p.sum(-1, keepdim=True)
    mass_before = p.cumsum(-1) - p
    keep &= (mass_before < top_p) | (top_p >= 1)
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def _likeliest(
    log_p: Tensor, num_top: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The likeliest ids of each row of [R, V] that are possible at all, and their
    log-probabilities. `num_top` [R] is their number.
    """
    width = min(int(num_top.max(initial=0)), log_p.shape[-1])
    ids = np.full((len(log_p), width), -1)
    logprobs = np.zeros((len(log_p), width))
    if not width:
        return ids, logprobs
    rows = np.flatnonzero(num_top)
    part = log_p[_on(rows, log_p)]
    # Equal values at the border are all taken in, so that ids decide between them; a stable sort
    # would visit the whole vocabulary.
    near = (part >= part.topk(width).values[:, -1:]) & (part > -torch.inf)
    row, column = near.nonzero().T.cpu().numpy()
    value = part[near].cpu().numpy()
    order = np.lexsort((column, -value, row))
    row = row[order]
    column = column[order]
    value = value[order]
    rank = np.arange(len(row)) - np.searchsorted(row, np.arange(len(rows)))[row]
    kept = rank < num_top[rows][row]
    ids[rows[row[kept]], rank[kept]] = column[kept]
    logprobs[rows[row[kept]], rank[kept]] = value[kept]
    return ids, logprobs
