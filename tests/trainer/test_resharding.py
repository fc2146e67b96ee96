"""Checkpoints written by some number of ranks and read by another: gloo on CPU, processes forked because to import torch again takes seconds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

from midflight.errors import CheckpointCorrupt, ConfigError
from midflight.trainer.checkpoint import load_checkpoint, parts_of, stage
from midflight.trainer.credit import Scoring
from midflight.trainer.critic import Valuation
from midflight.trainer.folders import latest_checkpoint
from midflight.trainer.model.ranks import Ranks
from midflight.trainer.optimizer import named_parameters
from midflight.trainer.trainer import PolicyTrainer

from .fixtures import save_checkpoint, tiny_model, trainer


def fresh(seed: int = 0) -> PolicyTrainer:
    """With a parameter of fewer rows than three ranks, a buffer without any, and a critic. Sharded, if there are other ranks."""
    model = tiny_model(seed=seed)
    model.scale = nn.Parameter(torch.full((2,), float(seed)))
    model.register_buffer("count", torch.tensor(seed))
    return trainer(model, ranks=Ranks.joined(), scoring=Scoring("gae"), valuation=Valuation())


def trained() -> PolicyTrainer:
    """With moments, from gradients that nobody made."""
    ours = fresh(seed=3)
    draw = torch.Generator().manual_seed(7)
    for _, _, model, optimizer in parts_of(ours):
        for _, parameter in named_parameters(model):
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=draw)
        for _ in range(2):
            optimizer.step()
    ours.version = ours.num_steps = 2
    return ours


def contents(of: PolicyTrainer) -> dict[str, Tensor]:
    """Weights and moments, whole. A collective."""
    found: dict[str, Tensor] = {}
    for prefix, weights, model, optimizer in parts_of(of):
        moments = {f"{key} of {name}": value for name, p in named_parameters(model) for key, value in optimizer.state[p].items()}
        found |= {prefix + name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in (weights | moments).items()}
    return found


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def read_and_write(source: Path, expected: dict[str, Tensor], target: Path) -> None:
    """Writes in the background, in a group of its own, while training goes on in the other."""
    ours = fresh(seed=dist.get_rank())
    assert load_checkpoint(source, ours).version == ours.version == 2
    check_same(contents(ours), expected)
    group = dist.new_group(backend="gloo")
    copied = stage(ours, cursor="row 5")
    with ThreadPoolExecutor() as threads:
        writing = threads.submit(copied.write, target, keep=1, group=group)
        with torch.no_grad():
            for _, _, model, _ in parts_of(ours):
                for parameter in model.parameters():
                    parameter.zero_()
                    dist.all_reduce(torch.ones(3))
        writing.result()
    folder = latest_checkpoint(target)
    assert folder is not None and load_checkpoint(folder, ours).cursor == "row 5", "on disk for every rank"
    check_same(contents(ours), expected)


def on_ranks(size: int, deed: Callable[[], None], folder: Path) -> None:
    """Does it on every rank; raises what one raises."""
    meeting = folder / f"meeting-{size}"
    start_processes(_join, args=(size, deed, f"file://{meeting}"), nprocs=size, start_method="fork")
    meeting.unlink()


def _join(rank: int, size: int, deed: Callable[[], None], meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    deed()
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return contents(trained())


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory, expected: dict[str, Tensor]) -> Path:
    """A checkpoint that two ranks wrote, of what they read from one that one rank wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    alone = save_checkpoint(folder / "one", trained(), cursor="", keep=1)
    on_ranks(2, partial(read_and_write, alone, expected, folder / "two"), folder)
    return folder / "two" / "version-00000002"


def test_two_ranks_write_a_file_each_and_one_rank_reads_them_bit_for_bit(of_two: Path, expected: dict[str, Tensor]) -> None:
    names = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors", "state.json"]
    assert sorted(path.name for path in of_two.iterdir()) == names
    ours = fresh()
    load_checkpoint(of_two, ours)
    check_same(contents(ours), expected)


def test_three_ranks_read_what_two_wrote_bit_for_bit(of_two: Path, expected: dict[str, Tensor], tmp_path: Path) -> None:
    on_ranks(3, partial(read_and_write, of_two, expected, tmp_path / "three"), tmp_path)


def test_a_shard_that_is_missing_is_refused_also_where_the_manifest_does_not_tell(of_two: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(of_two, folder)
    (folder / "rank-00001.safetensors").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"rank-00001.safetensors is missing"):
        load_checkpoint(folder, fresh())
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
    del manifest["files"]["rank-00001.safetensors"]
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(CheckpointCorrupt, match=r"rank-00001.safetensors is not in manifest.json"):
        load_checkpoint(folder, fresh())


def apart(folder: Path) -> None:
    """Each rank sees a disk of its own."""
    copied, mine = stage(fresh(), cursor=""), folder / f"machine-{dist.get_rank()}"
    if dist.get_rank():
        with pytest.raises(ConfigError, match=r"rank 1 does not see .*that all ranks share"):
            copied.write(mine, keep=1)
        dist.barrier()  # in place of the one it did not come to; its death would end the other's wait as well
    else:
        with pytest.raises(FileNotFoundError):
            copied.write(mine, keep=1)


def test_ranks_that_do_not_share_a_disk_are_told_so_and_no_checkpoint_comes_of_it(tmp_path: Path) -> None:
    on_ranks(2, partial(apart, tmp_path), tmp_path)
    assert latest_checkpoint(tmp_path / "machine-0") is None
