"""Supervised fine-tuning on prompts and answers: the warm start before reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from midflight.errors import ConfigError, StepSkipped
from midflight.trainer.model.microbatch import Predictions, predictions_of, split
from midflight.trainer.model.policy import Policy
from midflight.trainer.optimizer import Schedule, adamw, clear_gradients, clipped_step

Example = tuple[Sequence[int], Sequence[int]]
"""Ids of a prompt and of the answer to learn, its end-of-message token included."""


class SupervisedTrainer:
    """Minimises the mean negative log-probability of answer tokens. Has an optimiser of its own, gone with it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        learning_rate: float,
        schedule: Schedule | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        micro_batch_tokens: int = 4096,
    ) -> None:
        self.model = model
        self._policy = Policy(model)
        self.num_steps = 0
        self._optimizer = adamw(model, learning_rate=learning_rate, betas=betas, weight_decay=weight_decay)
        self._schedule = schedule or Schedule()
        self._learning_rate = learning_rate
        self._max_grad_norm = max_grad_norm
        self._budget = micro_batch_tokens

    def step(self, examples: Sequence[Example]) -> float:
        """One update on these examples; returns their loss in nats per answer token. `StepSkipped` if it is not finite."""
        predictions = answer_predictions(examples)
        device = next(self.model.parameters()).device
        clear_gradients(self.model)
        total = 0.0
        for micro in split(predictions, np.arange(len(predictions.targets)), budget=self._budget, device=device):
            loss = -self._policy(micro, temperature=1.0)[0].sum() / len(predictions.targets)
            torch.autograd.backward(loss)
            total += float(loss.detach())
        rate = self._learning_rate * self._schedule.factor(self.num_steps)
        norm = clipped_step(self._optimizer, learning_rate=rate, max_norm=self._max_grad_norm)
        self.num_steps += 1
        if not np.isfinite([total, norm]).all():
            raise StepSkipped(f"supervised step {self.num_steps}: loss {total}, gradient norm {norm}. Lower warm_start.learning_rate.")
        return total


def answer_predictions(examples: Sequence[Example]) -> Predictions:
    """Rows of prompt and answer that predict the answer only."""
    for number, (prompt, answer) in enumerate(examples):
        if not len(prompt) or not len(answer):
            raise ConfigError(
                f"example {number} has a prompt of {len(prompt)} and an answer of {len(answer)} tokens. Both need at least one."
            )
    if not examples:
        raise ConfigError("a supervised step got no examples. Give it at least one.")
    lengths = [len(prompt) + len(answer) for prompt, answer in examples]
    return predictions_of(
        np.concatenate([[*prompt, *answer] for prompt, answer in examples]).astype(np.int32),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        mask=np.concatenate([[False] * len(prompt) + [True] * len(answer) for prompt, answer in examples]),
    )
