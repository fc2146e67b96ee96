"""From a packed batch to what a step computes with: tokens to predict, and per token its behaviour, advantage and age."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from midflight.config.formulas import ADVANTAGES, Advantage
from midflight.errors import RunFailed
from midflight.trainer.formulas import advantages
from midflight.trainer.model.microbatch import Index, Predictions, on_device, predictions_of, shift
from midflight.types import PackedBatch, Reason, Version

LEAST_LOGPROB = -1000.0
"""Below any log-probability a sampled token can have; engines that lack one write such numbers (-9999) in its place."""


class Skip(StrEnum):
    """Why a step left the weights as they were."""

    NO_TOKENS = "no_tokens"
    NOT_FINITE = "not_finite"
    ALARM = "alarm"


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """What a step did. Its version is made in any case: a skipped step publishes the weights it found under the next number."""

    version: Version
    loss: float
    """Mean over the updates that were made; of a skipped step what was found, NaN if nothing was."""
    num_tokens: int
    """Tokens in the loss."""
    metrics: Mapping[str, float]
    masked: Mapping[Reason, int]
    """Tokens of the batch's mask that were kept out of the loss here."""
    skipped: Skip | None = None
    alarms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scoring:
    """How rewards become advantages."""

    advantage: Advantage = "grpo"
    max_length: int = 1
    """Tokens of the longest answer, where the over-long penalty is full."""
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    teacher_weight: float = 0.0
    """Weight of a teacher's log-probabilities beside rewards, per token; 0 is no teacher."""
    counts_rewards: bool = True
    """Without them the teacher is all that is learned from."""

    def advantages(self, rewards: Float[Tensor, " M"], groups: Int[Tensor, " M"], *, lengths: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
        """Per rollout, in float64; `lengths` in generated tokens."""
        penalty = advantages.overlong_penalty(
            lengths, max_length=self.max_length, buffer=self.overlong_buffer, penalty=self.overlong_penalty
        )
        compared: Callable[[Tensor, Tensor], Tensor] = getattr(advantages, ADVANTAGES[self.advantage].function)
        return compared(rewards + penalty, groups)


@dataclass(frozen=True, slots=True, eq=False)
class LossTokens:
    """The K tokens of a step's loss. Everything per token is on the model's device, in its compute precision."""

    predictions: Predictions
    behaviour: Float[Tensor, " K"]
    advantage: Float[Tensor, " K"]
    age: Int[Tensor, " K"]
    """Version that begins the step minus version that sampled."""
    has_older_keys: Bool[Tensor, " K"]
    """Some key that the token attended to when it was sampled was of an older version than the token."""
    rollout: Int[Tensor, " K"]
    group: Index
    """[K]"""
    num_rollouts: int
    masked: Mapping[Reason, int]

    @property
    def num_tokens(self) -> int:
        return len(self.group)

    def mini_batches(self, count: int) -> list[Index]:
        """The tokens of each update of the step, whole groups together, as ascending indices; fewer than `count` if groups are few."""
        parts = (np.flatnonzero(self.group % count == i) for i in range(count))
        return [part for part in parts if len(part)]


def step_tokens(
    batch: PackedBatch, scoring: Scoring, *, max_staleness: int, max_missing_share: float, dtype: torch.dtype, device: torch.device
) -> LossTokens:
    """Admits the tokens of a batch to the loss: checks their age (I2), keeps out what lacks a log-probability or a reward."""
    check_staleness(batch, max_staleness=max_staleness)
    missing = batch.loss_mask & ~_is_logprob(batch.logprobs)
    _check_missing(int(missing.sum()), int(batch.loss_mask.sum()), max_share=max_missing_share)
    rollout_of_token = np.repeat(batch.row_rollout, np.diff(batch.row_offsets)).astype(np.int64)
    unscored = batch.loss_mask & ~missing & ~np.isfinite(batch.rewards)[rollout_of_token]
    mask = batch.loss_mask & ~missing & ~unscored
    admitted = shift(mask, batch.row_offsets)
    rollout = shift(rollout_of_token, batch.row_offsets)[admitted]
    return LossTokens(
        predictions=predictions_of(batch.token_ids, batch.row_offsets, mask=mask),
        behaviour=on_device(shift(batch.logprobs, batch.row_offsets)[admitted], device).to(dtype),
        advantage=on_device(_token_advantages(batch, scoring, rollout_of_token)[admitted], device).to(dtype),
        age=on_device(batch.train_version - shift(batch.versions, batch.row_offsets)[admitted], device),
        has_older_keys=on_device(shift(batch.kv_versions < batch.versions, batch.row_offsets)[admitted], device),
        rollout=on_device(rollout, device),
        group=batch.rollout_group[rollout].astype(np.int64),
        num_rollouts=len(batch.rewards),
        masked={reason: n for reason, n in ((Reason.NOT_FINITE, int(missing.sum())), (Reason.NO_REWARD, int(unscored.sum()))) if n},
    )


def check_staleness(batch: PackedBatch, *, max_staleness: int) -> None:
    """I2: no trained token is older than `max_staleness` versions, none is from the future, none begins a row."""
    ages = batch.train_version - batch.versions[batch.loss_mask]
    if ages.size and not (ages.min() >= 0 and ages.max() <= max_staleness):
        raise RunFailed(
            f"I2: the batch of version {batch.train_version} holds tokens of age {ages.min()} to {ages.max()}, allowed are 0 to {max_staleness}. "
            "The buffer must not lease such groups; report this with the run's journal."
        )
    assert not batch.loss_mask[batch.row_offsets[:-1]].any(), "I6: a row's first token is context"


def _token_advantages(batch: PackedBatch, scoring: Scoring, rollout_of_token: Index) -> NDArray[np.float64]:
    """[N - R], shifted: the rollout's advantage on each of its tokens, and what the teacher thinks of that token."""
    rollout = shift(rollout_of_token, batch.row_offsets)
    of_rewards = _advantages(batch, scoring, rollout_of_token)[rollout] if scoring.counts_rewards else np.zeros(len(rollout))
    if not scoring.teacher_weight:
        return of_rewards
    if batch.teacher_logprobs is None:
        raise RunFailed(
            f"the batch of version {batch.train_version} has no log-probabilities of a teacher, and distillation.weight is "
            f"{scoring.teacher_weight:g}. Send teacher_logprobs with each batch, or set distillation.weight = 0."
        )
    teacher, behaviour = (
        torch.from_numpy(shift(values, batch.row_offsets).astype(np.float64)) for values in (batch.teacher_logprobs, batch.logprobs)
    )
    return of_rewards + scoring.teacher_weight * advantages.distillation_advantage(teacher, behaviour).numpy()


def _advantages(batch: PackedBatch, scoring: Scoring, rollout_of_token: Index) -> NDArray[np.float64]:
    """[M]. Rollouts without a finite reward get 0 and are no part of their group's baseline."""
    scored = np.flatnonzero(np.isfinite(batch.rewards))
    lengths = np.bincount(rollout_of_token[batch.loss_mask], minlength=len(batch.rewards))[scored]
    found = scoring.advantages(
        torch.from_numpy(batch.rewards[scored].astype(np.float64)),
        torch.from_numpy(batch.rollout_group[scored].astype(np.int64)),
        lengths=torch.from_numpy(lengths),
    )
    of_rollouts = np.zeros(len(batch.rewards), np.float64)
    of_rollouts[scored] = found.numpy()
    return of_rollouts


def _is_logprob(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """True where a number can be the log-probability of a sampled token; rounding may lift one slightly above 0."""
    with np.errstate(invalid="ignore"):
        return np.isfinite(values) & (values > LEAST_LOGPROB) & (values <= 1e-3)


def _check_missing(num_missing: int, num_tokens: int, *, max_share: float) -> None:
    if num_missing > max_share * num_tokens:
        raise RunFailed(
            f"{num_missing} of {num_tokens} tokens of the batch came without a log-probability, more than the allowed share of {max_share:g}. "
            "Check that the engine returns the log-probability of every sampled token."
        )
