"""What a step computes with, and what it reports: AdamW with decay on matrices only, which refuses
a gradient that is not finite, and the learning rate of each step.

A packed batch becomes the tokens to predict, and per token its behaviour, advantage and age. The
updates leave readings of each token, of which the report is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import AdamW

from midflight.errors import RunFailed
from midflight.trainer.credit import Scoring, components_of, token_advantages
from midflight.trainer.formulas import diagnostics
from midflight.trainer.formulas.corrections import log_ratio
from midflight.trainer.formulas.diagnostics import Observed
from midflight.trainer.model.microbatch import Index, Predictions, on_device, predictions_of, shift
from midflight.trainer.model.policy import Ranks
from midflight.trainer.model.scores import kept_of
from midflight.trainer.objective import Factors, Known, Objective, TokenLosses
from midflight.types import PackedBatch, Reason, Version

# --- The optimizer --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Adam:
    """How gradients become steps."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """What is trained: every parameter once (tied ones under their first name), in the model's
    order.
    """
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def adamw(
    model: nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> AdamW:
    """AdamW (Loshchilov and Hutter 2019). Norms and biases, which are vectors, are not decayed: to
    shrink a scale is not to regularise.
    """
    matrices = [p for _, p in named_parameters(model) if p.ndim > 1]
    vectors = [p for _, p in named_parameters(model) if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas, fused=True)


def clear_gradients(model: nn.Module) -> None:
    """Sets every gradient to zeros, not to None: a parameter that a batch does not reach still
    decays its moments.
    """
    for _, parameter in named_parameters(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def scale_gradients(model: nn.Module, factor: float) -> None:
    for _, parameter in named_parameters(model):
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def clipped_step(optimizer: AdamW, *, learning_rate: float, max_norm: float) -> float:
    """Clips gradients to an L2 norm and steps. Returns the norm before clipping; if it is not
    finite nothing is changed.

    Nor if it is 0: a batch that says nothing, with all advantages 0 or all tokens masked, must not
    move the weights by the momentum of earlier ones and by decay.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if not bool(norm.isfinite()) or not bool(norm):
        return float(norm)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    return float(norm)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up to 1, then `constant`, or down to 0 at `total_steps` along a line or half a
    cosine.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 1

    def factor(self, step: int) -> float:
        """The share for step 0, 1, 2, ...; the first step of a warm-up of w is 1 / w, the last
        before the end is above 0.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        left = self.total_steps - self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / left) if left > 0 else 0.0
        match self.kind:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - progress
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * progress))


# --- The step -------------------------------------------------------------------------------------


LEAST_LOGPROB = -1000.0
"""Below any log-probability a sampled token can have; engines that lack one write such numbers
(-9999) in its place.
"""


class Skip(StrEnum):
    """Why a step left the weights as they were."""

    NO_TOKENS = "no_tokens"
    NOT_FINITE = "not_finite"
    ALARM = "alarm"


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """What a step did. Its version is made in any case: a skipped step publishes the weights it
    found under the next number.
    """

    version: Version
    loss: float
    """Mean over the updates that were made; of a skipped step what was found, NaN if nothing
    was.
    """
    num_tokens: int
    """Tokens in the loss."""
    metrics: Mapping[str, float]
    masked: Mapping[Reason, int]
    """Tokens of the batch's mask that were kept out of the loss here."""
    skipped: Skip | None = None
    alarms: tuple[str, ...] = ()


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
    """Some key that the token attended to when it was sampled was of an older version than the
    token.
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
        parts = (np.flatnonzero(self.group % count == i) for i in range(count))
        return [part for part in parts if len(part)]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One of a step's mini-batches."""

    tokens: LossTokens
    chosen: Index
    """Ascending."""
    proximal: Float[Tensor, " K"] | None
    """Log-probabilities of all the step's tokens; None where the proximal policy is the one that
    trains.
    """
    reference: Float[Tensor, " K"] | None
    progress: float
    """Share of the step's updates that were made before."""

    @property
    def where(self) -> Tensor:
        """`chosen`, on the tokens' device."""
        return torch.from_numpy(self.chosen).to(self.tokens.age.device)

    def position(self, at: Tensor) -> Tensor:
        """Where these of the step's tokens are among the chosen ones."""
        return torch.searchsorted(self.where, at)

    def known(self, now: Tensor, proximal: Tensor, at: Tensor) -> Known:
        """What is known of the tokens `at`; `now` and `proximal` are theirs already."""
        t = self.tokens
        return Known(
            now=now,
            proximal=proximal,
            behaviour=t.behaviour[at],
            advantage=t.advantage[at],
            age=t.age[at],
            sequence=t.rollout[at],
            num_sequences=t.num_rollouts,
            reference=None if self.reference is None else self.reference[at],
        )


def step_tokens(
    batch: PackedBatch,
    scoring: Scoring,
    *,
    max_staleness: int,
    max_missing_share: float,
    dtype: torch.dtype,
    device: torch.device,
) -> LossTokens:
    """Admits the tokens of a batch to the loss: checks their age (I2), keeps out what lacks a
    log-probability or a reward.
    """
    check_staleness(batch, max_staleness=max_staleness)
    missing = batch.loss_mask & ~_is_logprob(batch.logprobs)
    _check_missing(int(missing.sum()), int(batch.loss_mask.sum()), max_share=max_missing_share)
    rollout_of_token = np.repeat(batch.row_rollout, np.diff(batch.row_offsets)).astype(np.int64)
    unscored = batch.loss_mask & ~missing & ~np.isfinite(batch.rewards)[rollout_of_token]
    truncated = (
        batch.loss_mask
        & ~missing
        & ~unscored
        & batch.truncated[rollout_of_token]
        & scoring.mask_truncated
    )
    mask = batch.loss_mask & ~missing & ~unscored & ~truncated
    admitted = shift(mask, batch.row_offsets)
    rollout = shift(rollout_of_token, batch.row_offsets)[admitted]
    predictions = predictions_of(
        batch.token_ids, batch.row_offsets, mask=mask, experts=batch.experts
    )
    return LossTokens(
        predictions=replace(predictions, kept=kept_of(batch, np.flatnonzero(mask))),
        behaviour=on_device(shift(batch.logprobs, batch.row_offsets)[admitted], device).to(dtype),
        advantage=on_device(
            token_advantages(batch, scoring, rollout_of_token)[admitted], device
        ).to(dtype),
        age=on_device(
            batch.train_version - shift(batch.versions, batch.row_offsets)[admitted], device
        ),
        has_older_keys=on_device(
            shift(batch.kv_versions < batch.versions, batch.row_offsets)[admitted], device
        ),
        rollout=on_device(rollout, device),
        group=batch.rollout_group[rollout].astype(np.int64),
        num_rollouts=len(batch.rewards),
        masked={
            reason: int(kept_out.sum())
            for reason, kept_out in (
                (Reason.NOT_FINITE, missing),
                (Reason.NO_REWARD, unscored),
                (Reason.TRUNCATED, truncated),
            )
            if kept_out.any()
        },
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


def _is_logprob(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """True where a number can be the log-probability of a sampled token; rounding may lift one
    slightly above 0.
    """
    with np.errstate(invalid="ignore"):
        return np.isfinite(values) & (values > LEAST_LOGPROB) & (values <= 1e-3)


def _check_missing(num_missing: int, num_tokens: int, *, max_share: float) -> None:
    if num_missing > max_share * num_tokens:
        raise RunFailed(
            f"{num_missing} of {num_tokens} tokens of the batch came without a log-probability, "
            f"more than the allowed share of {max_share:g}. Check that the engine returns the "
            "log-probability of every sampled token."
        )


_READINGS = ("proximal", "policy", "weight", "below", "above")


@dataclass(slots=True, eq=False)
class StepRecord:
    """Readings of each token, and of each update. Every token is in one update of a step, and is
    computed by one rank.
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
    num_early: int = 0
    """Tokens of groups that were begun before the batch was whole."""
    critic: Mapping[str, float] = field(default_factory=dict[str, float])
    """What a critic measured, by name."""

    @classmethod
    def of(cls, tokens: LossTokens, *, masks: Sequence[str]) -> StepRecord:
        lines = len(_READINGS) + len(masks)
        return cls(
            torch.zeros(
                lines, tokens.num_tokens, dtype=torch.float64, device=tokens.behaviour.device
            ),
            masks,
        )

    def note(
        self,
        at: Int[Tensor, " k"],
        factors: Factors,
        found: TokenLosses,
        known: Known,
        objective: Objective,
    ) -> None:
        """The readings of a micro-batch. A bypass objective's weight is the ratio itself."""
        weight = (
            log_ratio(factors.proximal, known.behaviour).exp()
            if objective.loss.is_bypass
            else factors.weight
        )
        lines = [
            factors.proximal,
            known.now,
            weight,
            found.below,
            found.above,
            *(factors.masked[name] for name in self.masks),
        ]
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


def token_metrics(
    record: StepRecord, tokens: LossTokens, where: Int[Tensor, " k"]
) -> dict[str, float]:
    """What an alarm looks at, of the tokens of an update."""
    return diagnostics.batch_metrics(record.observed(tokens, where))


def report_of(
    record: StepRecord,
    batch: PackedBatch,
    tokens: LossTokens,
    *,
    version: Version,
    learning_rate: float,
) -> StepReport:
    """What the step that makes `version` did."""
    metrics = {
        "tokens/trained": float(tokens.num_tokens),
        "rows/oversized": float(record.num_oversized),
        "step/micro_batches": float(record.num_micro_batches),
        "step/early_share": record.num_early / max(1, tokens.num_tokens),
        "step/updates_skipped": float(record.num_skipped),
        "step/alarms": float(len(record.alarms)),
        "step/learning_rate": learning_rate,
        **{
            f"masked/{reason}": n / int(batch.loss_mask.sum())
            for reason, n in tokens.masked.items()
        },
        **record.critic,
    }
    if (experts := tokens.predictions.experts) is not None:
        metrics["experts/recorded_share"] = float((experts != 255).any(1).mean())
    scored = batch.rewards[np.isfinite(batch.rewards)]
    if scored.size:
        metrics["reward/mean"] = float(scored.mean())
    for name, column in components_of(batch).items():
        if (there := column[np.isfinite(column)]).size:
            metrics[f"reward/{name}"] = float(there.mean())
    skipped = record.skipped
    if skipped is Skip.NO_TOKENS:
        return StepReport(version, math.nan, 0, metrics, tokens.masked, skipped=skipped)
    metrics |= _all_metrics(record, tokens) | {
        "loss": record.mean(record.losses),
        "grad_norm": record.mean(record.norms),
    }
    num_trained = 0 if skipped else tokens.num_tokens
    return StepReport(
        version,
        metrics["loss"],
        num_trained,
        metrics,
        tokens.masked,
        skipped=skipped,
        alarms=tuple(record.alarms),
    )


def _all_metrics(record: StepRecord, tokens: LossTokens) -> dict[str, float]:
    everything = torch.arange(tokens.num_tokens, device=tokens.behaviour.device)
    observed = record.observed(tokens, everything)
    return {
        "tokens/zero_advantage_share": float((tokens.advantage == 0).double().mean()),
        **diagnostics.batch_metrics(observed),
        **diagnostics.age_metrics(tokens.age, observed),
        **diagnostics.mismatch_metrics(
            observed.log_rho, tokens.age, has_older_keys=tokens.has_older_keys
        ),
        **diagnostics.entropy_metrics(record.readings[1]),
    }
