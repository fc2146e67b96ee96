"""What the updates of a step leave behind, and the report made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from midflight.trainer.formulas import diagnostics
from midflight.trainer.formulas.corrections import log_ratio
from midflight.trainer.formulas.diagnostics import Observed
from midflight.trainer.model.parallel import Ranks
from midflight.trainer.objective import Factors, Known, Objective, TokenLosses
from midflight.trainer.step import LossTokens, Skip, StepReport
from midflight.types import PackedBatch, Version

_READINGS = ("proximal", "policy", "weight", "below", "above")


@dataclass(slots=True, eq=False)
class StepRecord:
    """Readings of each token, and of each update. Every token is in one update of a step, and is computed by one rank."""

    readings: Float[Tensor, "F K"]
    """`_READINGS`, then one line for each mask: 1 where it took the token out. 0 until the token was computed."""
    masks: Sequence[str]
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    alarms: list[str] = field(default_factory=list[str])
    num_held_back: int = 0
    """Updates that an alarm kept from being made."""
    num_micro_batches: int = 0
    num_oversized: int = 0
    critic: Mapping[str, float] = field(default_factory=dict[str, float])
    """What a critic measured, by name."""

    @classmethod
    def of(cls, tokens: LossTokens, *, masks: Sequence[str]) -> StepRecord:
        lines = len(_READINGS) + len(masks)
        return cls(torch.zeros(lines, tokens.num_tokens, dtype=torch.float64, device=tokens.behaviour.device), masks)

    def note(self, at: Int[Tensor, " k"], factors: Factors, found: TokenLosses, known: Known, objective: Objective) -> None:
        """The readings of a micro-batch. A bypass objective's weight is the ratio itself."""
        weight = log_ratio(factors.proximal, known.behaviour).exp() if objective.loss.is_bypass else factors.weight
        lines = [factors.proximal, known.now, weight, found.below, found.above, *(factors.masked[name] for name in self.masks)]
        self.readings[:, at] = torch.stack([line.double() for line in lines])

    def gather(self, where: Int[Tensor, " k"], ranks: Ranks) -> None:
        """Makes the readings of an update whole on every rank."""
        if ranks.size > 1:
            self.readings[:, where] = ranks.sum(self.readings[:, where])

    def updated(self, loss: float, norm: float, *, held_back: bool) -> None:
        """`norm` of the gradient; not finite if the update was not made."""
        self.losses.append(loss)
        self.norms.append(norm)
        self.num_held_back += held_back

    @property
    def num_skipped(self) -> int:
        return sum(not math.isfinite(norm) for norm in self.norms)

    @property
    def skipped(self) -> Skip | None:
        """Why no update was made; none if one was."""
        if not self.losses:
            return Skip.NO_TOKENS
        if self.num_skipped < len(self.losses):
            return None
        return Skip.ALARM if self.num_held_back else Skip.NOT_FINITE

    def mean(self, values: Sequence[float]) -> float:
        """Over the updates that were made; over all if none was."""
        made = [math.isfinite(norm) or self.num_skipped == len(self.norms) for norm in self.norms]
        return float(np.mean(np.compress(made, values)))

    def observed(self, tokens: LossTokens, where: Int[Tensor, " k"]) -> Observed:
        proximal, _, weight, below, above, *gone = self.readings[:, where]
        log_rho = log_ratio(proximal, tokens.behaviour[where].double())
        masked = {name: line.bool() for name, line in zip(self.masks, gone, strict=True)}
        return Observed(log_rho, weight, tokens.rollout[where], below.bool(), above.bool(), masked)


def token_metrics(record: StepRecord, tokens: LossTokens, where: Int[Tensor, " k"]) -> dict[str, float]:
    """What an alarm looks at, of the tokens of an update."""
    return diagnostics.batch_metrics(record.observed(tokens, where))


def report_of(record: StepRecord, batch: PackedBatch, tokens: LossTokens, *, version: Version, learning_rate: float) -> StepReport:
    """What the step that makes `version` did."""
    metrics = {
        "tokens/trained": float(tokens.num_tokens),
        "rows/oversized": float(record.num_oversized),
        "step/micro_batches": float(record.num_micro_batches),
        "step/updates_skipped": float(record.num_skipped),
        "step/alarms": float(len(record.alarms)),
        "step/learning_rate": learning_rate,
        **{f"masked/{reason}": n / int(batch.loss_mask.sum()) for reason, n in tokens.masked.items()},
        **record.critic,
    }
    scored = batch.rewards[np.isfinite(batch.rewards)]
    if scored.size:
        metrics["reward/mean"] = float(scored.mean())
    skipped = record.skipped
    if skipped is Skip.NO_TOKENS:
        return StepReport(version, math.nan, 0, metrics, tokens.masked, skipped=skipped)
    metrics |= _all_metrics(record, tokens) | {"loss": record.mean(record.losses), "grad_norm": record.mean(record.norms)}
    num_trained = 0 if skipped else tokens.num_tokens
    return StepReport(version, metrics["loss"], num_trained, metrics, tokens.masked, skipped=skipped, alarms=tuple(record.alarms))


def _all_metrics(record: StepRecord, tokens: LossTokens) -> dict[str, float]:
    everything = torch.arange(tokens.num_tokens, device=tokens.behaviour.device)
    observed = record.observed(tokens, everything)
    return {
        "tokens/zero_advantage_share": float((tokens.advantage == 0).double().mean()),
        **diagnostics.batch_metrics(observed),
        **diagnostics.age_metrics(tokens.age, observed),
        **diagnostics.mismatch_metrics(observed.log_rho, tokens.age, has_older_keys=tokens.has_older_keys),
        **diagnostics.entropy_metrics(record.readings[1]),
    }
