"""Options that contradict each other, which the bounds of single options cannot find."""

import re
from collections.abc import Iterator

from midflight.config.derived import trains_truncated
from midflight.config.engine import engine_contradictions
from midflight.config.environment import environment_contradictions
from midflight.config.evaluation import suite_contradictions
from midflight.config.gateway import gateway_contradictions
from midflight.config.loss_checks import (
    critic_contradictions,
    distillation_contradictions,
    length_contradictions,
    loss_contradictions,
)
from midflight.config.model import lora_contradictions, model_contradictions
from midflight.config.observe import observe_contradictions
from midflight.config.rollout import rollout_contradictions
from midflight.config.run import run_contradictions
from midflight.config.seat_checks import cluster_contradictions, server_contradictions
from midflight.config.sections import Config
from midflight.config.sources import source_contradictions
from midflight.config.trainer import trainer_contradictions
from midflight.config.weights import weights_contradictions

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def contradictions(config: Config) -> tuple[str, ...]:
    """One sentence for each pair of options that can't both hold, with the remedy. It is empty for
    a sound configuration.
    """
    environment = config.environment
    engine = config.engine
    rollout = config.rollout
    warm = config.warm_start
    return (
        *weights_contradictions(config.weights, max_staleness=rollout.max_staleness),
        *gateway_contradictions(config.gateway, view_port=config.observe.view_port),
        *rollout_contradictions(rollout, max_sessions=config.gateway.max_sessions),
        *model_contradictions(config.model, max_tokens=environment.max_tokens),
        *loss_contradictions(config.objective, config.correction),
        *trainer_contradictions(
            config.trainer, groups_per_step=rollout.groups_per_step, dtype=config.model.dtype
        ),
        *length_contradictions(config.objective, max_tokens=environment.max_tokens),
        *critic_contradictions(config),
        *distillation_contradictions(config),
        *lora_contradictions(config.lora),
        *engine_contradictions(engine, config.model),
        *run_contradictions(config.run),
        *_names(config),
        *_truncation(config),
        *_devices(config),
        *suite_contradictions(config.evaluation, environment.sources),
        *environment_contradictions(
            environment, num_engines=len(engine.urls or engine.servers) or engine.count
        ),
        *source_contradictions(
            environment.sources,
            config.curriculum,
            learns_to_accuracy=warm.target_accuracy is not None and warm.data is None,
        ),
        *observe_contradictions(config.observe),
        *cluster_contradictions(config),
        *server_contradictions(config),
    )


def _names(config: Config) -> Iterator[str]:
    for key, name in (("run.name", config.run.name), ("model.name", config.model.name)):
        if not name.strip():
            yield f"{key} is empty; give it a name"


def _devices(config: Config) -> Iterator[str]:
    for key, device in (
        ("engine.device", config.engine.device),
        ("trainer.device", config.trainer.device),
    ):
        if not _DEVICE.fullmatch(device):
            yield f"{key} must be 'cpu', 'cuda' or 'cuda:N', got {device!r}"


def _truncation(config: Config) -> Iterator[str]:
    """Contradictions of a policy that samples from a part of the vocabulary."""
    if not config.environment.sampling.truncates_the_policy:
        return
    if config.engine.kind != "embedded":
        yield (
            "environment.top_p, top_k and min_p need to know what was kept, which engine.kind = "
            f'"{config.engine.kind}" does not say; remove them'
        )
    if not trains_truncated(config, trainer_is_ours=True):
        has_teacher = config.distillation.teacher is not None
        why = "distillation.teacher" if has_teacher else "correction.sampling_masks = false"
        yield (
            f"environment.top_p, top_k and min_p leave nothing to train with {why}, which keeps "
            "such turns out of the loss; remove one of both"
        )
