"""The effective loss: one objective, at most one weight, masks, one reduction. `config.loss_checks`
says which of them may be combined.

Each of them is a row of `config.formulas` and a function of `formulas`, which is called with the
values that its parameters name:

| name | value, per token |
|---|---|
| `policy` | log π, with its gradient |
| `ratio`, `log_ratio` | π / µ for a bypass objective, π / π_prox for a decoupled one, with the gradient |
| `behaviour`, `proximal` | log µ, log π_prox |
| `advantage`, `age` | A; the version that begins the step minus the version that sampled the token |
| those of `WHOLE` | of the token's whole rollout, or of its place in the batch |
| `rho`, `log_rho`, `all_log_rho`, `log_inverse`, `sequence`, `num_sequences` | for weights, masks and `WHOLE`, which get all tokens at once if one looks beyond a token |
| `reference` | log π_ref, for divergences |

and with the options of its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from midflight.config.formulas import DIVERGENCES, MASKS, REDUCTIONS, WEIGHTS, Divergence
from midflight.config.loss import CorrectionSection, Loss, ObjectiveSection, loss_of
from midflight.config.loss_checks import loss_contradictions
from midflight.errors import ConfigError
from midflight.trainer.formulas import corrections, losses, reductions
from midflight.trainer.formulas.corrections import log_ratio

Result = TypeVar("Result")
Values = Mapping[str, object]
"""The arguments of functions, by name."""

PER_TOKEN = ("policy", "ratio", "log_ratio", "behaviour", "proximal", "advantage", "age")
"""The values of a token that a loss may use."""

WHOLE: Mapping[str, Callable[..., Tensor]] = {
    "sequence_log_ratio": losses.sequence_log_ratio,
    "sequence_ratio": corrections.sequence_ratio,
    "mean_ratio": losses.geometric_mean_ratio,
    "selected": losses.largest_covariance,
}
"""The values beyond a token that a loss may use, without gradient, and the functions that make them
of all tokens.
"""

BEYOND_TOKEN = frozenset({"sequence", "all_log_rho", *WHOLE})
"""Values that need the log-probabilities of a whole rollout, or of the batch, before any token's
loss is known.
"""


@cache
def parameters(function: Callable[..., object]) -> tuple[str, ...]:
    return tuple(signature(function).parameters)


def call(function: Callable[..., Result], values: Values) -> Result:
    """Calls the function with those of the values that its parameters name."""
    return function(**{name: values[name] for name in parameters(function) if name in values})


@dataclass(frozen=True, slots=True, eq=False)
class Denominators:
    """Sizes of a whole (mini-)batch, shared by all its micro-batches and ranks."""

    num_tokens: int
    num_rollouts: int
    """Rollouts with at least one token in the loss."""
    tokens_of_rollout: Int[Tensor, " M"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenValues:
    """The known values of tokens, without gradient: of a whole (mini-)batch, or of a part of it if
    the objective does not look beyond a token. [T]
    """

    now: Float[Tensor, " T"]
    """Log-probabilities under the weights of this update."""
    proximal: Float[Tensor, " T"]
    """Log-probabilities under the weights that began the step."""
    behaviour: Float[Tensor, " T"]
    advantage: Float[Tensor, " T"]
    age: Int[Tensor, " T"]
    sequence: Int[Tensor, " T"]
    num_sequences: int
    reference: Float[Tensor, " T"] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The factors and values that shape each token's loss, under stop-gradient. [T]"""

    proximal: Float[Tensor, " T"]
    weight: Float[Tensor, " T"]
    """The correction's weight alone, without masks and age."""
    factor: Float[Tensor, " T"]
    """Weight, masks and age together."""
    masked: Mapping[str, Bool[Tensor, " T"]]
    """For each mask by name, the tokens that it takes out."""
    whole: Mapping[str, Tensor]
    """The values of `WHOLE` that the objective uses."""

    def at(self, where: Int[Tensor, " k"]) -> Factors:
        masked = {name: gone[where] for name, gone in self.masked.items()}
        whole = {name: values[where] for name, values in self.whole.items()}
        return Factors(self.proximal[where], self.weight[where], self.factor[where], masked, whole)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """For each token: the loss, and whether a clip takes its gradient away."""

    loss: Float[Tensor, " T"]
    below: Bool[Tensor, " T"]
    above: Bool[Tensor, " T"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss that a step minimises. `Objective.of` makes one from the configuration, and refuses
    combinations that would count a ratio twice.
    """

    loss: Loss = field(default_factory=lambda: loss_of(ObjectiveSection(), CorrectionSection()))
    function: Callable[..., Tensor] = losses.ppo
    """The token's loss; it is called with the values that its parameters name."""
    self_normalised: bool = False
    age_decay: float = 1.0
    is_interpolated: bool = False
    """True if the proximal policy lies between behaviour and policy (A-3PO)."""
    kl: Divergence = "k3"
    kl_coefficient: float = 0.0
    behaviour_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    constant_length: int = 1
    """Divisor of the `constant` reduction, in tokens."""

    @classmethod
    def of(
        cls,
        objective: ObjectiveSection | None = None,
        correction: CorrectionSection | None = None,
        *,
        constant_length: int = 1,
        own: Callable[..., Tensor] | None = None,
    ) -> Objective:
        """Raises `ConfigError` with a sentence for each contradiction. `own` is the function that
        `objective.kind` names as `module:function`.
        """
        objective = objective or ObjectiveSection()
        correction = correction or CorrectionSection()
        problems = list(loss_contradictions(objective, correction))
        if problems:
            raise ConfigError("\n".join(problems))
        loss = loss_of(objective, correction)
        return cls(
            loss=loss,
            function=own or getattr(losses, loss.formula.function),
            self_normalised=correction.self_normalised,
            age_decay=correction.age_decay,
            is_interpolated=objective.proximal == "interpolated",
            kl=objective.kl,
            kl_coefficient=objective.kl_coefficient,
            behaviour_coefficient=objective.behaviour_coefficient,
            entropy_coefficient=objective.entropy_coefficient,
            constant_length=constant_length,
        )

    @property
    def looks_beyond(self) -> bool:
        """True if some part needs the log-probabilities of a whole rollout, or of the batch, before
        any token's loss is known.
        """
        if self.self_normalised:
            return True
        names = [WEIGHTS[self.loss.weight].function]
        names += [MASKS[name].function for name in self.loss.masks]
        functions = [self.function, *(getattr(corrections, name) for name in names)]
        return any(not BEYOND_TOKEN.isdisjoint(parameters(function)) for function in functions)

    def needs_scores(self, *, updates_per_step: int) -> bool:
        """True if a step begins with a forward over all of the batch. With one update the training
        forward serves for both.
        """
        return self.looks_beyond or (updates_per_step > 1 and not self.is_interpolated)

    @property
    def needs_advantage(self) -> bool:
        """A token of advantage 0 has a gradient of exactly 0: it need not go through the
        backward.
        """
        added = (self.kl_coefficient, self.behaviour_coefficient, self.entropy_coefficient)
        return self.loss.formula.is_zero_without_advantage and not any(added)

    # --- Without gradient -------------------------------------------------------------------------

    @torch.no_grad()
    def factors(self, known: TokenValues, *, progress: float = 0.0) -> Factors:
        """`progress`: how far the step is, from 0 to below 1; only the interpolated proximal policy
        depends on it.
        """
        proximal = self._proximal(known, progress)
        values = self._all_values(known, proximal)
        weight = self._weight(values)
        masked = {
            name: ~call(getattr(corrections, MASKS[name].function), {**values, **bounds})
            for name, bounds in self.loss.masks.items()
        }
        factor = weight
        if self.age_decay < 1:
            of_age = corrections.age_weight(known.age, decay=self.age_decay)
            factor = factor * of_age.to(weight.dtype)
        for gone in masked.values():
            factor = factor.masked_fill(gone, 0)
        whole = {
            name: call(WHOLE[name], values) for name in parameters(self.function) if name in WHOLE
        }
        return Factors(proximal, weight, factor, masked, whole)

    def _proximal(self, known: TokenValues, progress: float) -> Float[Tensor, " T"]:
        if not self.is_interpolated:
            return known.proximal
        age = known.age.to(known.now.dtype)
        alpha = corrections.interpolation_weight(age, since_policy=age + progress)
        return corrections.interpolated_proximal(known.now, known.behaviour, alpha=alpha)

    def _weight(self, values: Values) -> Float[Tensor, " T"]:
        function: Callable[..., Tensor] = getattr(corrections, WEIGHTS[self.loss.weight].function)
        weight = call(function, {**values, **self.loss.bounds})
        if self.self_normalised:
            return corrections.self_normalised(weight, mean=weight.mean())
        return weight

    def _all_values(self, known: TokenValues, proximal: Float[Tensor, " T"]) -> Values:
        log_rho = log_ratio(proximal, known.behaviour)
        return {
            **self._values(known.now, known, proximal),
            "rho": log_rho.exp(),
            "log_rho": log_rho,
            "all_log_rho": log_rho,
            "log_inverse": log_ratio(known.behaviour, known.now),
            "sequence": known.sequence,
            "num_sequences": known.num_sequences,
        }

    # --- With gradient ----------------------------------------------------------------------------

    def token_losses(
        self,
        policy: Float[Tensor, " T"],
        known: TokenValues,
        factors: Factors,
        *,
        entropy: Float[Tensor, " T"] | None = None,
    ) -> TokenLosses:
        """The unreduced loss; `policy` is log pi with its gradient, in value `known.now`."""
        values = self.values(policy, known, factors)
        loss = factors.factor * call(self.function, values)
        if self.kl_coefficient:
            assert known.reference is not None, "a divergence has its reference"
            function: Callable[..., Tensor] = getattr(losses, DIVERGENCES[self.kl].function)
            divergence = call(function, {**values, "reference": known.reference})
            loss = loss + self.kl_coefficient * divergence
        if self.behaviour_coefficient:
            pull = losses.squared_log_ratio(policy, known.behaviour)
            loss = loss + self.behaviour_coefficient * pull
        if self.entropy_coefficient:
            assert entropy is not None, "an entropy bonus has its entropy"
            loss = loss - self.entropy_coefficient * entropy
        return TokenLosses(loss, *self._clipped(values, known))

    def values(self, policy: Float[Tensor, " T"], known: TokenValues, factors: Factors) -> Values:
        """Returns the values that a loss may use, by name."""
        return {**self._values(policy, known, factors.proximal), **factors.whole}

    def _values(
        self, policy: Float[Tensor, " T"], known: TokenValues, proximal: Float[Tensor, " T"]
    ) -> Values:
        log_r = log_ratio(policy, known.behaviour if self.loss.is_bypass else proximal)
        return {
            "policy": policy,
            "ratio": log_r.exp(),
            "log_ratio": log_r,
            "behaviour": known.behaviour,
            "proximal": proximal,
            "advantage": known.advantage,
            "age": known.age,
            **self.loss.options,
        }

    @torch.no_grad()
    def _clipped(self, values: Values, known: TokenValues) -> losses.Clipped:
        """Returns the tokens whose gradient a clip takes away, below and above. There are none if
        the objective has no such clip.
        """
        if self.loss.formula.clip is None:
            nowhere = torch.zeros_like(known.advantage, dtype=torch.bool)
            return nowhere, nowhere
        clip: Callable[..., losses.Clipped] = getattr(losses, self.loss.formula.clip)
        return call(clip, values)

    # --- One number -------------------------------------------------------------------------------

    def reduce(
        self, loss: Float[Tensor, " T"], rollout: Int[Tensor, " T"], *, over: Denominators
    ) -> Float[Tensor, ""]:
        """This part's share of the loss of the whole (mini-)batch: shares add up."""
        values = {
            "loss": loss,
            "rollout": rollout,
            "num_tokens": over.num_tokens,
            "num_rollouts": over.num_rollouts,
            "tokens_of_rollout": over.tokens_of_rollout,
            "length": self.constant_length,
        }
        name = REDUCTIONS[self.loss.reduction].function
        reduction: Callable[..., Tensor] = getattr(reductions, name)
        return call(reduction, values)


def count_tokens(rollout: Int[Tensor, " T"], *, num_rollouts: int) -> Denominators:
    """The denominators of tokens that lie in these rollouts."""
    counts = torch.bincount(rollout, minlength=num_rollouts)
    return Denominators(
        num_tokens=rollout.numel(), num_rollouts=int((counts > 0).sum()), tokens_of_rollout=counts
    )
