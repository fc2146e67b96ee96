"""Training adapters: the base stays as it is, and a checkpoint holds the adapters and their moments alone."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.models.tiny import tiny_adapted

from midflight.models.lora import base_tensors
from midflight.models.names import named_tensors
from midflight.trainer.checkpoint import load_checkpoint
from midflight.trainer.folders import latest_checkpoint

from .fixtures import batch, save_checkpoint, tiny_model, trainer


def test_steps_change_every_adapter_and_no_bit_of_the_base() -> None:
    ours = trainer(tiny_adapted(dtype="float64"))
    before = {name: tensor.clone() for name, tensor in named_tensors(ours.model).items()}
    for version in range(4):
        ours.step(batch(seed=version, version=version))
    assert all(not torch.equal(tensor, before[name]) for name, tensor in named_tensors(ours.model).items())
    base = base_tensors(tiny_model())
    assert all(torch.equal(tensor, base[name]) for name, tensor in base_tensors(ours.model).items())


def test_i8_a_run_of_adapters_goes_on_from_a_checkpoint_of_the_adapters_bit_for_bit(tmp_path: Path) -> None:
    straight, second = trainer(tiny_adapted(dtype="float64")), trainer(tiny_adapted(seed=9, dtype="float64"))
    straight.step(batch(seed=0, version=0))
    save_checkpoint(tmp_path, straight, cursor="", keep=1)
    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    stored = load_file(folder / "rank-00000.safetensors")
    assert {name.removeprefix("model/") for name in stored if name.startswith("model/")} == named_tensors(straight.model).keys()
    assert all("lora_" in name for name in stored if name.startswith("optimizer/"))
    load_checkpoint(folder, second)
    for one in (straight, second):
        one.step(batch(seed=1, version=1))
    assert all(torch.equal(tensor, named_tensors(second.model)[name]) for name, tensor in named_tensors(straight.model).items())
