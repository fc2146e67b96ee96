"""Bringing a trainer to a checkpoint, whatever number of ranks wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from midflight.errors import ConfigError
from midflight.trainer.checkpoint.folders import corrupt, verified
from midflight.trainer.checkpoint.shards import Shapes, Shards
from midflight.trainer.checkpoint.state import CRITIC, GENERATORS, MOMENTS, WEIGHTS, CheckpointState, parts_of, prefixed
from midflight.trainer.optimizer import named_parameters
from midflight.trainer.trainer import Fork, Trainer
from midflight.types import Version


def load_checkpoint(folder: Path, trainer: Trainer, *, as_version: Version | None = None) -> CheckpointState:
    """Brings a trainer to a checkpoint, bit for bit. Everything is verified before anything is changed. No rank waits for another.

    `as_version` names the weights anew where later numbers were handed out before the crash: numbers are never used twice
    (DECISIONS 1), and the lineage records the fork. The returned state is the checkpoint's own.
    """
    state = verified(folder)
    shards = _opened(folder)
    _check_same_critic(folder, shards, trainer)
    room: dict[str, Tensor] = {}
    for prefix, weights, model, _ in parts_of(trainer):
        _check_same_model(folder, shards.named(prefix + WEIGHTS), weights)
        moments = _room_for_moments(folder, shards.named(prefix + MOMENTS), model)
        room |= prefixed(prefix + WEIGHTS, weights) | prefixed(prefix + MOMENTS, moments)
    if as_version is not None and as_version < state.version:
        raise ConfigError(
            f"checkpoint {folder.name} can't go on as version {as_version}: that number is used. Name one from {state.version} on."
        )
    generators = _room_for_generators(shards, trainer.ranks.rank)
    shards.read(room | generators)
    for prefix, _, model, optimizer in parts_of(trainer):
        _take_moments(model, optimizer, _named(prefix + MOMENTS, room))
    _take_generators(generators)
    trainer.version = state.version if as_version is None else as_version
    trainer.num_steps, trainer.num_skipped = state.num_steps, state.num_skipped
    trainer.lineage = state.lineage if trainer.version == state.version else (*state.lineage, Fork(state.version, trainer.version))
    return state


def _opened(folder: Path) -> Shards:
    try:
        return Shards(folder)
    except Exception as error:
        raise corrupt(folder / "*.safetensors", f"cannot be read ({error})") from error


def _check_same_critic(folder: Path, shards: Shards, trainer: Trainer) -> None:
    if bool(shards.named(CRITIC)) != (trainer.critic is not None):
        has, wants = ("no critic", 'objective.advantage is "gae"') if trainer.critic is not None else ("a critic", "this run has none")
        raise ConfigError(f"checkpoint {folder} has {has}, and {wants}. Set objective.advantage as it was, or start in another folder.")


def _check_same_model(folder: Path, stored: Shapes, ours: Mapping[str, Tensor]) -> None:
    here = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in ours.items()}
    for name in sorted(stored.keys() | here.keys()):
        one, other = (f"{list(t[name][0])} {t[name][1]}" if name in t else "nothing" for t in (stored, here))
        if one != other:
            raise ConfigError(
                f"checkpoint {folder} is of another model: it has {one} for {name!r}, this model has {other}. "
                "Give the sizes and dtype the checkpoint was made with, or start in another folder."
            )


def _room_for_moments(folder: Path, stored: Shapes, model: nn.Module) -> dict[str, Tensor]:
    """Empty tensors in the layout of their parameters; what is of another shape, as counts of steps, is whole on every rank."""
    parameters = dict(named_parameters(model))
    room: dict[str, Tensor] = {}
    for path, (shape, dtype) in stored.items():
        name = path.split("/", 1)[1]
        if name not in parameters:
            raise ConfigError(
                f"checkpoint {folder} was training {name!r}, this run does not. Train the same parameters, or start in another folder."
            )
        parameter = parameters[name].detach()
        alike = shape == tuple(parameter.shape)
        room[path] = torch.empty_like(parameter, dtype=dtype) if alike else torch.empty(shape, dtype=dtype, device=parameter.device)
    return room


def _take_moments(model: nn.Module, optimizer: AdamW, moments: Mapping[str, Tensor]) -> None:
    parameters = dict(named_parameters(model))
    optimizer.state.clear()
    for path, value in moments.items():
        key, name = path.split("/", 1)
        optimizer.state[parameters[name]][key] = value


def _room_for_generators(shards: Shards, rank: int) -> dict[str, Tensor]:
    """Of this rank's generators; none, if fewer ranks wrote: those keep their own."""
    prefix = f"{GENERATORS}{rank}/"
    return {prefix + device: torch.empty(shape, dtype=dtype) for device, (shape, dtype) in shards.named(prefix).items()}


def _take_generators(generators: dict[str, Tensor]) -> None:
    for name, state in generators.items():
        if name.endswith("/cpu"):
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
