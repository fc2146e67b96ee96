"""Supervised fine-tuning on prompts and answers: the warm start before reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from midflight.errors import StepSkipped
from midflight.trainer.model.microbatch import Example, Layout, answer_predictions, split
from midflight.trainer.model.policy import Policy
from midflight.trainer.optimizer import adamw, clear_gradients, clipped_step
from midflight.trainer.schedule import Schedule


class SupervisedTrainer:
    """Minimises the mean negative log-probability of answer tokens. It has an optimiser of its own,
    which ends with it. It is synchronous, as `PolicyTrainer` is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        learning_rate: float,
        schedule: Schedule | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        micro_batch_tokens: int = 2048,
        layout: Layout = Layout.PACKED,
    ) -> None:
        self.model = model
        self._policy = Policy(model, layout)
        self.num_steps = 0
        self._optimizer = adamw(
            model, learning_rate=learning_rate, betas=betas, weight_decay=weight_decay
        )
        self._schedule = schedule or Schedule()
        self._learning_rate = learning_rate
        self._max_grad_norm = max_grad_norm
        self._budget = micro_batch_tokens

    def step(self, examples: Sequence[Example]) -> float:
        """Makes one update on these examples and returns their loss in nats per answer token.
        Raises `StepSkipped` if it is not finite.
        """
        predictions = answer_predictions(examples)
        num_tokens = len(predictions.targets)
        device = next(self.model.parameters()).device
        clear_gradients(self.model)
        total = 0.0
        for micro in split(
            predictions,
            np.arange(num_tokens),
            budget=self._budget,
            device=device,
            layout=self._policy.layout,
        ):
            logprobs, _ = self._policy(micro, temperature=1.0)
            loss = -logprobs.sum() / num_tokens
            torch.autograd.backward(loss)
            total += float(loss.detach())
        rate = self._learning_rate * self._schedule.factor(self.num_steps)
        norm = clipped_step(self._optimizer, learning_rate=rate, max_norm=self._max_grad_norm)
        self.num_steps += 1
        if not np.isfinite([total, norm]).all():
            raise StepSkipped(
                f"supervised step {self.num_steps}: loss {total}, gradient norm {norm}. Lower "
                "warm_start.learning_rate."
            )
        return total
