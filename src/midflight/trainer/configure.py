"""From the config sections to a trainer: the only file of this station that reads them all."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from midflight.config.sections import Config
from midflight.trainer.critic import Valuation
from midflight.trainer.model.parallel import Ranks
from midflight.trainer.optimizer import Adam, Schedule
from midflight.trainer.own_loss import objective_of
from midflight.trainer.step import Scoring
from midflight.trainer.trainer import Scale, StepRules, Trainer
from midflight.types import Version


def trainer_of(
    config: Config, model: PreTrainedModel, *, reference: PreTrainedModel | None = None, version: Version = 0, ranks: Ranks | None = None
) -> Trainer:
    """The trainer a configuration asks for. The longest answer is the environment's `max_tokens`."""
    section, c = config.trainer, config.critic
    return Trainer(
        model,
        objective_of(config),
        scoring=Scoring(
            advantage=config.objective.advantage,
            max_length=config.environment.max_tokens,
            overlong_buffer=config.objective.overlong_buffer,
            overlong_penalty=config.objective.overlong_penalty,
            teacher_weight=0.0 if config.distillation.teacher is None else config.distillation.weight,
            counts_rewards=config.distillation.teacher is None or config.distillation.rewards,
        ),
        schedule=Schedule(kind=section.schedule, warmup_steps=section.warmup_steps, total_steps=config.run.steps),
        adam=Adam(section.learning_rate, weight_decay=section.weight_decay, max_grad_norm=section.max_grad_norm),
        scale=Scale(
            micro_batch_tokens=section.micro_batch_tokens,
            compute_dtype=torch.bfloat16 if section.compute_dtype == "bfloat16" else None,
            activation_checkpointing=section.activation_checkpointing,
            compile=section.compile,
        ),
        reference=reference,
        valuation=Valuation(c.learning_rate, c.discount, c.trace_decay, c.clip) if config.objective.advantage == "gae" else None,
        rules=StepRules(section.updates_per_step, config.rollout.max_staleness, section.max_missing_share, section.on_alarm),
        temperature=config.environment.temperature,
        version=version,
        ranks=ranks,
    )
