"""A trainer's state on disk.

It is saved in two parts: a quick copy between two steps, and the write to the disk while training
goes on. Any number of ranks may have written it.
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
from midflight.trainer.optimizer import named_parameters
from midflight.trainer.trainer import Fork, PolicyTrainer
from midflight.types import Version

WEIGHTS = "model/"
MOMENTS = "optimizer/"
GENERATORS = "rng/"
CRITIC = "critic/"
"""Tensors are named `model/<name>`, `optimizer/<moment>/<parameter>` and `rng/<rank>/<device>`;
those of a critic `critic/model/<parameter>` and `critic/optimizer/<moment>/<parameter>`."""


def parts_of(trainer: PolicyTrainer) -> Iterator[tuple[str, dict[str, Tensor], nn.Module, AdamW]]:
    """The policy, and the critic if there is one. Each has a prefix of names, weights by name, the
    model that is trained, and its optimiser.
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
    """A trainer's state at one instant, in memory of its own. With several ranks it has this rank's
    shards of the state.
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
        """Puts the newest checkpoint under `root` and keeps `keep`. It blocks, and returns on every
        rank when the checkpoint is on disk. On the first rank it returns false if `beside` could
        not put its part there (see `folders.finish`).

        Every rank calls it, and waits for the others in `group`. That is a group of gloo that
        nothing else uses, since training goes on in the meantime. If a rank dies, the others' wait
        ends with an error.
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
        shard = draft / folders.shard_name(self.rank)
        folders.write_shards(shard, self.tensors)
        folders.sync(shard)
        self._meet(group)
        made = self.rank > 0 or folders.finish(root, self.state, keep=keep, beside=beside)
        self._meet(group)
        return made

    def _meet(self, group: dist.ProcessGroup | None) -> None:
        if self.state.num_ranks > 1:
            dist.barrier(group)


def stage(trainer: PolicyTrainer, *, cursor: str) -> StagedCheckpoint:
    """Copies the contents of a checkpoint to CPU memory, between two steps. No rank waits for
    another. The trainer may step on when it returns.

    Tensors that every rank has whole are in the shards of rank 0.
    """
    ranks = trainer.ranks
    tensors: dict[str, Tensor] = {}
    for prefix, weights, model, optimizer in parts_of(trainer):
        tensors |= prefixed(prefix + WEIGHTS, weights)
        tensors |= prefixed(prefix + MOMENTS, _moments(model, optimizer))
    copied = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if ranks.is_first or isinstance(tensor, DTensor):
            copied[name] = tensor.detach().to("cpu", copy=True)
    copied |= prefixed(f"{GENERATORS}{ranks.rank}/", _generators())
    state = CheckpointState(
        trainer.version,
        trainer.num_steps,
        trainer.num_skipped,
        trainer.lineage,
        cursor,
        ranks.size,
        chain=trainer.chain.head,
    )
    return StagedCheckpoint(state, ranks.rank, copied)


def _moments(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for name, parameter in named_parameters(model):
        if parameter not in optimizer.state:
            continue
        for key, value in optimizer.state[parameter].items():
            found[f"{key}/{name}"] = value
    return found


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

    `as_version` gives the weights a new number if later numbers were handed out before the crash:
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
    trainer.lineage = state.lineage
    trainer.chain.head = state.chain
    if trainer.version != state.version:
        trainer.lineage += (Fork(state.version, trainer.version),)
    return state


def _opened(folder: Path) -> Shards:
    try:
        return Shards(folder)
    except Exception as error:
        raise folders.corrupt(folder / "*.safetensors", f"cannot be read ({error})") from error


def _check_same_critic(folder: Path, shards: Shards, trainer: PolicyTrainer) -> None:
    stores_one = bool(shards.named(CRITIC))
    needs_one = trainer.critic is not None
    if stores_one == needs_one:
        return
    if needs_one:
        difference = 'no critic, and objective.advantage is "gae"'
    else:
        difference = "a critic, and this run has none"
    raise ConfigError(
        f"checkpoint {folder} has {difference}. Set objective.advantage as it was, or "
        "start in another folder."
    )


def _check_same_model(folder: Path, stored: Shapes, ours: Mapping[str, Tensor]) -> None:
    here = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in ours.items()}
    for name in sorted(stored.keys() | here.keys()):
        one = _shape_in(stored, name)
        other = _shape_in(here, name)
        if one != other:
            raise ConfigError(
                f"checkpoint {folder} is of another model: it has {one} for {name!r}, this model "
                f"has {other}. Give the sizes and dtype the checkpoint was made with, or start in "
                "another folder."
            )


def _shape_in(shapes: Shapes, name: str) -> str:
    if name not in shapes:
        return "nothing"
    shape, dtype = shapes[name]
    return f"{list(shape)} {dtype}"


def _room_for_moments(folder: Path, stored: Shapes, model: nn.Module) -> dict[str, Tensor]:
    """Empty tensors in the layout of their parameters. Tensors of another shape, such as counts of
    steps, are whole on every rank.
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
        if shape == tuple(parameter.shape):
            room[path] = torch.empty_like(parameter, dtype=dtype)
        else:
            room[path] = torch.empty(shape, dtype=dtype, device=parameter.device)
    return room


def _take_moments(model: nn.Module, optimizer: AdamW, moments: Mapping[str, Tensor]) -> None:
    parameters = dict(named_parameters(model))
    optimizer.state.clear()
    for path, value in moments.items():
        key, name = path.split("/", 1)
        optimizer.state[parameters[name]][key] = value


def _room_for_generators(shards: Shards, rank: int) -> dict[str, Tensor]:
    """Empty tensors for this rank's generators. There are none if fewer ranks wrote, and then the
    rank keeps its own.
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
