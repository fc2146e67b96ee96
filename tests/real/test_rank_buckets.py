"""Weights that ranks share, put together in host memory and spread from the first rank, in buckets. Gloo processes on the CPU."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models.mixtures import tiny_mixture
from tests.models.tiny import tiny_adapted, tiny_model
from tests.trainer.fixtures import batch, trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from midflight.config.load import load_config
from midflight.models.load import load_frame, load_model, save_model
from midflight.models.names import named_tensors
from midflight.models.rank_rows import rows_of
from midflight.trainer.model.microbatch import Layout
from midflight.trainer.model.probe import shared_layout
from midflight.trainer.model.rank_buckets import collect
from midflight.trainer.model.ranks import Ranks
from midflight.trainer.trainer import PolicyTrainer, trainer_of

from .rank_processes import in_processes

BUCKET = 6000
"""Bytes: a small part of the largest tensors, and no multiple of a row."""
Make = Callable[[], PreTrainedModel]
MODELS: dict[str, Make] = {
    "tied": tiny_model,
    "untied": lambda: tiny_model(tied=False),
    "adapters": lambda: tiny_adapted(seed=1),
    "mixture": lambda: tiny_mixture("qwen3_moe"),
}
CASES = [
    *((name, ()) for name in MODELS),
    ("tied", ("objective.kl_coefficient=0.1",)),
    ("untied", ("objective.advantage=gae", "trainer.activation_checkpointing=true")),
    ("tied", ("trainer.compute_dtype=bfloat16",)),
]
"""A model, and the options of its trainer."""


class Held(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside: the most that were there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: list[tuple[weakref.ref[Tensor], int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self._made.append((weakref.ref(leaf), leaf.untyped_storage().data_ptr(), leaf.untyped_storage().nbytes()))
        self._made = [made for made in self._made if made[0]() is not None]
        self.most = max(self.most, sum({place: size for _, place, size in self._made}.values()))
        return out


# --- Put together ----------------------------------------------------------------------------------


def collecting(folder: Path) -> None:
    ranks = Ranks.joined()
    told: dict[str, int] = {}
    for name, make in MODELS.items():
        ours = trainer(make(), ranks=ranks, micro_batch_tokens=60)
        tensors = named_tensors(ours.model)
        assert any(isinstance(tensor, DTensor) for tensor in tensors.values())
        for dtype in (torch.float32, torch.bfloat16):
            whole = {n: (t.full_tensor() if isinstance(t, DTensor) else t).to(dtype) for n, t in tensors.items()}
            into = {n: torch.full_like(t, 7.0) for n, t in whole.items()} if ranks.is_first else {}
            with Held() as held:
                collect(tensors, into, ranks, dtype=dtype, bucket_bytes=BUCKET)
            assert not ranks.is_first or all(torch.equal(into[n], t) for n, t in whole.items()), name
            told[f"{name} {dtype}"] = held.most
            told["largest"] = max(told.get("largest", 0), *(t.nbytes for t in whole.values()))
    (folder / f"{ranks.rank}.json").write_text(json.dumps(told))


@pytest.mark.parametrize("size", [2, 3])
def test_weights_are_put_together_in_host_memory_and_no_rank_holds_more_than_a_bucket(size: int, tmp_path: Path) -> None:
    in_processes(collecting, size, tmp_path)
    for rank in range(size):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        largest = told.pop("largest")
        assert largest > 4 * BUCKET, "a tensor takes several buckets"
        assert 0 < max(told.values()) <= (BUCKET if rank == 0 else BUCKET // size), told


# --- Loaded once ------------------------------------------------------------------------------------


def flat(ours: PolicyTrainer) -> Tensor:
    whole = (t.full_tensor() if isinstance(t, DTensor) else t for t in named_tensors(ours.model).values())
    return torch.cat([tensor.detach().double().flatten() for tensor in whole])


def shards(ours: PolicyTrainer) -> dict[str, Tensor]:
    """What this rank has: its rows of every parameter of the policy and the critic, and all buffers."""
    models = {"": ours.model} | ({} if ours.critic is None else {"critic ": ours.critic.model})
    found: dict[str, Tensor] = {}
    for before, model in models.items():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            found[before + name] = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
    return found


def loading(folder: Path) -> None:
    ranks = Ranks.joined()
    for name, options in CASES:
        config = load_config(None, ["trainer.micro_batch_tokens=64", *options])
        place = folder / name
        if ranks.is_first and not place.exists():
            save_model(MODELS[name](), place)
        dist.barrier()

        def whole(place: Path = place) -> PreTrainedModel:
            return load_model(place, dtype="float32")

        def frame(place: Path = place) -> PreTrainedModel:
            return whole(place) if ranks.is_first else load_frame(place, dtype="float32")

        before, after = (
            trainer_of(
                config, make(), reference=make() if config.objective.kl_coefficient else None, ranks=ranks, device=torch.device("cpu")
            )
            for make in (whole, frame)
        )
        for step in range(2):
            one, other = shards(before), shards(after)
            assert one.keys() == other.keys()
            different = [n for n, tensor in one.items() if tensor.dtype != other[n].dtype or not torch.equal(tensor, other[n])]
            assert not different, (name, options, step, different)
            data = batch(seed=step, version=step, num_groups=2, group_size=2, longest=12)
            assert before.step(data).loss == after.step(data).loss
        assert torch.equal(flat(before), flat(after))
    assert shared_layout(Layout.PADDED if ranks.is_first else None) is Layout.PADDED


def test_a_model_that_the_first_rank_alone_has_loaded_is_shared_as_one_that_every_rank_has(tmp_path: Path) -> None:
    in_processes(loading, 2, tmp_path)


def test_the_frame_of_a_model_takes_no_memory_for_its_weights(tmp_path: Path) -> None:
    for name, make in MODELS.items():
        save_model(make(), tmp_path / name)
        frame, model = load_frame(tmp_path / name, dtype="float32"), load_model(tmp_path / name, dtype="float32")
        weights = dict(frame.named_parameters())
        assert [*weights] == [n for n, _ in model.named_parameters()]
        assert all(weight.is_meta or ".lora_" in n for n, weight in weights.items())
        assert [w.requires_grad for w in weights.values()] == [w.requires_grad for w in model.parameters()]
        buffers = dict(model.named_buffers())
        assert all(torch.equal(buffer, buffers[n]) for n, buffer in frame.named_buffers())


def test_a_rank_has_the_rows_from_its_first_to_the_next_ranks_first() -> None:
    class Tall:
        placements = (torch.distributed.tensor.Shard(0),)
        shape = (7, 2)

        class device_mesh:
            ndim = 1
            size = staticmethod(lambda: 3)

    assert [rows_of(Tall(), "w", rank) for rank in range(3)] == [(0, 3), (3, 6), (6, 7)]  # type: ignore[arg-type]
