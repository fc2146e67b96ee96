"""A step whose sums are added in one order. That its bits are equal on a GPU is tried by `midflight doctor --device cuda`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from midflight.config.load import load_config
from midflight.run.parts import TrainerSpec
from midflight.run.replay import step as replaying
from midflight.run.trainer import trainer_process
from midflight.trainer.model.determinism import WORKSPACE, compute_in_one_order

from .test_exactness import aged, move, objective


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(WORKSPACE, raising=False)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop(WORKSPACE, None)


@pytest.mark.usefixtures("put_back")
@pytest.mark.parametrize("name", ["default", "sapo, reference and entropy"])
def test_a_step_with_only_such_operations_is_the_same_step(name: str) -> None:
    before, loss, _ = move(aged(), objective(name))
    compute_in_one_order()
    assert torch.are_deterministic_algorithms_enabled() and os.environ[WORKSPACE] == ":4096:8"
    after, again, _ = move(aged(), objective(name))
    assert torch.equal(before, after) and loss == again


class Asked(Exception):
    pass


def ask() -> None:
    raise Asked


@pytest.mark.parametrize("wanted", [True, False])
def test_the_trainer_and_the_replay_of_its_steps_compute_so_if_the_run_asks_for_it(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(None, [f"trainer.deterministic={str(wanted).lower()}", f"run.folder={tmp_path}"])
    for module in (trainer_process, replaying):
        monkeypatch.setattr(module, "compute_in_one_order", ask)
    (tmp_path / "config.toml").write_text(f"[trainer]\ndeterministic = {str(wanted).lower()}\n")
    spec = TrainerSpec(config.model_dump_json(), "", "", "", rank=1)
    for deed in (
        lambda: asyncio.run(trainer_process.run_trainer(spec, None)),  # type: ignore[arg-type]
        lambda: replaying.replay_step(tmp_path, 1, lambda folder, config: None),  # type: ignore[arg-type,return-value]
    ):
        with pytest.raises(Exception) as found:  # without the option it goes on, and finds no run
            deed()
        assert (found.type is Asked) == wanted
