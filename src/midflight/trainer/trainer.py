"""The trainer: a batch in, a version out. Synchronous; whoever feeds it does the waiting."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from midflight.errors import RunFailed
from midflight.trainer import diagnostics
from midflight.trainer.attention import attend_raggedly
from midflight.trainer.corrections import log_ratio
from midflight.trainer.losses import clipped_above, clipped_below
from midflight.trainer.microbatch import Index, MicroBatch, num_oversized, split
from midflight.trainer.objective import Denominators, Objective, count_tokens
from midflight.trainer.optimizer import adamw, clear_gradients, clipped_step
from midflight.trainer.policy import token_logprobs
from midflight.trainer.schedule import Schedule
from midflight.trainer.step import Scoring, Skip, StepReport, StepTokens, step_tokens
from midflight.types import PackedBatch, Version


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a run was taken up again: weights of `parent` go on under the number `version`, so that no number is used twice."""

    parent: Version
    version: Version


@dataclass(slots=True, eq=False)
class _Record:
    """What the updates of a step leave behind for its report. Per token, [K]."""

    anchor: Float[Tensor, " K"]
    """Proximal log-probabilities, or those of the forward that trained."""
    below: Bool[Tensor, " K"]
    above: Bool[Tensor, " K"]
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    num_micro_batches: int = 0
    num_skipped: int = 0


class Trainer:
    """Owns model, optimiser and the count of versions. One step makes one version (DECISIONS 1), also when it is skipped:

    the admission of new groups follows the version, and a step that gave none would stop it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        *,
        scoring: Scoring,
        schedule: Schedule,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        micro_batch_tokens: int = 4096,
        updates_per_step: int = 1,
        temperature: float = 1.0,
        max_staleness: int = 4,
        max_missing_share: float = 0.1,
        version: Version = 0,
    ) -> None:
        attend_raggedly(model)
        model.eval()  # No dropout: the log-probabilities must be those of the distribution that an engine samples.
        self.model = model
        self.objective = objective
        self.optimizer = adamw(model, learning_rate=learning_rate, betas=betas, weight_decay=weight_decay)
        self.version = version
        self.num_steps = 0
        """Steps since the first version: the schedule's clock, which a fork does not advance."""
        self.num_skipped = 0
        self.lineage: tuple[Fork, ...] = ()
        self._scoring = scoring
        self._schedule = schedule
        self._learning_rate = learning_rate
        self._max_grad_norm = max_grad_norm
        self._micro_batch_tokens = micro_batch_tokens
        self._updates_per_step = updates_per_step
        self._temperature = temperature
        self._max_staleness = max_staleness
        self._max_missing_share = max_missing_share
        self._device = next(model.parameters()).device
        dtype = next(model.parameters()).dtype
        self._dtype = dtype if dtype == torch.float64 else torch.float32

    def describe(self) -> str:
        """The effective loss, as a formula."""
        return self.objective.describe(updates_per_step=self._updates_per_step)

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self._learning_rate * self._schedule.factor(self.num_steps)

    def step(self, batch: PackedBatch) -> StepReport:
        """Trains on a batch leased for the current version and makes the next one."""
        if batch.train_version != self.version:
            raise RunFailed(
                f"the batch is leased for version {batch.train_version}, the trainer is at {self.version}. Lease a batch for it."
            )
        tokens = step_tokens(
            batch,
            self._scoring,
            max_staleness=self._max_staleness,
            max_missing_share=self._max_missing_share,
            dtype=self._dtype,
            device=self._device,
        )
        record = self._update(tokens)
        report = self._report(batch, tokens, record)
        self.version, self.num_steps = report.version, self.num_steps + 1
        self.num_skipped += report.skipped is not None
        return report

    def _update(self, tokens: StepTokens) -> _Record:
        nothing = torch.zeros(tokens.num_tokens, dtype=torch.bool, device=self._device)
        record = _Record(anchor=torch.zeros_like(tokens.behaviour), below=nothing, above=nothing.clone())
        proximal = None
        if self.objective.loss == "decoupled" and self._updates_per_step > 1:
            proximal = self._proximal(tokens)
            record.anchor = proximal
        for chosen in tokens.mini_batches(self._updates_per_step):
            loss = self._accumulate(tokens, chosen, proximal, record)
            finite = math.isfinite(loss)
            norm = clipped_step(self.optimizer, learning_rate=self.learning_rate, max_norm=self._max_grad_norm) if finite else math.nan
            record.losses.append(loss)
            record.norms.append(norm)
            record.num_skipped += not math.isfinite(norm)
        clear_gradients(self.model)
        return record

    def _accumulate(self, tokens: StepTokens, chosen: Index, proximal: Float[Tensor, " K"] | None, record: _Record) -> float:
        """Leaves the gradient of one update in the model and returns its loss.

        Tokens of advantage 0 have a gradient of exactly 0 under every objective here: they get a forward for the
        diagnostics and no backward.
        """
        clear_gradients(self.model)
        over = count_tokens(tokens.rollout[torch.from_numpy(chosen).to(self._device)], num_rollouts=tokens.num_rollouts)
        live = tokens.advantage.cpu().numpy()[chosen] != 0
        total = 0.0
        for part, trains in ((chosen[live], True), (chosen[~live], False)):
            for micro in split(tokens.predictions, part, budget=self._micro_batch_tokens, device=self._device):
                with torch.set_grad_enabled(trains):
                    share = self._loss(tokens, micro, proximal, over=over, record=record)
                if trains:
                    share.backward()
                total += float(share.detach())
                record.num_micro_batches += 1
        return total

    def _loss(
        self, tokens: StepTokens, micro: MicroBatch, proximal: Float[Tensor, " K"] | None, *, over: Denominators, record: _Record
    ) -> Float[Tensor, ""]:
        at = micro.predictions
        policy = token_logprobs(self.model, micro, temperature=self._temperature)
        advantage = tokens.advantage[at]
        found = self.objective.token_losses(
            policy, None if proximal is None else proximal[at], behaviour=tokens.behaviour[at], advantage=advantage
        )
        if proximal is None:
            record.anchor[at] = policy.detach()
        record.below[at] = clipped_below(found.clip_ratio, advantage, clip_low=self.objective.clip_low)
        record.above[at] = clipped_above(found.clip_ratio, advantage, clip_high=self.objective.clip_high)
        return self.objective.reduce(found.loss, tokens.rollout[at], over=over)

    @torch.no_grad()
    def _proximal(self, tokens: StepTokens) -> Float[Tensor, " K"]:
        """Log-probabilities under the weights that begin the step."""
        found = torch.zeros_like(tokens.behaviour)
        everything = np.arange(tokens.num_tokens)
        for micro in split(tokens.predictions, everything, budget=self._micro_batch_tokens, device=self._device):
            found[micro.predictions] = token_logprobs(self.model, micro, temperature=self._temperature)
        return found

    def _report(self, batch: PackedBatch, tokens: StepTokens, record: _Record) -> StepReport:
        metrics = {
            "tokens/trained": float(tokens.num_tokens),
            "rows/oversized": float(num_oversized(tokens.predictions, budget=self._micro_batch_tokens)),
            "step/micro_batches": float(record.num_micro_batches),
            "step/updates_skipped": float(record.num_skipped),
            "step/learning_rate": self.learning_rate,
            **{f"masked/{reason}": n / int(batch.loss_mask.sum()) for reason, n in tokens.masked.items()},
        }
        scored = batch.rewards[np.isfinite(batch.rewards)]
        if scored.size:
            metrics["reward/mean"] = float(scored.mean())
        if not tokens.num_tokens:
            return StepReport(self.version + 1, math.nan, 0, metrics, tokens.masked, skipped=Skip.NO_TOKENS)
        metrics["tokens/zero_advantage_share"] = float((tokens.advantage == 0).double().mean())
        log_rho = log_ratio(record.anchor, tokens.behaviour)
        metrics |= diagnostics.ratio_metrics(log_rho, tokens.rollout, tis_cap=self.objective.tis_cap)
        metrics |= diagnostics.clip_metrics(record.below, record.above) | diagnostics.age_metrics(tokens.age, log_rho)
        skipped = Skip.NOT_FINITE if record.num_skipped == len(record.losses) else None
        made = [math.isfinite(norm) or skipped is not None for norm in record.norms]
        metrics |= {"loss": float(np.mean(np.compress(made, record.losses))), "grad_norm": float(np.mean(np.compress(made, record.norms)))}
        num_trained = 0 if skipped else tokens.num_tokens
        return StepReport(
            self.version + 1, metrics["loss"], num_trained, metrics, tokens.masked, skipped=skipped, alarms=diagnostics.alarms(metrics)
        )
