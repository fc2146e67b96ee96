"""The effective loss: one objective, at most one weight, masks, one reduction. What may be combined is settled in `config.loss`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from midflight.config.loss import CorrectionSection, Loss, ObjectiveSection, loss_contradictions, loss_of
from midflight.errors import ConfigError
from midflight.trainer.formulas import corrections, losses, masks, penalties, reductions
from midflight.trainer.formulas.corrections import log_ratio


@dataclass(frozen=True, slots=True, eq=False)
class Denominators:
    """Sizes of a whole (mini-)batch, shared by all its micro-batches and ranks."""

    num_tokens: int
    num_rollouts: int
    """Rollouts with at least one token in the loss."""
    tokens_of_rollout: Int[Tensor, " M"]


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What is known of tokens without a gradient: of a whole (mini-)batch, or of a part where nothing looks beyond a token. [T]"""

    now: Float[Tensor, " T"]
    """Log-probabilities under the weights of this update."""
    proximal: Float[Tensor, " T"]
    """Under those that began the step."""
    behaviour: Float[Tensor, " T"]
    advantage: Float[Tensor, " T"]
    age: Int[Tensor, " T"]
    sequence: Int[Tensor, " T"]
    num_sequences: int
    reference: Float[Tensor, " T"] | None = None

    @property
    def sequences(self) -> dict[str, Any]:
        """What functions of whole rollouts want to know."""
        return {"sequence": self.sequence, "num_sequences": self.num_sequences}


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """What multiplies or shapes each token's loss, under stop-gradient. [T]"""

    proximal: Float[Tensor, " T"]
    weight: Float[Tensor, " T"]
    """Of the correction alone, without masks and age."""
    factor: Float[Tensor, " T"]
    """Weight, masks and age together."""
    masked: Mapping[str, Bool[Tensor, " T"]]
    """By the mask's name, the tokens that it takes out."""
    context: Tensor | None
    """What the objective knows of a token's whole rollout, or of its place in the batch."""

    def at(self, where: Int[Tensor, " k"]) -> Factors:
        context = None if self.context is None else self.context[where]
        masked = {name: gone[where] for name, gone in self.masked.items()}
        return Factors(self.proximal[where], self.weight[where], self.factor[where], masked, context)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """Per token: the loss, and the log-ratio that a clip looked at (without gradient)."""

    loss: Float[Tensor, " T"]
    log_clip_ratio: Float[Tensor, " T"]
    """To the proximal policy (decoupled) or to the behaviour policy (bypass)."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What a step minimises. `Objective.of` makes one from the configuration, and refuses what would count a ratio twice."""

    loss: Loss = field(default_factory=lambda: loss_of(ObjectiveSection(), CorrectionSection()))
    self_normalised: bool = False
    age_decay: float = 1.0
    is_interpolated: bool = False
    """The proximal policy lies between behaviour and policy (A-3PO)."""
    kl: str = "k3"
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    constant_length: int = 1
    """Divisor of the `constant` reduction, in tokens."""

    @classmethod
    def of(
        cls, objective: ObjectiveSection | None = None, correction: CorrectionSection | None = None, *, constant_length: int = 1
    ) -> Objective:
        """`ConfigError` with a sentence for each contradiction."""
        objective, correction = objective or ObjectiveSection(), correction or CorrectionSection()
        if problems := list(loss_contradictions(objective, correction)):
            raise ConfigError("\n".join(problems))
        return cls(
            loss=loss_of(objective, correction),
            self_normalised=correction.self_normalised,
            age_decay=correction.age_decay,
            is_interpolated=objective.proximal == "interpolated",
            kl=objective.kl,
            kl_coefficient=objective.kl_coefficient,
            entropy_coefficient=objective.entropy_coefficient,
            constant_length=constant_length,
        )

    def needs_scores(self, *, updates_per_step: int) -> bool:
        """Whether a step begins with a forward over all of the batch. With one update the training forward serves for both."""
        return self.loss.looks_beyond or (updates_per_step > 1 and not self.is_interpolated)

    @property
    def needs_advantage(self) -> bool:
        """A token of advantage 0 has a gradient of exactly 0: it need not go through the backward."""
        return self.loss.kind not in ("mirror_descent", "kl_cov") and self.kl_coefficient == 0 and self.entropy_coefficient == 0

    # --- Without gradient --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def factors(self, known: Known, *, progress: float = 0.0) -> Factors:
        """`progress`: how far the step is, from 0 to below 1; only the interpolated proximal policy depends on it."""
        proximal = self._proximal(known, progress)
        log_rho = log_ratio(proximal, known.behaviour)
        weight = self._weight(log_rho, known)
        masked = {name: ~self._kept(name, bounds, log_rho, known) for name, bounds in self.loss.masks.items()}
        factor = weight
        if self.age_decay < 1:
            factor = factor * corrections.age_weight(known.age, decay=self.age_decay).to(weight.dtype)
        for gone in masked.values():
            factor = factor.masked_fill(gone, 0)
        return Factors(proximal, weight, factor, masked, self._context(known, proximal))

    def _proximal(self, known: Known, progress: float) -> Float[Tensor, " T"]:
        if not self.is_interpolated:
            return known.proximal
        alpha = corrections.interpolation_weight(known.age.to(known.now.dtype), since_policy=known.age.to(known.now.dtype) + progress)
        return corrections.interpolated_proximal(known.now, known.behaviour, alpha=alpha)

    def _weight(self, log_rho: Float[Tensor, " T"], known: Known) -> Float[Tensor, " T"]:
        whole, bounds = known.sequences, dict[str, Any](self.loss.bounds)
        match self.loss.weight:
            case "tis":
                weight = corrections.truncated_weight(log_rho.exp(), **bounds)
            case "tis_sequence":
                weight = corrections.truncated_sequence_weight(log_rho, **whole, **bounds)
            case "mis":
                weight = corrections.masked_weight(log_rho.exp(), **bounds)
            case "mis_sequence":
                weight = corrections.masked_sequence_weight(log_rho, **whole, **bounds)
            case "icepop":
                weight = corrections.icepop_weight(log_rho.exp(), **bounds)
            case _:
                weight = torch.ones_like(log_rho)
        return corrections.self_normalised(weight, mean=weight.mean()) if self.self_normalised else weight

    def _kept(self, name: str, bounds: Mapping[str, Any], log_rho: Float[Tensor, " T"], known: Known) -> Bool[Tensor, " T"]:
        whole = known.sequences
        match name:
            case "geometric":
                return masks.geometric_mask(log_rho, **whole, **bounds)
            case "veto":
                return masks.veto_mask(log_rho, **whole, **bounds)
            case "k2":
                return masks.k2_mask(log_rho, **bounds)
            case "k3":
                return masks.k3_mask(log_rho, **bounds)
            case "m2po":
                return masks.m2po_mask(log_rho, **bounds)
            case _:
                return masks.opsm_mask(log_ratio(known.behaviour, known.now), known.advantage, **whole, **bounds)

    def _context(self, known: Known, proximal: Float[Tensor, " T"]) -> Tensor | None:
        whole = known.sequences
        knobs: dict[str, Any] = {name: value for name, value in self.loss.knobs.items() if value is not None}
        match self.loss.kind:
            case "gspo":
                return losses.sequence_log_ratio(log_ratio(known.now, proximal), **whole)
            case "gmpo":
                return losses.geometric_mean_ratio(log_ratio(known.now, proximal), known.advantage, **whole, **knobs)
            case "topr":
                return corrections.sequence_ratio(log_ratio(known.now, known.behaviour), **whole)
            case "clip_cov" | "kl_cov":
                return losses.largest_covariance(known.now, known.advantage, share=knobs["share"])
            case _:
                return None

    # --- With gradient -----------------------------------------------------------------------------------------------

    def token_losses(
        self, policy: Float[Tensor, " T"], known: Known, factors: Factors, *, entropy: Float[Tensor, " T"] | None = None
    ) -> TokenLosses:
        """The unreduced loss; `policy` is log pi with its gradient, in value `known.now`."""
        log_r = log_ratio(policy, known.behaviour if self.loss.is_bypass else factors.proximal)
        loss = factors.factor * self._surrogate(policy, log_r, known, factors)
        if self.kl_coefficient:
            assert known.reference is not None, "a divergence has its reference"
            loss = loss + self.kl_coefficient * self._divergence(policy, known.reference, known.behaviour)
        if self.entropy_coefficient:
            assert entropy is not None, "an entropy bonus has its entropy"
            loss = loss - self.entropy_coefficient * entropy
        log_clip_ratio = factors.context if self.loss.kind == "gspo" else log_r.detach()
        assert log_clip_ratio is not None
        return TokenLosses(loss, log_clip_ratio)

    def _surrogate(self, policy: Float[Tensor, " T"], log_r: Float[Tensor, " T"], known: Known, factors: Factors) -> Float[Tensor, " T"]:
        knobs: dict[str, Any] = {name: value for name, value in self.loss.knobs.items() if value is not None and name != "dual_clip"}
        ratio, advantage, context = log_r.exp(), known.advantage, factors.context
        match self.loss.kind:
            case "ppo" | "decoupled_ppo":
                loss = losses.clipped_surrogate(ratio, advantage, **knobs)
                ceiling = self.loss.knobs["dual_clip"]
                return loss if ceiling is None else losses.dual_clip(loss, advantage, ceiling=ceiling)
            case "gspo":
                assert context is not None
                return losses.clipped_surrogate(losses.attached_ratio(policy, context), advantage, **knobs)
            case "gmpo":
                assert context is not None
                return losses.geometric_mean_surrogate(log_r, advantage, mean_ratio=context, **knobs)
            case "sapo":
                return losses.sapo(ratio, advantage, **knobs)
            case "cispo":
                return losses.cispo(policy, ratio, advantage=advantage, **knobs)
            case "rollout_is":
                return losses.rollout_is(policy, ratio, advantage=advantage, **knobs)
            case "topr":
                assert context is not None
                return losses.topr(policy, context, advantage=advantage)
            case "mirror_descent":
                return losses.mirror_descent(policy, log_r, advantage=advantage, **knobs)
            case "dppo_tv":
                return losses.dppo_tv(policy, known.behaviour, advantage=advantage, **knobs)
            case "clip_cov":
                assert context is not None
                return losses.clip_cov(ratio, advantage, selected=context, clip_low=knobs["clip_low"], clip_high=knobs["clip_high"])
            case _:
                assert context is not None
                return losses.kl_cov(log_r, advantage, selected=context, penalty=knobs["penalty"])

    def _divergence(
        self, policy: Float[Tensor, " T"], reference: Float[Tensor, " T"], behaviour: Float[Tensor, " T"]
    ) -> Float[Tensor, " T"]:
        estimators: Mapping[str, Callable[..., Tensor]] = {
            "k2": penalties.k2_divergence,
            "k3": penalties.k3_divergence,
            "unbiased": partial(penalties.unbiased_divergence, behaviour=behaviour),
        }
        return estimators[self.kl](policy, reference)

    def clipped(self, log_r: Float[Tensor, " T"], advantage: Float[Tensor, " T"]) -> tuple[Bool[Tensor, " T"], Bool[Tensor, " T"]]:
        """Where a clip takes the gradient away, below and above; nowhere if the objective has no such clip."""
        low, high = self.loss.knobs.get("clip_low"), self.loss.knobs.get("clip_high")
        if low is None or high is None or self.loss.kind == "cispo":
            nowhere = torch.zeros_like(advantage, dtype=torch.bool)
            return nowhere, nowhere
        ratio = 1 + log_r if self.loss.kind == "gmpo" else log_r.exp()  # gmpo's bounds are of the logarithm
        if self.loss.kind == "rollout_is":  # whichever way the advantage points
            return ratio <= 1 - low, ratio >= 1 + high
        above = losses.clipped_above(ratio, advantage, clip_high=high)
        if (ceiling := self.loss.knobs.get("dual_clip")) is not None:
            above |= (advantage < 0) & (ratio > ceiling)
        return losses.clipped_below(ratio, advantage, clip_low=low), above

    # --- One number --------------------------------------------------------------------------------------------------

    def reduce(self, loss: Float[Tensor, " T"], rollout: Int[Tensor, " T"], *, over: Denominators) -> Float[Tensor, ""]:
        """This part's share of the loss of the whole (mini-)batch: shares add up."""
        match self.loss.reduction:
            case "token_mean":
                return reductions.token_mean(loss, num_tokens=over.num_tokens)
            case "sequence_mean":
                return reductions.sequence_mean(loss, rollout, tokens_of_rollout=over.tokens_of_rollout, num_rollouts=over.num_rollouts)
            case "constant":
                return reductions.constant(loss, num_rollouts=over.num_rollouts, length=self.constant_length)


def count_tokens(rollout: Int[Tensor, " T"], *, num_rollouts: int) -> Denominators:
    """The denominators of tokens that lie in these rollouts."""
    counts = torch.bincount(rollout, minlength=num_rollouts)
    return Denominators(num_tokens=rollout.numel(), num_rollouts=int((counts > 0).sum()), tokens_of_rollout=counts)
