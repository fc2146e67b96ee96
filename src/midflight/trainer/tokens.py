"""The tokens of a batch that are in the loss of a step, each with its behaviour, advantage and age.

Tokens that are too old are refused (I2). Tokens without a log-probability or a reward are kept out
and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from midflight.errors import RunFailed
from midflight.trainer.credit import Scoring, token_advantages
from midflight.trainer.model.microbatch import Index, Predictions, on_device, predictions_of, shift
from midflight.trainer.model.scores import sampling_masks_of
from midflight.types import PackedBatch, Reason

LEAST_LOGPROB = -1000.0
"""No log-probability of a sampled token is as low as this. Engines that lack one write such a
number (-9999) in its place.
"""
MAX_MISSING_SHARE = 0.1
"""The largest share of a batch's tokens that may come without a log-probability. They are masked
and counted; more of them mean that an engine returns none.
"""
_MOST_LOGPROB = 1e-3
"""Rounding may lift a log-probability slightly above 0."""


@dataclass(frozen=True, slots=True, eq=False)
class LossTokens:
    """The K tokens of a step's loss. Everything per token is on the model's device, in its compute
    precision.
    """

    predictions: Predictions
    behaviour: Float[Tensor, " K"]
    advantage: Float[Tensor, " K"]
    age: Int[Tensor, " K"]
    """Version that begins the step minus version that sampled."""
    has_older_keys: Bool[Tensor, " K"]
    """True if some key that the token attended to when it was sampled was of an older version than
    the token.
    """
    rollout: Int[Tensor, " K"]
    group: Index
    """[K]"""
    num_rollouts: int
    masked: Mapping[Reason, int]

    @property
    def num_tokens(self) -> int:
        return len(self.group)

    def mini_batches(self, count: int) -> list[Index]:
        """The tokens of each update of the step, whole groups together, as ascending indices; fewer
        than `count` if groups are few.
        """
        count = min(count, int(self.group.max(initial=0)) + 1)  # each group alone at most
        parts = (np.flatnonzero(self.group % count == i) for i in range(count))
        return [part for part in parts if len(part)]


def step_tokens(
    batch: PackedBatch,
    scoring: Scoring,
    *,
    max_staleness: int,
    max_missing_share: float,
    dtype: torch.dtype,
    device: torch.device,
) -> LossTokens:
    """Admits the tokens of a batch to the loss: checks their age (I2), keeps out those that lack a
    log-probability or a reward.
    """
    check_staleness(batch, max_staleness=max_staleness)
    offsets = batch.row_offsets
    rollout_of_token = np.repeat(batch.row_rollout, np.diff(offsets)).astype(np.int64)
    mask, masked = _admitted(
        batch,
        rollout_of_token,
        mask_truncated=scoring.mask_truncated,
        max_missing_share=max_missing_share,
    )
    admitted = shift(mask, offsets)
    rollout = shift(rollout_of_token, offsets)[admitted]
    predictions = predictions_of(batch.token_ids, offsets, mask=mask, experts=batch.experts)
    kept = sampling_masks_of(batch, np.flatnonzero(mask))
    behaviour = shift(batch.logprobs, offsets)[admitted]
    advantage = token_advantages(batch, scoring, rollout_of_token)[admitted]
    age = batch.train_version - shift(batch.versions, offsets)[admitted]
    has_older_keys = shift(batch.kv_versions < batch.versions, offsets)[admitted]
    return LossTokens(
        predictions=replace(predictions, kept=kept),
        behaviour=on_device(behaviour, device).to(dtype),
        advantage=on_device(advantage, device).to(dtype),
        age=on_device(age, device),
        has_older_keys=on_device(has_older_keys, device),
        rollout=on_device(rollout, device),
        group=batch.rollout_group[rollout].astype(np.int64),
        num_rollouts=len(batch.rewards),
        masked=masked,
    )


def check_staleness(batch: PackedBatch, *, max_staleness: int) -> None:
    """I2: no trained token is older than `max_staleness` versions, none is from the future, none
    begins a row.
    """
    ages = batch.train_version - batch.versions[batch.loss_mask]
    if ages.size and not (ages.min() >= 0 and ages.max() <= max_staleness):
        raise RunFailed(
            f"I2: the batch of version {batch.train_version} holds tokens of age {ages.min()} to "
            f"{ages.max()}, allowed are 0 to {max_staleness}. The buffer must not lease such "
            "groups; report this with the run's journal."
        )
    assert not batch.loss_mask[batch.row_offsets[:-1]].any(), "I6: a row's first token is context"


def _admitted(
    batch: PackedBatch,
    rollout_of_token: Index,
    *,
    mask_truncated: bool,
    max_missing_share: float,
) -> tuple[NDArray[np.bool_], dict[Reason, int]]:
    """Returns which tokens are in the loss, [N], and how many were kept out of it, by reason."""
    trainable = batch.loss_mask
    missing = trainable & ~_is_logprob(batch.logprobs)
    _check_missing(int(missing.sum()), int(trainable.sum()), max_share=max_missing_share)
    present = trainable & ~missing
    unscored = present & ~np.isfinite(batch.rewards)[rollout_of_token]
    scored = present & ~unscored
    truncated = scored & batch.truncated[rollout_of_token] & mask_truncated
    kept_out = {
        Reason.NOT_FINITE: missing,
        Reason.NO_REWARD: unscored,
        Reason.TRUNCATED: truncated,
    }
    counts = {reason: int(tokens.sum()) for reason, tokens in kept_out.items() if tokens.any()}
    return scored & ~truncated, counts


def _is_logprob(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """True at each place whose number can be the log-probability of a sampled token."""
    with np.errstate(invalid="ignore"):
        return np.isfinite(values) & (values > LEAST_LOGPROB) & (values <= _MOST_LOGPROB)


def _check_missing(num_missing: int, num_tokens: int, *, max_share: float) -> None:
    if num_missing > max_share * num_tokens:
        raise RunFailed(
            f"{num_missing} of {num_tokens} tokens of the batch came without a log-probability, "
            f"more than the allowed share of {max_share:g}. Check that the engine returns the "
            "log-probability of every sampled token."
        )
