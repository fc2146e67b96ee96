"""A trainer's state: saved in two parts, a quick copy between two steps and its way to the disk
while training goes on; and loaded, whatever number of ranks wrote it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from midflight.errors import ConfigError
from midflight.models.names import named_tensors
from midflight.trainer import folders
from midflight.trainer.folders import CheckpointState, Shapes, Shards
from midflight.trainer.step import named_parameters
from midflight.trainer.trainer import Fork, PolicyTrainer
from midflight.types import Version

WEIGHTS = "model/"
MOMENTS = "optimizer/"
GENERATORS = "rng/"
CRITIC = "critic/"
"""Tensors are named `model/<name>`, `optimizer/<moment>/<parameter>` and `rng/<rank>/<device>`;
those of a critic `critic/model/<parameter>` and `critic/optimizer/<moment>/<parameter>`."""


def parts_of(trainer: PolicyTrainer) -> Iterator[tuple[str, dict[str, Tensor], nn.Module, AdamW]]:
    """The policy, and the critic if there is one: prefix of its names, weights by name, what is
    trained, and its optimiser.
    """
    yield "", named_tensors(trainer.model), trainer.model, trainer.optimizer
    if trainer.critic is not None:
        weights = {
            name: parameter.detach() for name, parameter in named_parameters(trainer.critic.model)
        }
        yield CRITIC, weights, trainer.critic.model, trainer.critic.optimizer


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True, eq=False)
class StagedCheckpoint:
    """A trainer's state at one instant, in memory of its own. With several ranks, this rank's
    shards of it.
    """

    state: CheckpointState
    rank: int
    tensors: Mapping[str, Tensor]

    def write(
        self,
        root: Path,
        *,
        keep: int,
        group: dist.ProcessGroup | None = None,
        beside: Callable[[Path], bool] | None = None,
    ) -> bool:
        """Puts the newest checkpoint under `root` and keeps `keep`. Blocking; returns on every rank
        when it is on disk. On the first rank false where what belongs into it could not be put
        there (see `folders.finish`).

        Every rank calls it, and waits for the others in `group`: one of gloo that nothing else
        uses, since training goes on in the meantime. A rank that dies ends the others' wait with an
        error.
        """
        draft = folders.draft_of(root, self.state.version)
        if self.rank == 0:
            folders.begin(root, self.state.version)
        self._meet(group)
        if not draft.is_dir():
            raise ConfigError(
                f"rank {self.rank} does not see {draft}, which rank 0 made. Put run.folder on a "
                "file system that all ranks share."
            )
        folders.write_shards(draft / folders.shard_name(self.rank), self.tensors)
        folders.sync(draft / folders.shard_name(self.rank))
        self._meet(group)
        made = self.rank > 0 or folders.finish(root, self.state, keep=keep, beside=beside)
        self._meet(group)
        return made

    def _meet(self, group: dist.ProcessGroup | None) -> None:
        if self.state.num_ranks > 1:
            dist.barrier(group)


def stage(trainer: PolicyTrainer, *, cursor: str) -> StagedCheckpoint:
    """Copies what a checkpoint holds to CPU memory, between two steps; no rank waits for another.
    The trainer may step on when it returns.

    What every rank has whole is in the shards of rank 0.
    """
    ranks = trainer.ranks
    tensors: dict[str, Tensor] = {}
    for prefix, weights, model, optimizer in parts_of(trainer):
        tensors |= prefixed(prefix + WEIGHTS, weights) | prefixed(
            prefix + MOMENTS, _moments(model, optimizer)
        )
    ours = {
        name: tensor
        for name, tensor in tensors.items()
        if ranks.is_first or isinstance(tensor, DTensor)
    }
    state = CheckpointState(
        trainer.version, trainer.num_steps, trainer.num_skipped, trainer.lineage, cursor, ranks.size
    )
    copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in ours.items()}
    return StagedCheckpoint(
        state, ranks.rank, copied | prefixed(f"{GENERATORS}{ranks.rank}/", _generators())
    )


def _moments(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    state = optimizer.state
    return {
        f"{key}/{name}": value
        for name, p in named_parameters(model)
        if p in state
        for key, value in state[p].items()
    }


def _generators() -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def load_checkpoint(
    folder: Path, trainer: PolicyTrainer, *, as_version: Version | None = None
) -> CheckpointState:
    """Brings a trainer to a checkpoint, bit for bit. Everything is verified before anything is
    changed. No rank waits for another.

    `as_version` names the weights anew where later numbers were handed out before the crash:
    numbers are never used twice, and the lineage records the fork. The returned state is the
    checkpoint's own.
    """
    state = folders.verified(folder)
    shards = _opened(folder)
    _check_same_critic(folder, shards, trainer)
    room: dict[str, Tensor] = {}
    for prefix, weights, model, _ in parts_of(trainer):
        _check_same_model(folder, shards.named(prefix + WEIGHTS), weights)
        moments = _room_for_moments(folder, shards.named(prefix + MOMENTS), model)
        room |= prefixed(prefix + WEIGHTS, weights) | prefixed(prefix + MOMENTS, moments)
    if as_version is not None and as_version < state.version:
        raise ConfigError(
            f"checkpoint {folder.name} can't go on as version {as_version}: that number is used. "
            f"Name one from {state.version} on."
        )
    generators = _room_for_generators(shards, trainer.ranks.rank)
    shards.read(room | generators)
    for prefix, _, model, optimizer in parts_of(trainer):
        _take_moments(model, optimizer, _named(prefix + MOMENTS, room))
    _take_generators(generators)
    trainer.version = state.version if as_version is None else as_version
    trainer.num_steps = state.num_steps
    trainer.num_skipped = state.num_skipped
    trainer.lineage = (
        state.lineage
        if trainer.version == state.version
        else (*state.lineage, Fork(state.version, trainer.version))
    )
    return state


def _opened(folder: Path) -> Shards:
    try:
        return Shards(folder)
    except Exception as error:
        raise folders.corrupt(folder / "*.safetensors", f"cannot be read ({error})") from error


def _check_same_critic(folder: Path, shards: Shards, trainer: PolicyTrainer) -> None:
    if bool(shards.named(CRITIC)) != (trainer.critic is not None):
        has, wants = (
            ("no critic", 'objective.advantage is "gae"')
            if trainer.critic is not None
            else ("a critic", "this run has none")
        )
        raise ConfigError(
            f"checkpoint {folder} has {has}, and {wants}. Set objective.advantage as it was, or "
            "start in another folder."
        )


def _check_same_model(folder: Path, stored: Shapes, ours: Mapping[str, Tensor]) -> None:
    here = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in ours.items()}
    for name in sorted(stored.keys() | here.keys()):
        one, other = (
            f"{list(t[name][0])} {t[name][1]}" if name in t else "nothing" for t in (stored, here)
        )
        if one != other:
            raise ConfigError(
                f"checkpoint {folder} is of another model: it has {one} for {name!r}, this model "
                f"has {other}. Give the sizes and dtype the checkpoint was made with, or start in "
                "another folder."
            )


def _room_for_moments(folder: Path, stored: Shapes, model: nn.Module) -> dict[str, Tensor]:
    """Empty tensors in the layout of their parameters; what is of another shape, as counts of
    steps, is whole on every rank.
    """
    parameters = dict(named_parameters(model))
    room: dict[str, Tensor] = {}
    for path, (shape, dtype) in stored.items():
        name = path.split("/", 1)[1]
        if name not in parameters:
            raise ConfigError(
                f"checkpoint {folder} was training {name!r}, this run does not. Train the same "
                "parameters, or start in another folder."
            )
        parameter = parameters[name].detach()
        alike = shape == tuple(parameter.shape)
        room[path] = (
            torch.empty_like(parameter, dtype=dtype)
            if alike
            else torch.empty(shape, dtype=dtype, device=parameter.device)
        )
    return room


def _take_moments(model: nn.Module, optimizer: AdamW, moments: Mapping[str, Tensor]) -> None:
    parameters = dict(named_parameters(model))
    optimizer.state.clear()
    for path, value in moments.items():
        key, name = path.split("/", 1)
        optimizer.state[parameters[name]][key] = value


def _room_for_generators(shards: Shards, rank: int) -> dict[str, Tensor]:
    """Empty tensors for this rank's generators; none if fewer ranks wrote, and then the rank keeps
    its own.
    """
    prefix = f"{GENERATORS}{rank}/"
    return {
        prefix + device: torch.empty(shape, dtype=dtype)
        for device, (shape, dtype) in shards.named(prefix).items()
    }


def _take_generators(generators: dict[str, Tensor]) -> None:
    for name, state in generators.items():
        if name.endswith("/cpu"):
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
