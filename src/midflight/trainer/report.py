"""The results of a step: the readings of its tokens and updates, and the report that is made of
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from midflight.trainer.credit import components_of
from midflight.trainer.formulas import diagnostics
from midflight.trainer.formulas.corrections import log_ratio
from midflight.trainer.formulas.diagnostics import TokenReadings
from midflight.trainer.model.ranks import Ranks
from midflight.trainer.objective import Factors, Objective, TokenLosses, TokenValues
from midflight.trainer.tokens import LossTokens
from midflight.types import PackedBatch, Reason, Version

_NOT_RECORDED = 255
"""A byte of `Predictions.experts` that no engine wrote."""


class Skip(StrEnum):
    """The reason why a step left the weights as they were."""

    NO_TOKENS = "no_tokens"
    NOT_FINITE = "not_finite"
    ALARM = "alarm"


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """The results of a step. Its version is made in any case: a skipped step publishes the weights
    it found under the next number.
    """

    version: Version
    loss: float
    """Mean over the updates that were made. A skipped step has the loss that was found, NaN if none
    was.
    """
    num_tokens: int
    """Tokens in the loss."""
    metrics: Mapping[str, float]
    masked: Mapping[Reason, int]
    """Tokens of the batch's mask that were kept out of the loss here."""
    skipped: Skip | None = None
    alarms: tuple[str, ...] = ()


# --- Readings -------------------------------------------------------------------------------------


_READINGS = ("proximal", "policy", "weight", "below", "above")


@dataclass(slots=True, eq=False)
class StepRecord:
    """Readings of each token, of the last update that it was in, and of each update. In an update
    each token is computed by one rank.
    """

    readings: Float[Tensor, "F K"]
    """`_READINGS`, then one line for each mask: 1 where it took the token out. 0 until the token
    was computed.
    """
    masks: Sequence[str]
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    alarms: list[str] = field(default_factory=list[str])
    num_held_back: int = 0
    """Updates that an alarm kept from being made."""
    num_micro_batches: int = 0
    num_oversized: int = 0
    critic: Mapping[str, float] = field(default_factory=dict[str, float])
    """A critic's measurements, by name."""

    @classmethod
    def of(cls, tokens: LossTokens, *, masks: Sequence[str]) -> StepRecord:
        """A record of tokens before the first of them is computed."""
        lines = len(_READINGS) + len(masks)
        readings = torch.zeros(
            lines, tokens.num_tokens, dtype=torch.float64, device=tokens.behaviour.device
        )
        return cls(readings, masks)

    def note(
        self,
        at: Int[Tensor, " k"],
        factors: Factors,
        found: TokenLosses,
        known: TokenValues,
        objective: Objective,
    ) -> None:
        """Records the readings of a micro-batch. A bypass objective's weight is the ratio
        itself.
        """
        if objective.loss.is_bypass:
            weight = log_ratio(factors.proximal, known.behaviour).exp()
        else:
            weight = factors.weight
        lines = [factors.proximal, known.now, weight, found.below, found.above]
        lines += [factors.masked[name] for name in self.masks]
        self.readings[:, at] = torch.stack([line.double() for line in lines])

    def begin_update(self, where: Int[Tensor, " k"]) -> None:
        """Forgets the readings of an earlier update of these tokens: a step may train several times
        on its batch, and each rank computes a part of the tokens.
        """
        self.readings[:, where] = 0

    def gather(self, where: Int[Tensor, " k"], ranks: Ranks) -> None:
        """Makes the readings of an update whole on every rank."""
        if ranks.size > 1:
            self.readings[:, where] = ranks.sum(self.readings[:, where])

    def updated(self, loss: float, norm: float, *, held_back: bool) -> None:
        """Records an update. `norm` of the gradient is not finite if the update was not made."""
        self.losses.append(loss)
        self.norms.append(norm)
        self.num_held_back += held_back

    @property
    def num_skipped(self) -> int:
        return sum(not math.isfinite(norm) for norm in self.norms)

    @property
    def skipped(self) -> Skip | None:
        """The reason why no update was made, or None if one was."""
        if not self.losses:
            return Skip.NO_TOKENS
        if self.num_skipped < len(self.losses):
            return None
        return Skip.ALARM if self.num_held_back else Skip.NOT_FINITE

    def mean(self, values: Sequence[float]) -> float:
        """Mean over the updates that were made; over all if none was."""
        none_was_made = self.num_skipped == len(self.norms)
        made = [none_was_made or math.isfinite(norm) for norm in self.norms]
        return float(np.mean(np.compress(made, values)))

    def observed(self, tokens: LossTokens, where: Int[Tensor, " k"]) -> TokenReadings:
        """The readings of these tokens, as diagnostics take them."""
        proximal, _, weight, below, above, *gone = self.readings[:, where]
        log_rho = log_ratio(proximal, tokens.behaviour[where].double())
        masked = {name: line.bool() for name, line in zip(self.masks, gone, strict=True)}
        return TokenReadings(
            log_rho, weight, tokens.rollout[where], below.bool(), above.bool(), masked
        )


# --- The report -----------------------------------------------------------------------------------


def token_metrics(
    record: StepRecord, tokens: LossTokens, where: Int[Tensor, " k"]
) -> dict[str, float]:
    """The metrics of an update's tokens that alarms look at."""
    return diagnostics.batch_metrics(record.observed(tokens, where))


def report_of(
    record: StepRecord,
    batch: PackedBatch,
    tokens: LossTokens,
    *,
    version: Version,
    learning_rate: float,
) -> StepReport:
    """The report of the step that makes `version`."""
    metrics = _step_metrics(record, batch, tokens, learning_rate=learning_rate)
    metrics |= _reward_metrics(batch)
    skipped = record.skipped
    if skipped is Skip.NO_TOKENS:
        return StepReport(version, math.nan, 0, metrics, tokens.masked, skipped=skipped)
    metrics |= _all_token_metrics(record, tokens)
    #: `loss`, `grad_norm`: Means over the updates: loss, and L2 norm of the gradient before clipping.
    #: Healthy: the norm is steady.
    metrics["loss"] = record.mean(record.losses)
    metrics["grad_norm"] = record.mean(record.norms)
    return StepReport(
        version,
        metrics["loss"],
        0 if skipped else tokens.num_tokens,
        metrics,
        tokens.masked,
        skipped=skipped,
        alarms=tuple(record.alarms),
    )


def _step_metrics(
    record: StepRecord, batch: PackedBatch, tokens: LossTokens, *, learning_rate: float
) -> dict[str, float]:
    metrics = {
        #: Tokens in the loss. Healthy: near `train/tokens`.
        "tokens/trained": float(tokens.num_tokens),
        #: Rows longer than `trainer.micro_batch_tokens`. Healthy: 0.
        "rows/oversized": float(record.num_oversized),
        #: `step/micro_batches`, `step/learning_rate`: Micro-batches of the first rank, and learning
        #: rate.
        "step/micro_batches": float(record.num_micro_batches),
        #: `step/updates_skipped`, `step/alarms`: Updates not made (not finite, or an alarm), and
        #: readings out of their bounds. Healthy: 0.
        "step/updates_skipped": float(record.num_skipped),
        "step/alarms": float(len(record.alarms)),
        "step/learning_rate": learning_rate,
    }
    for reason, number in tokens.masked.items():
        #: `masked/not_finite`, `masked/no_reward`, `masked/truncated`: Tokens without a valid
        #: log-probability, of rollouts without a reward, and of rollouts cut short with
        #: `objective.mask_truncated` (share). Healthy: 0; near 0.
        metrics[f"masked/{reason}"] = number / int(batch.loss_mask.sum())
    metrics |= record.critic
    experts = tokens.predictions.experts
    if experts is not None:
        recorded = (experts != _NOT_RECORDED).any(1)
        #: Share of a mixture's input tokens with a record of their experts. Healthy: 1.
        metrics["experts/recorded_share"] = float(recorded.mean())
    return metrics


def _reward_metrics(batch: PackedBatch) -> dict[str, float]:
    """Means over the rollouts that have a reward, and over those that have a component."""
    metrics = dict[str, float]()
    scored = batch.rewards[np.isfinite(batch.rewards)]
    if scored.size:
        #: `reward/mean`, `reward/<name>`: Mean reward of the batch, and of a component where it
        #: applies. Healthy: rises.
        metrics["reward/mean"] = float(scored.mean())
    for name, column in components_of(batch).items():
        applies = column[np.isfinite(column)]
        if applies.size:
            metrics[f"reward/{name}"] = float(applies.mean())
    return metrics


def _all_token_metrics(record: StepRecord, tokens: LossTokens) -> dict[str, float]:
    everything = torch.arange(tokens.num_tokens, device=tokens.behaviour.device)
    observed = record.observed(tokens, everything)
    return {
        #: Share of tokens of advantage 0. Healthy: below 0.5.
        "tokens/zero_advantage_share": float((tokens.advantage == 0).double().mean()),
        **diagnostics.batch_metrics(observed),
        **diagnostics.age_metrics(tokens.age, observed),
        **diagnostics.mismatch_metrics(
            observed.log_rho, tokens.age, has_older_keys=tokens.has_older_keys
        ),
        **diagnostics.entropy_metrics(record.readings[1]),
    }
