"""From the config section to a trainer: the only file of this station that reads the section."""

from __future__ import annotations

from transformers import PreTrainedModel

from midflight.config.sections import TrainerSection
from midflight.trainer.objective import Objective
from midflight.trainer.schedule import Schedule
from midflight.trainer.step import Scoring
from midflight.trainer.trainer import Trainer
from midflight.types import Version


def objective_of(section: TrainerSection, *, max_tokens: int) -> Objective:
    """The loss a section asks for. The default of `tis_cap` is for `decoupled` alone; only one written down is refused with `bypass`."""
    unasked = section.loss == "bypass" and "tis_cap" not in section.model_fields_set
    return Objective(
        loss=section.loss,
        reduction=section.reduction,
        tis_cap=None if unasked else section.tis_cap,
        clip_low=section.clip_low,
        clip_high=section.clip_high,
        constant_length=max_tokens,
    )


def trainer_of(
    section: TrainerSection,
    model: PreTrainedModel,
    *,
    total_steps: int,
    max_tokens: int,
    temperature: float,
    max_staleness: int,
    version: Version = 0,
) -> Trainer:
    """The trainer a section asks for. `max_tokens` is the environment's: the longest answer."""
    return Trainer(
        model,
        objective_of(section, max_tokens=max_tokens),
        scoring=Scoring(
            advantage=section.advantage,
            max_length=max_tokens,
            overlong_buffer=section.overlong_buffer,
            overlong_penalty=section.overlong_penalty,
        ),
        schedule=Schedule(kind=section.schedule, warmup_steps=section.warmup_steps, total_steps=total_steps),
        learning_rate=section.learning_rate,
        betas=(section.beta1, section.beta2),
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        micro_batch_tokens=section.micro_batch_tokens,
        updates_per_step=section.updates_per_step,
        temperature=temperature,
        max_staleness=max_staleness,
        version=version,
    )
