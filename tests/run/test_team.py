"""One trainer, or several as one."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.trainer.fixtures import batch, tiny_model, trainer
from tests.trainer.test_resharding import contents, on_ranks

from midflight.run.heartbeat import Heartbeat
from midflight.run.parts import PartLost
from midflight.run.trainer.team import Team, Wire, follow, together
from midflight.trainer.model.ranks import Ranks
from midflight.trainer.trainer import PolicyTrainer
from midflight.trajectories.packing import to_bytes


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


def step_as_a_team(folder: Path) -> None:
    """The first rank has the batches, and the other hears from it alone."""
    ranks = Ranks.joined()
    sent = list[int]()
    if not ranks.is_first:
        made = list[PolicyTrainer]()

        def make() -> PolicyTrainer:
            made.append(trainer(tiny_model(), ranks=ranks))
            return made[0]

        asyncio.run(follow(make, folder, keep=1, heartbeat=Heartbeat()))
        ours = made[0]
    else:
        ours = trainer(tiny_model(), ranks=ranks)
        team = Team(ours, folder, keep=1)
        give = Wire.give
        Wire.give = lambda self, rank, data: (sent.append(len(data)), give(self, rank, data))[1]  # type: ignore[assignment, method-assign]
        for version in range(2):
            team.step(batch(seed=version, version=version, longest=60, num_groups=24))
        team.end()
    found = contents(ours)
    if ranks.is_first:
        whole = [len(to_bytes(batch(seed=version, version=version, longest=60, num_groups=24))) for version in range(2)]
        assert all(part < 0.4 * all_of_it for part, all_of_it in zip(sent, whole, strict=True)), (sent, whole)
        alone = trainer(tiny_model())
        for version in range(2):
            alone.step(batch(seed=version, version=version, longest=60, num_groups=24))
        expected = contents_alone(alone)
        assert all(torch.allclose(found[name], value, rtol=0, atol=1e-6) for name, value in expected.items())


def contents_alone(of: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in of.model.named_parameters()}


def test_two_ranks_step_as_one_and_the_second_hears_less_than_half_of_each_batch(tmp_path: Path) -> None:
    on_ranks(2, partial(step_as_a_team, tmp_path), tmp_path)
