"""A critic: a second model that predicts at each token the reward still to come, and so gives each
token its own advantage.

A reward arrives with the last trained token of its rollout. The reward of a single answer arrives
with the last token of that answer. A rollout's tokens are taken in the order in which they lie in
the batch, its rows one after the other. Tokens of prompts and tools between them do not matter.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from midflight.errors import ConfigError
from midflight.trainer.formulas import reductions
from midflight.trainer.formulas.advantages import batch_normalised, gae
from midflight.trainer.formulas.losses import value_loss
from midflight.trainer.model.microbatch import Index, Layout, MicroBatch
from midflight.trainer.model.passes import Passes
from midflight.trainer.model.policy import Scores, TokenModel
from midflight.trainer.model.ranks import Ranks
from midflight.trainer.optimizer import Adam, adamw, clear_gradients, clipped_step
from midflight.trainer.tokens import LossTokens


@dataclass(frozen=True, slots=True)
class Valuation:
    """The options of a critic: how its values make advantages, and how it learns them."""

    learning_rate: float = 3e-4
    discount: float = 1.0
    trace_decay: float = 1.0
    clip: float = 0.2


class ValueModel(TokenModel):
    """A decoder with one linear number on its last hidden state, which is 0 at first. It is
    computed in float32 (float64 for a float64 model).
    """

    def __init__(self, decoder: PreTrainedModel, layout: Layout = Layout.PACKED) -> None:
        super().__init__(decoder, layout)
        like = next(decoder.parameters())
        self.weight = nn.Parameter(like.new_zeros(decoder.config.get_text_config().hidden_size))
        self.bias = nn.Parameter(like.new_zeros(1))

    def forward(
        self, micro: MicroBatch, *, temperature: float, with_entropy: bool = False
    ) -> Scores:
        """The reward that is expected before each prediction's token is known. The temperature is
        not used.
        """
        hidden = self._hidden(micro)
        precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        product = (hidden.to(precise) * self.weight.to(precise)).sum(-1)
        return product + self.bias.to(precise), None


def value_model_of(model: PreTrainedModel, layout: Layout = Layout.PACKED) -> ValueModel:
    """Returns a copy of a policy's decoder, without its output layer. Parameters that are frozen in
    the policy (the base of adapters) are frozen in the copy.
    """
    if model.base_model is model:
        raise ConfigError(
            f"{type(model).__name__} has no output layer to replace by a critic's. Choose another "
            "objective.advantage."
        )
    return ValueModel(cast(PreTrainedModel, copy.deepcopy(model.base_model)), layout)


@dataclass(frozen=True, slots=True, eq=False)
class ValuedTokens:
    """A step's tokens with advantages, and the targets of the critic: the values that it gave when
    the step began, and the returns. [K]
    """

    tokens: LossTokens
    values: Float[Tensor, " K"]
    returns: Float[Tensor, " K"]


class Critic:
    """Owns the value model and its optimiser. It is collective, as `Passes` is."""

    def __init__(self, passes: Passes, valuation: Valuation, *, adam: Adam, ranks: Ranks) -> None:
        """`adam` is the policy's; the critic takes all of it except the learning rate."""
        self.model = passes.reader
        self.optimizer = adamw(
            self.model,
            learning_rate=valuation.learning_rate,
            betas=adam.betas,
            weight_decay=adam.weight_decay,
        )
        self._passes = passes
        self._valuation = valuation
        self._ranks = ranks
        self._max_grad_norm = adam.max_grad_norm

    def judge(self, tokens: LossTokens) -> ValuedTokens:
        """Replaces the reward, which each token carries in place of an advantage, by advantages of
        mean 0 and deviation 1 over the batch.
        """
        values = self._passes.scores(tokens.predictions)
        advantages, returns = gae(
            _at_the_end(tokens).double(),
            values.double(),
            sequence=tokens.rollout,
            position=torch.arange(tokens.num_tokens, device=values.device),
            num_sequences=tokens.num_rollouts,
            discount=self._valuation.discount,
            decay=self._valuation.trace_decay,
        )
        normalised = batch_normalised(advantages).to(tokens.advantage.dtype)
        judged = replace(tokens, advantage=normalised)
        return ValuedTokens(judged, values, returns.to(values.dtype))

    def learn(
        self, judged: ValuedTokens, chosen_of_update: Sequence[Index], *, rate_factor: float
    ) -> dict[str, float]:
        """Makes one update for each of the policy's, on the same tokens. Returns measurements by
        name.
        """
        made = [self._update(judged, chosen, rate_factor) for chosen in chosen_of_update]
        losses, norms = zip(*made, strict=True)
        return {
            #: `critic/loss`, `critic/grad_norm`, `critic/value_mean`: Means of the critic's loss, of
            #: its gradient's norm before clipping, and of its values. Healthy: the loss falls.
            "critic/loss": float(np.mean(losses)),
            "critic/grad_norm": float(np.mean(norms)),
            "critic/value_mean": float(judged.values.double().mean()),
            **_explained(judged.values.double(), judged.returns.double()),
        }

    def _update(
        self, judged: ValuedTokens, chosen: Index, rate_factor: float
    ) -> tuple[float, float]:
        """Makes an update. Returns the loss and the norm of the gradient; if either is not finite
        nothing is changed.
        """
        clear_gradients(self.model)
        total = torch.zeros((), dtype=judged.values.dtype, device=judged.values.device)
        for micro, is_mine, values, _ in self._passes.forwards(
            judged.tokens.predictions, chosen, trains=True
        ):
            if not is_mine:
                (values.sum() * 0).backward()
                continue
            at = micro.predictions
            found = value_loss(
                values, judged.values[at], judged.returns[at], clip=self._valuation.clip
            )
            share = reductions.token_mean(found, num_tokens=len(chosen))
            share.backward()
            total += share.detach()
        loss = float(self._ranks.sum(total))
        norm = math.nan
        if math.isfinite(loss):
            norm = clipped_step(
                self.optimizer,
                learning_rate=self._valuation.learning_rate * rate_factor,
                max_norm=self._max_grad_norm,
            )
        return loss, norm


def _at_the_end(tokens: LossTokens) -> Float[Tensor, " K"]:
    """Returns the reward that arrives with each token: the reward still to come at it, less the
    reward still to come at the rollout's next token. It is the reward at the last token, and 0 at
    most others.
    """
    order = tokens.rollout.argsort(stable=True)
    to_come = tokens.advantage[order]
    rollout = tokens.rollout[order]
    is_last = torch.cat([rollout[1:] != rollout[:-1], rollout.new_ones(1, dtype=torch.bool)])
    then = torch.cat([to_come[1:], to_come.new_zeros(1)]).masked_fill(is_last, 0)
    return torch.empty_like(to_come).index_copy(0, order, to_come - then)


def _explained(values: Float[Tensor, " K"], returns: Float[Tensor, " K"]) -> dict[str, float]:
    """Returns 1 - var(returns - values) / var(returns): 1 for a perfect critic, 0 for one that
    predicts a constant. It is left out if all returns are equal.
    """
    spread = float(returns.var(correction=0))
    if not spread > 1e-12 * float(returns.square().mean()):  # less is rounding
        return {}
    unexplained = float((returns - values).var(correction=0))
    return {
        #: 1 - var(return - value) / var(return). Healthy: towards 1; below 0 it misleads.
        "critic/explained_variance": 1 - unexplained / spread,
    }
