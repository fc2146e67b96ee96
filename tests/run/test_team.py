"""One trainer, or several as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.trainer.fixtures import tiny_model, trainer

from midflight.run.parts import PartLost
from midflight.run.trainer.team import Team, together


def test_alone_the_weights_handed_over_are_the_models_own(tmp_path: Path) -> None:
    model = tiny_model()
    team = Team(trainer(model), tmp_path, keep=1)
    tensors, storages = team.weights(), {p.data_ptr() for p in model.parameters()}
    assert tensors and all(isinstance(t, torch.Tensor) and t.data_ptr() in storages for t in tensors.values())
    team.end()


def test_a_broken_connection_is_another_ranks_death_and_any_other_error_is_ones_own() -> None:
    with pytest.raises(PartLost, match="another rank is gone"), together():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    with pytest.raises(RuntimeError, match="shapes") as caught, together():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not isinstance(caught.value, PartLost)
