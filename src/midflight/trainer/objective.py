"""The effective loss: one objective, at most one token weight, one reduction. Exactly one of bypass and decoupled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from midflight.errors import ConfigError
from midflight.trainer import reductions
from midflight.trainer.corrections import log_ratio, truncated_weight
from midflight.trainer.losses import clipped_surrogate, dual_clip


@dataclass(frozen=True, slots=True, eq=False)
class Denominators:
    """Sizes of a whole (mini-)batch, shared by all its micro-batches."""

    num_tokens: int
    num_rollouts: int
    """Rollouts with at least one token in the loss."""
    tokens_of_rollout: Int[Tensor, " M"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """Per token: the loss, and the ratios it was made of (without gradient)."""

    loss: Float[Tensor, " T"]
    clip_ratio: Float[Tensor, " T"]
    """The ratio that was clipped: to the proximal policy (decoupled) or to the behaviour policy (bypass)."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What a step minimises. Refuses combinations that would count the importance ratio twice."""

    loss: Literal["decoupled", "bypass"] = "decoupled"
    reduction: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    tis_cap: float | None = 2.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    """c > 1 bounds the loss of tokens of negative advantage by -c A."""
    constant_length: int = 1
    """Divisor of the `constant` reduction, in tokens."""

    def __post_init__(self) -> None:
        if self.loss == "bypass" and self.tis_cap is not None:
            raise ConfigError(
                f"loss = 'bypass' clips the ratio to the behaviour policy already; tis_cap = {self.tis_cap} would weigh by it a second time. "
                "Remove tis_cap, or set loss = 'decoupled'."
            )
        if self.loss == "decoupled" and self.tis_cap is None:
            raise ConfigError(
                "loss = 'decoupled' without tis_cap would correct nothing: it clips the ratio to the proximal policy and takes no weight. "
                "Set tis_cap (2.0 is usual), or set loss = 'bypass'."
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip = {self.dual_clip} would cut ordinary tokens. Set it above 1 (3.0 is usual), or remove it.")

    def token_losses(
        self,
        policy: Float[Tensor, " T"],
        proximal: Float[Tensor, " T"] | None,
        *,
        behaviour: Float[Tensor, " T"],
        advantage: Float[Tensor, " T"],
    ) -> TokenLosses:
        """The unreduced loss of log-probabilities; `proximal = None` says that it is sg(policy), the first update of a step."""
        anchor = policy.detach() if proximal is None else proximal
        ratio = log_ratio(policy, behaviour if self.loss == "bypass" else anchor).exp()
        loss = clipped_surrogate(ratio, advantage, clip_low=self.clip_low, clip_high=self.clip_high)
        if self.dual_clip is not None:
            loss = dual_clip(loss, advantage, ceiling=self.dual_clip)
        if self.tis_cap is not None:
            loss = truncated_weight(log_ratio(anchor, behaviour).exp(), cap=self.tis_cap) * loss
        return TokenLosses(loss=loss, clip_ratio=ratio.detach())

    def reduce(self, loss: Float[Tensor, " T"], rollout: Int[Tensor, " T"], *, over: Denominators) -> Float[Tensor, ""]:
        """This part's share of the loss of the whole (mini-)batch: shares add up."""
        match self.reduction:
            case "token_mean":
                return reductions.token_mean(loss, num_tokens=over.num_tokens)
            case "sequence_mean":
                return reductions.sequence_mean(loss, rollout, tokens_of_rollout=over.tokens_of_rollout, num_rollouts=over.num_rollouts)
            case "constant":
                return reductions.constant(loss, num_rollouts=over.num_rollouts, length=self.constant_length)

    def describe(self, *, updates_per_step: int = 1) -> str:
        """The effective loss as a formula, in the words of the glossary."""
        ratio, name = self._ratio(updates_per_step)
        token = f"min({ratio} A, clip({ratio}, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A)"
        if self.dual_clip is not None:
            token = f"[A<0: max({token}, {self.dual_clip:g} A); else {token}]"
        weight = f"sg min(rho, {self.tis_cap:g}) " if self.tis_cap is not None else ""
        lines = [f"L = -{self._mean()} {weight}{token}", f"    {name}"]
        if self.tis_cap is not None:
            lines.append(f"    rho = {'sg ' if updates_per_step == 1 else ''}pi_{'theta' if updates_per_step == 1 else 'proximal'} / mu")
        return "\n".join(lines)

    def _ratio(self, updates_per_step: int) -> tuple[str, str]:
        if self.loss == "bypass":
            return "R", "R = pi_theta / mu: bypass, clipped on the ratio to the behaviour policy, no further weight"
        if updates_per_step == 1:
            return "r", "r = pi_theta / sg pi_theta: one update per step, r = 1 and no clip binds; this is TIS, token by token"
        return "r", "r = pi_theta / pi_proximal: decoupled PPO with token TIS; proximal = weights at the start of the step"

    def _mean(self) -> str:
        match self.reduction:
            case "token_mean":
                return "mean over tokens of"
            case "sequence_mean":
                return "mean over rollouts of mean over tokens of"
            case "constant":
                return f"mean over rollouts of 1/{self.constant_length} sum over tokens of"


def count_tokens(rollout: Int[Tensor, " T"], *, num_rollouts: int) -> Denominators:
    """The denominators of tokens that lie in these rollouts."""
    counts = torch.bincount(rollout, minlength=num_rollouts)
    return Denominators(num_tokens=rollout.numel(), num_rollouts=int((counts > 0).sum()), tokens_of_rollout=counts)
