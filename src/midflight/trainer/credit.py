"""The credit that each token of a batch gets: its advantage, from rewards, their components, the
rewards of single answers, and a teacher.
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
from midflight.config.credit import component_weights, takes_whole_rollouts
from midflight.config.formulas import ADVANTAGES, Advantage
from midflight.errors import RunFailed
from midflight.trainer.formulas import advantages
from midflight.types import PackedBatch

if TYPE_CHECKING:
    from midflight.trainer.model.microbatch import Index


@dataclass(frozen=True, slots=True)
class Scoring:
    """The options that turn rewards into advantages."""

    advantage: Advantage = "grpo"
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    mask_truncated: bool = False
    """True if rollouts that were cut short stay out of the loss. Their rewards still count in their
    groups.
    """
    teacher_weight: float = 0.0
    """Weight of a teacher's log-probabilities beside rewards, per token; 0 is no teacher."""
    counts_rewards: bool = True
    """If false, only the teacher is learned from."""
    component_weights: Mapping[str, float] | None = None
    """Each component is compared by itself, with these weights, by the name before a `/`; 1 if
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
        """Returns advantages per rollout and answer, in float64. `room` is the part of their limits
        that its answers left unused, in tokens, and `earned` the reward of each answer. Answers
        from K on have the last column."""
        penalty = advantages.overlong_penalty(
            room, buffer=self.overlong_buffer, penalty=self.overlong_penalty
        )
        if self.component_weights is not None:
            columns = dict(components)
            if self.overlong_buffer:
                columns["overlong"] = penalty
            return self._decoupled(rewards, groups, columns)[:, None]
        name = ADVANTAGES[self.advantage].function
        compared: Callable[[Tensor, Tensor], Tensor] = getattr(advantages, name)
        return advantages.turn_advantages(
            lambda values: compared(values, groups), rewards + penalty, earned
        )

    def _decoupled(
        self, rewards: Tensor, groups: Tensor, components: Mapping[str, Tensor]
    ) -> Tensor:
        """A rollout without components has its reward for one."""
        nothing = torch.full_like(rewards, math.nan)
        has_any = torch.stack([*components.values(), nothing]).isfinite().any(0)
        columns = {**components, "reward": rewards.masked_fill(has_any, math.nan)}
        weights = rewards.new_tensor([self._weight_of(name) for name in columns])
        table = torch.stack(list(columns.values()), dim=1)
        return advantages.decoupled_advantages(table, groups, weights=weights)

    def _weight_of(self, component: str) -> float:
        """The weight under its whole name, else under the part before the `/`, else 1."""
        assert self.component_weights is not None
        before, _, _ = component.partition("/")
        return self.component_weights.get(component, self.component_weights.get(before, 1.0))


def scoring_of(config: Config) -> Scoring:
    """The scoring that a configuration asks for."""
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
    """Returns [N - R], shifted: the rollout's advantage on each of its tokens, and the teacher's
    part for that token.
    """
    # Imported here, because it imports transformers, which a reader of runs does not need.
    from midflight.trainer.model.microbatch import shift

    rollout = shift(rollout_of_token, batch.row_offsets)
    of_rewards = np.zeros(len(rollout))
    if scoring.counts_rewards:
        of_rewards = _of_tokens(batch, answer_advantages(batch, scoring), rollout)
    if not scoring.teacher_weight:
        return of_rewards
    if batch.teacher_logprobs is None:
        raise RunFailed(
            f"the batch of version {batch.train_version} has no log-probabilities of a teacher, "
            f"and distillation.weight is {scoring.teacher_weight:g}. Send teacher_logprobs with "
            "each batch, or set distillation.weight = 0."
        )
    teacher = shift(batch.teacher_logprobs, batch.row_offsets).astype(np.float64)
    behaviour = shift(batch.logprobs, batch.row_offsets).astype(np.float64)
    of_teacher = advantages.distillation_advantage(
        torch.from_numpy(teacher), torch.from_numpy(behaviour)
    )
    return of_rewards + scoring.teacher_weight * of_teacher.numpy()


def _of_tokens(
    batch: PackedBatch, found: NDArray[np.float64], rollout: Index
) -> NDArray[np.float64]:
    """Gives each token the advantage of its answer."""
    from midflight.trainer.model.microbatch import shift

    if batch.turns is None:
        return found[rollout, 0]
    last = found.shape[1] - 1
    answer = np.minimum(shift(batch.turns, batch.row_offsets), last)
    return found[rollout, answer]


def answer_advantages(batch: PackedBatch, scoring: Scoring) -> NDArray[np.float64]:
    """[M, K + 1]: the advantages of each rollout by answer; answers from K on have the last column.
    Rollouts without a finite reward get 0 and are no part of their group's baseline.
    """
    scored = np.flatnonzero(np.isfinite(batch.rewards))
    if scoring.overlong_buffer and batch.room is None:
        raise RunFailed(
            f"the batch of version {batch.train_version} does not say how near to their limits its "
            "answers came (`room`), and objective.overlong_buffer needs that. Send `room` with "
            "each batch, or set objective.overlong_buffer = 0."
        )
    earned = _earned(batch, scoring)[scored]
    before = np.cumsum(np.pad(earned, ((0, 0), (1, 0))), axis=1)
    left = batch.rewards[scored, None] - before
    if scoring.advantage == "maxrl" and (left < 0).any():
        raise RunFailed(
            f"the batch of version {batch.train_version} has a reward of {left.min():g}, and "
            'objective.advantage = "maxrl" divides by the mean of a group\'s rewards. Make rewards '
            "that are at least 0, or choose another advantage."
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
    """Returns [M, K]: the rewards of each rollout's answers."""
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
