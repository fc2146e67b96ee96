"""A step whose sums are added in one order. That its bits are equal on a GPU is tried by `midflight doctor --device cuda`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from midflight.config.load import load_config
from midflight.run.parts import TrainerSpec
from midflight.run.replay import step as replaying
from midflight.run.trainer import trainer_process
from midflight.trainer import credit
from midflight.trainer.model.determinism import WORKSPACE, compute_in_one_order

from .test_exactness import LOSSES, aged, move, objective


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


class AsOnAGpu(TorchDispatchMode):
    """Refuses what torch refuses on a GPU under `torch.use_deterministic_algorithms(True)`, by the list in its docstring."""

    def __torch_dispatch__(self, called: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        name = called.overloadpacket.__name__
        refused = {
            "cumsum": lambda: given[0].is_floating_point(),
            "bincount": lambda: len(given) > 1 and given[1] is not None,
            "scatter_reduce": lambda: "prod" in given,
            "median": lambda: len(given) > 1,
        }
        listed = ("nll_loss", "nll_loss_forward", "histc", "put_", "ctc_loss", "_ctc_loss")
        if name in listed or (name in refused and refused[name]()):
            raise RuntimeError(f"{name} does not have a deterministic implementation")
        return called(*given, **(named or {}))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_step_uses_nothing_that_has_no_such_form_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_numpy = credit.answer_advantages

    def on_the_cpu(*given: Any) -> Any:  # wherever the step is
        with _disable_current_modes():
            return in_numpy(*given)

    monkeypatch.setattr(credit, "answer_advantages", on_the_cpu)
    with AsOnAGpu():
        move(aged(), objective(name))


def test_what_is_refused_on_a_gpu_is_found() -> None:
    with AsOnAGpu(), pytest.raises(RuntimeError, match="cumsum"):
        torch.ones(3).cumsum(0)
    with AsOnAGpu():
        torch.ones(3, dtype=torch.int64).cumsum(0)
