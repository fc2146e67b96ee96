"""Who gets the credit: the advantage of each token of a batch, from rewards, their components, what
single answers earned, and a teacher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from midflight.config import Config
from midflight.config.checks import component_weights, takes_whole_rollouts
from midflight.config.formulas import ADVANTAGES, Advantage
from midflight.errors import RunFailed
from midflight.trainer.formulas import advantages
from midflight.types import PackedBatch

if TYPE_CHECKING:
    from midflight.trainer.model.microbatch import Index


@dataclass(frozen=True, slots=True)
class Scoring:
    """How rewards become advantages."""

    advantage: Advantage = "grpo"
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    mask_truncated: bool = False
    """Whether rollouts that were cut short stay out of the loss; their rewards count in their
    groups.
    """
    teacher_weight: float = 0.0
    """Weight of a teacher's log-probabilities beside rewards, per token; 0 is no teacher."""
    counts_rewards: bool = True
    """Without them the teacher is all that is learned from."""
    component_weights: Mapping[str, float] | None = None
    """Each component is compared by itself, with these weights, by the name before a `/`; 1 where
    there is none. None compares rewards.
    """
    whole_rollouts: str = ""
    """The option that takes one advantage for a whole rollout, if there is one."""

    def advantages(
        self,
        rewards: Float[Tensor, " M"],
        groups: Int[Tensor, " M"],
        *,
        room: Int[Tensor, " M"],
        earned: Float[Tensor, "M K"],
        components: Mapping[str, Float[Tensor, " M"]],
    ) -> Float[Tensor, "M K+1"]:
        """Per rollout and answer, in float64; `room` is what its answers left of their limits, in
        tokens, `earned` what each of them got. Answers from K on have the last column."""
        penalty = advantages.overlong_penalty(
            room, buffer=self.overlong_buffer, penalty=self.overlong_penalty
        )
        if self.component_weights is not None:
            return self._decoupled(
                rewards,
                groups,
                {**components, **({"overlong": penalty} if self.overlong_buffer else {})},
            )[:, None]
        compared: Callable[[Tensor, Tensor], Tensor] = getattr(
            advantages, ADVANTAGES[self.advantage].function
        )
        return advantages.turn_advantages(
            lambda values: compared(values, groups), rewards + penalty, earned
        )

    def _decoupled(
        self, rewards: Tensor, groups: Tensor, components: Mapping[str, Tensor]
    ) -> Tensor:
        """A rollout without components has its reward for one."""
        assert self.component_weights is not None
        has_any = (
            torch.stack([*components.values(), torch.full_like(rewards, math.nan)])
            .isfinite()
            .any(0)
        )
        columns = {**components, "reward": rewards.masked_fill(has_any, math.nan)}
        weights = [
            self.component_weights.get(
                name, self.component_weights.get(name.partition("/")[0], 1.0)
            )
            for name in columns
        ]
        return advantages.decoupled_advantages(
            torch.stack([*columns.values()], dim=1), groups, weights=rewards.new_tensor(weights)
        )


def scoring_of(config: Config) -> Scoring:
    """That a configuration asks for."""
    distills = config.distillation.teacher is not None
    return Scoring(
        advantage=config.objective.advantage,
        overlong_buffer=config.objective.overlong_buffer,
        overlong_penalty=config.objective.overlong_penalty,
        mask_truncated=config.objective.mask_truncated,
        teacher_weight=config.distillation.weight if distills else 0.0,
        counts_rewards=config.distillation.rewards or not distills,
        component_weights=component_weights(config),
        whole_rollouts=takes_whole_rollouts(config),
    )


def token_advantages(
    batch: PackedBatch, scoring: Scoring, rollout_of_token: Index
) -> NDArray[np.float64]:
    """[N - R], shifted: the rollout's advantage on each of its tokens, and what the teacher thinks
    of that token.
    """
    # and with it transformers, which whoever looks at a run does without
    from midflight.trainer.model.microbatch import shift

    rollout = shift(rollout_of_token, batch.row_offsets)
    of_rewards = (
        _of_tokens(batch, answer_advantages(batch, scoring), rollout)
        if scoring.counts_rewards
        else np.zeros(len(rollout))
    )
    if not scoring.teacher_weight:
        return of_rewards
    if batch.teacher_logprobs is None:
        raise RunFailed(
            f"the batch of version {batch.train_version} has no log-probabilities of a teacher, "
            f"and distillation.weight is {scoring.teacher_weight:g}. Send teacher_logprobs with "
            "each batch, or set distillation.weight = 0."
        )
    teacher, behaviour = (
        torch.from_numpy(shift(values, batch.row_offsets).astype(np.float64))
        for values in (batch.teacher_logprobs, batch.logprobs)
    )
    return (
        of_rewards
        + scoring.teacher_weight * advantages.distillation_advantage(teacher, behaviour).numpy()
    )


def _of_tokens(
    batch: PackedBatch, found: NDArray[np.float64], rollout: Index
) -> NDArray[np.float64]:
    """Those of the answer that each token is of."""
    from midflight.trainer.model.microbatch import shift

    if batch.turns is None:
        return found[rollout, 0]
    return found[rollout, np.minimum(shift(batch.turns, batch.row_offsets), found.shape[1] - 1)]


def answer_advantages(batch: PackedBatch, scoring: Scoring) -> NDArray[np.float64]:
    """[M, K + 1]: of each rollout by answer, those from K on in the last column. Rollouts without a
    finite reward get 0 and are no part of their group's baseline.
    """
    scored = np.flatnonzero(np.isfinite(batch.rewards))
    if scoring.overlong_buffer and batch.room is None:
        raise RunFailed(
            f"the batch of version {batch.train_version} does not say how near to their limits its "
            "answers came (`room`), and objective.overlong_buffer needs that. Send `room` with "
            "each batch, or set objective.overlong_buffer = 0."
        )
    earned = _earned(batch, scoring)[scored]
    left = batch.rewards[scored, None] - np.cumsum(np.pad(earned, ((0, 0), (1, 0))), axis=1)
    if scoring.advantage == "maxrl" and (left < 0).any():
        raise RunFailed(
            f"the batch of version {batch.train_version} has a reward of {left.min():g}, and "
            'objective.advantage = "maxrl" divides by '
            "the mean of a group's rewards. Make rewards that are at least 0, or choose another "
            "advantage."
        )
    room = np.zeros(len(scored), np.int32) if batch.room is None else batch.room[scored]
    found = scoring.advantages(
        torch.from_numpy(batch.rewards[scored].astype(np.float64)),
        torch.from_numpy(batch.rollout_group[scored].astype(np.int64)),
        room=torch.from_numpy(room),
        earned=torch.from_numpy(earned),
        components={
            name: torch.from_numpy(column[scored]) for name, column in components_of(batch).items()
        },
    )
    of_rollouts = np.zeros((len(batch.rewards), found.shape[1]), np.float64)
    of_rollouts[scored] = found.numpy()
    return of_rollouts


def _earned(batch: PackedBatch, scoring: Scoring) -> NDArray[np.float64]:
    """[M, K], by answer."""
    if batch.turn_rewards is None or not len(batch.rewards):
        return np.zeros((len(batch.rewards), 0))
    if scoring.whole_rollouts and batch.turn_rewards.any():
        raise RunFailed(
            f"the batch of version {batch.train_version} has rewards of single answers (`turns`), "
            f"and {scoring.whole_rollouts} takes one advantage for a whole rollout. Remove that "
            "option, or return no turns."
        )
    return batch.turn_rewards.astype(np.float64).reshape(len(batch.rewards), -1)


def components_of(batch: PackedBatch) -> Mapping[str, NDArray[np.float64]]:
    """[M] each, by name; NaN where one does not apply."""
    if batch.components is None:
        return {}
    table = batch.components.astype(np.float64).reshape(len(batch.rewards), -1)
    return dict(zip(batch.component_names, table.T, strict=True))
