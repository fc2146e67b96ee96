"""Log-probabilities of tokens from the last hidden states, over the whole vocabulary or over the
part that truncation left, in memory that does not grow with the vocabulary.

Logits are made for a few predictions at a time, read, and forgotten; the backward makes them again.
At most `CHUNK` of them exist at once, for any vocabulary and any number of predictions.

A token that was drawn from a part S of the vocabulary is scored over that part:

    log pi_S(t) = z_t - log sum_{j in S} exp z_j,   t in S

DeepSeek-V3.2 (2512.02556), section 3.1, "Keep Sampling Mask": with the S of the engine's
truncation, behaviour and policy are distributions over the same set, and their ratio is an
importance weight. The logits outside S have no gradient. The divergence from a reference and the
entropy are those over S too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from midflight.errors import RunFailed
from midflight.types import PackedBatch
from midflight.types.sampling_masks import unpack_kept

Index = NDArray[np.int64]

CUT = -1e5
"""Stands in place of the logit of an id outside S: its probability is 0 in every precision, and
products with it stay finite.
"""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMasks:
    """The ids that truncation left for each of K predictions: prediction k has those in
    [offsets[k], offsets[k + 1]), and none where nothing was cut off.
    """

    ids: Index
    offsets: Index
    """[K + 1]"""

    def at(self, chosen: Index) -> SamplingMasks:
        """Returns the ids of these predictions only."""
        counts = np.diff(self.offsets)[chosen]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        moved = np.repeat(self.offsets[chosen] - offsets[:-1], counts)
        return SamplingMasks(self.ids[moved + np.arange(offsets[-1])], offsets)

    def cut(self, logits: Float[Tensor, "k V"], part: slice | None = None) -> Float[Tensor, "k V"]:
        """Logits of all predictions, or of `part` of them, without those of ids that were cut off.
        Logits that need no gradient may be changed in place.
        """
        first, last, _ = (part or slice(None)).indices(len(self.offsets) - 1)
        counts = np.diff(self.offsets[first : last + 1])
        if not counts.any():
            return logits
        rows = torch.from_numpy(np.repeat(np.arange(last - first), counts)).to(logits.device)
        ids = torch.from_numpy(self.ids[self.offsets[first] : self.offsets[last]]).to(logits.device)
        kept = logits[rows, ids]
        if not logits.requires_grad and counts.all():
            return logits.fill_(CUT).index_put_((rows, ids), kept)
        was_cut = torch.from_numpy(counts > 0).to(logits.device)
        return logits.masked_fill(was_cut[:, None], CUT).index_put((rows, ids), kept)


def sampling_masks_of(batch: PackedBatch, places: Index) -> SamplingMasks | None:
    """The ids that were kept for the tokens at these places in the batch, or None if the batch has
    no records. Raises `RunFailed` if a record can't be read, or lacks its token.
    """
    if batch.kept is None or batch.kept_lengths is None:
        return None
    ends = np.cumsum(batch.kept_lengths, dtype=np.int64)
    lengths = batch.kept_lengths[places].astype(np.int64)
    begins = np.cumsum(lengths) - lengths
    own = np.repeat(ends[places] - lengths - begins, lengths) + np.arange(lengths.sum())
    try:
        kept = SamplingMasks(*unpack_kept(batch.kept[own], lengths))
    except ValueError as error:
        raise RunFailed(
            f"the batch of version {batch.train_version} says in `kept` what truncation left, and "
            f"has {error}. Send the bytes of `types.sampling_masks`."
        ) from error
    token = batch.token_ids[places]
    counts = np.diff(kept.offsets)
    prediction_of_id = np.repeat(np.arange(len(places)), counts)
    is_token = kept.ids == np.repeat(token, counts)
    hits = np.bincount(prediction_of_id[is_token], minlength=len(places))
    lacking = np.flatnonzero((counts > 0) & (hits == 0))
    if lacking.size:
        raise RunFailed(
            f"the batch of version {batch.train_version} has token {token[lacking[0]]}, which is "
            f"not among the {counts[lacking[0]]} ids that truncation is said to have left. Records "
            "and tokens are out of step: check the engine, or set correction.sampling_masks = "
            "false."
        )
    return kept


CHUNK = 2**24
"""Logits in memory at once: 64 MiB in float32. A smaller chunk reads the layer's weights more
often, a larger one gains little.
"""


def token_scores(
    hidden: Float[Tensor, "k H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " k"],
    *,
    temperature: float,
    with_entropy: bool = False,
    chunk: int = CHUNK,
    kept: SamplingMasks | None = None,
) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"] | None]:
    """log softmax(z / temperature) at the targets, and the entropy of that distribution in nats if
    it is asked for; z = hidden weight^T + bias.

    If ids were cut off, the distribution is over the `kept` ones. Numbers are in float32 (float64
    for float64 inputs), and both have gradients for hidden, weight and bias.
    """
    rows = max(1, chunk // weight.shape[0])
    scores = cast(
        "tuple[Tensor, Tensor]",
        _TokenScores.apply(hidden, weight, bias, targets, temperature, with_entropy, rows, kept),
    )
    return scores[0], scores[1] if with_entropy else None


class _TokenScores(torch.autograd.Function):
    """With p = softmax(z): d log p_t / dz = onehot_t - p, and dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy: bool,
        rows: int,
        cut: SamplingMasks | None,
    ):
        precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        chosen = hidden.new_empty(len(targets), dtype=precise)
        total = torch.empty_like(chosen)
        entropies = torch.zeros_like(chosen)
        kept: Tensor | None = None
        for part in _parts(len(targets), rows):
            z = _logits(hidden[part], weight, bias, temperature, precise)
            if cut is not None:
                z = cut.cut(z, part)
            chosen[part] = z.gather(-1, targets[part, None]).squeeze(-1)
            total[part] = z.logsumexp(-1)
            if entropy:
                p = (z - total[part, None]).exp_()
                entropies[part] = total[part] - p.mul_(z).sum(-1)
            kept = z
        ctx.temperature = temperature
        ctx.entropy = entropy
        ctx.rows = rows
        ctx.cut = cut
        # Where one chunk was enough, its logits are within the bound and need not be made again.
        whole = kept if len(targets) <= rows and any(ctx.needs_input_grad[:3]) else None
        ctx.save_for_backward(hidden, weight, bias, targets, total, entropies, whole)
        return chosen - total, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        hidden, weight, bias, targets, total, entropies, whole = ctx.saved_tensors
        by_logprob, by_entropy = gradients
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        precise = total.dtype
        hidden_gradient = torch.empty_like(hidden) if to_hidden else None
        weight_gradient: Tensor | None = None
        if to_weight:
            weight_gradient = torch.zeros(weight.shape, dtype=precise, device=weight.device)
        bias_gradient: Tensor | None = None
        if to_bias:
            bias_gradient = torch.zeros(bias.shape, dtype=precise, device=bias.device)
        for part in _parts(len(targets), ctx.rows):
            z = whole
            if z is None:
                z = _logits(hidden[part], weight, bias, ctx.temperature, precise)
                if ctx.cut is not None:
                    z = ctx.cut.cut(z, part)
            log_p = z - total[part, None]
            dz = log_p.exp()
            if ctx.entropy:
                slope = by_entropy[part, None] * (log_p + entropies[part, None])
                dz *= -(by_logprob[part, None] + slope)
            else:
                dz *= -by_logprob[part, None]
            dz.scatter_add_(-1, targets[part, None], by_logprob[part, None])
            if ctx.temperature != 1:
                dz = dz / ctx.temperature
            dz = dz.to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient[part] = dz @ weight
            if weight_gradient is not None:
                _add_product(weight_gradient, dz.t(), hidden[part])
            if bias_gradient is not None:
                bias_gradient += dz.sum(0)
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None else bias_gradient.to(bias.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, dtype: torch.dtype
) -> Tensor:
    z = torch.nn.functional.linear(hidden, weight, bias).to(dtype)
    return z if temperature == 1 else z.div_(temperature)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b. If the precisions allow it, this makes no other tensor of the size of `total`,
    which is the size of the layer.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _parts(count: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
